"""Where each fla tensor lands in the parameter tree."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from specla_jax.checkpoint import convert, load_target, parameter_shapes
from specla_jax.checkpoint.layout import flatten
from specla_jax.config import TargetConfig

SIZES = {"vocab_size": 11, "hidden_size": 6, "num_hidden_layers": 1, "num_heads": 2, "num_v_heads": 4, "head_dim": 3}


def test_parameter_shapes():
    config = TargetConfig(**SIZES, head_v_dim=5, intermediate_size=7, conv_size=3)
    # D 6, H*dk 6, HV*dv 20, HV 4, I 7, W 3
    assert parameter_shapes(config) == {
        "embeddings/embedding": (11, 6),
        "layers_0/attn_norm/scale": (6,),
        "layers_0/attn/in_proj/kernel": (6, 6 + 6 + 20 + 20 + 4 + 4),
        "layers_0/attn/conv/kernel": (3, 6 + 6 + 20),
        "layers_0/attn/A_log": (4,),
        "layers_0/attn/dt_bias": (4,),
        "layers_0/attn/o_norm/scale": (5,),
        "layers_0/attn/o_proj/kernel": (20, 6),
        "layers_0/mlp_norm/scale": (6,),
        "layers_0/mlp/gate_up_proj/kernel": (6, 14),
        "layers_0/mlp/down_proj/kernel": (7, 6),
        "norm/scale": (6,),
        "lm_head/kernel": (6, 11),
    }


def test_parameter_shapes_without_options():
    off = {"use_gate": False, "use_short_conv": False, "tie_word_embeddings": True}
    config = TargetConfig(**SIZES, head_v_dim=5, intermediate_size=7, **off)
    shapes = parameter_shapes(config)
    assert shapes["layers_0/attn/in_proj/kernel"] == (6, 6 + 6 + 20 + 4 + 4)
    assert "layers_0/attn/conv/kernel" not in shapes
    assert "lm_head/kernel" not in shapes


def test_columns_of_fused_leaves(gdn: Path):
    raw = load_file(gdn / "gva" / "model.safetensors")
    params = flatten(load_target(gdn / "gva").params)
    layer = "model.layers.1"
    parts = [raw[f"{layer}.attn.{name}_proj.weight"].T for name in "qkvgab"]
    np.testing.assert_array_equal(params["layers_1/attn/in_proj/kernel"], np.concatenate(parts, axis=1))
    gate, up = (raw[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    np.testing.assert_array_equal(params["layers_1/mlp/gate_up_proj/kernel"], np.concatenate([gate, up], axis=1))
    np.testing.assert_array_equal(params["layers_1/attn/o_proj/kernel"], raw[f"{layer}.attn.o_proj.weight"].T)
    np.testing.assert_array_equal(params["lm_head/kernel"], raw["lm_head.weight"].T)
    np.testing.assert_array_equal(params["embeddings/embedding"], raw["model.embeddings.weight"])

    conv = np.asarray(params["layers_1/attn/conv/kernel"])  # [W, C]
    taps = np.concatenate([raw[f"{layer}.attn.{name}_conv1d.weight"] for name in "qkv"])  # [C, 1, W]
    np.testing.assert_array_equal(conv[-1], taps[:, 0, -1])  # the last tap stays last: it is the current token
    np.testing.assert_array_equal(conv, taps[:, 0].T)


def test_fused_gate_proj_is_gate_first(make, gdn: Path, tmp_path: Path):
    raw = load_file(gdn / "legacy-shards" / "model-00001-of-00002.safetensors")
    raw |= load_file(gdn / "legacy-shards" / "model-00002-of-00002.safetensors")
    halves: dict[str, np.ndarray] = {}
    for layer in (0, 1):
        key = f"model.layers.{layer}.mlp"
        gate, up = np.split(raw[f"{key}.gate_proj.weight"], 2)
        halves |= {f"{key}.gate_proj.weight": gate, f"{key}.up_proj.weight": up}
    split = make("legacy-shards", halves)
    notes: list[str] = []
    convert(gdn / "legacy-shards", tmp_path / "fused", report=notes.append)
    convert(split, tmp_path / "split", report=lambda line: None)
    assert f"note: {gdn / 'legacy-shards'}: read 2 fused mlp.gate_proj, gate rows first" in notes
    fused, split = (flatten(load_target(tmp_path / name).params) for name in ("fused", "split"))
    for path, leaf in split.items():
        np.testing.assert_array_equal(leaf, fused[path], err_msg=path)


@pytest.mark.parametrize(("value", "note"), [(0.0, "all zero"), (0.5, "not all zero")])
def test_legacy_d_is_dropped_with_a_note(make, tmp_path: Path, value: float, note: str):
    src = make(tensors={"model.layers.1.attn.D": np.full(2, value, np.float32)})
    notes: list[str] = []
    convert(src, tmp_path / "dst", report=notes.append)
    assert notes[0] == f"note: {src}: dropped 1 legacy tensors attn.D ({note}; the model never reads them)"
