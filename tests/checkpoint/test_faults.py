"""Every wrong input ends in one UserError of one line that names what is wrong."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specla_jax.checkpoint import convert, export, load_target
from specla_jax.errors import UserError

BF16 = jnp.dtype("bfloat16")


def silent(line: str) -> None:
    """Takes the place of print."""


def refused(src: Path, dst: Path) -> str:
    """The one line with which converting is refused; nothing may be left at or beside ``dst``."""
    before = set(dst.parent.iterdir()) if dst.parent.exists() else None
    with pytest.raises(UserError) as caught:
        convert(src, dst, report=silent)
    message = str(caught.value)
    assert "\n" not in message
    assert (set(dst.parent.iterdir()) if dst.parent.exists() else None) == before
    return message


def bad(array: np.ndarray, value: float) -> np.ndarray:
    """A copy of ``array`` with ``value`` somewhere."""
    array = array.copy()
    array.reshape(-1)[3] = value
    return array


def test_all_faults_in_one_line(make, gdn: Path, tmp_path: Path):
    layer = "model.layers.1"
    src = make(
        tensors={
            "model.norm.weight": None,
            f"{layer}.attn.q_proj.weight": None,
            f"{layer}.attn.E": np.zeros(2, np.float32),
            f"{layer}.attn.k_proj.weight": np.zeros((32, 63), np.float32),
            f"{layer}.mlp_norm.weight": bad(np.ones(64, np.float32), np.nan),
            f"{layer}.attn.A_log": np.array([0, np.inf], np.float32),
        }
    )
    line = (
        f"{src} does not fit its config.json: missing: {layer}.attn.q_proj.weight, model.norm.weight; "
        f"unexpected: {layer}.attn.E; wrong shape: {layer}.attn.k_proj.weight is [32, 63], must be [32, 64]; "
        f"not finite (NaN or infinity): {layer}.attn.A_log, {layer}.mlp_norm.weight"
    )
    assert refused(src, tmp_path / "dst") == line
    with pytest.raises(UserError, match=re.escape(line)):
        load_target(src)
    with pytest.raises(UserError, match=re.escape(line)):
        export(src, tmp_path / "dst")


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite(make, tmp_path: Path, dtype: np.dtype, value: float):
    # The very last leaf: everything else is written before it is seen.
    src = make(tensors={"lm_head.weight": bad(np.zeros((96, 64), dtype), value)})
    assert refused(src, tmp_path / "new" / "dst") == (
        f"{src} does not fit its config.json: not finite (NaN or infinity): lm_head.weight"
    )
    assert not (tmp_path / "new").exists()


def test_long_lists_are_cut(make, tmp_path: Path):
    src = make(config={"num_hidden_layers": 3})
    keys = "attn_norm.weight attn.q_proj.weight attn.k_proj.weight attn.v_proj.weight attn.g_proj.weight"
    keys += " attn.a_proj.weight attn.b_proj.weight attn.q_conv1d.weight"
    names = ", ".join(f"model.layers.2.{key}" for key in keys.split())
    assert refused(src, tmp_path / "dst") == f"{src} does not fit its config.json: missing: {names} and 10 more"


@pytest.mark.parametrize(
    ("name", "tensors", "config", "message"),
    [
        ("base", {"lm_head.weight": None}, {}, "missing: lm_head.weight"),
        (
            "tied",
            {"lm_head.weight": np.zeros((96, 64), np.float32)},
            {},
            "tie_word_embeddings is true but these differ: lm_head.weight, model.embeddings.weight",
        ),
        (
            "tied",
            {"lm_head.weight": np.zeros((95, 64), np.float32)},
            {},
            "wrong shape: lm_head.weight is [95, 64], must be [96, 64]",
        ),
        (
            "base",
            {"model.norm.weight": np.ones(64, np.int32)},
            {},
            "wrong dtype: model.norm.weight is I32, must be F32, BF16, F16",
        ),
        ("base", {"model.layers.0.attn.D.weight": np.zeros(2)}, {}, "unexpected: model.layers.0.attn.D.weight"),
        (
            "base",  # head_dim counts, not hidden_size / num_heads (32)
            {"model.layers.0.attn.q_conv1d.weight": np.zeros((64, 1, 4), np.float32)},
            {},
            "wrong shape: model.layers.0.attn.q_conv1d.weight is [64, 1, 4], must be [32, 1, 4]",
        ),
        (
            "base",
            {"model.layers.0.mlp.gate_proj.weight": np.zeros((512, 64), np.float32)},
            {},
            "wrong shape: model.layers.0.mlp.gate_proj.weight is [512, 64], must be [256, 64]",
        ),
    ],
)
def test_one_fault(make, tmp_path: Path, name: str, tensors, config, message: str):
    src = make(name, tensors, config)
    assert refused(src, tmp_path / "dst") == f"{src} does not fit its config.json: {message}"


def test_missing_shard(gdn: Path, tmp_path: Path):
    src = tmp_path / "src"
    src.mkdir()
    for name in ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (src / name).write_bytes((gdn / "legacy-shards" / name).read_bytes())
    index = src / "model.safetensors.index.json"
    assert refused(src, tmp_path / "dst") == (
        f"{index} names files that are not there: model-00002-of-00002.safetensors"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no weight_map; an index maps each tensor to its file"),
        ({"weight_map": {"a": "../model.safetensors"}}, "names '../model.safetensors', which is not a weight file"),
        ([], "must hold a JSON object, got list"),
    ],
)
def test_bad_index(make, tmp_path: Path, content, message: str):
    src = make()
    (src / "model.safetensors.index.json").write_text(json.dumps(content))
    assert message in refused(src, tmp_path / "dst")


def test_unreadable_safetensors(make, tmp_path: Path):
    src = make()
    file = src / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert refused(src, tmp_path / "dst").startswith(f"cannot read {file} as safetensors: ")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert refused(src, tmp_path / "dst").endswith("it is a Git LFS pointer, fetch the file itself (git lfs pull)")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3_next"}, "model_type must be 'gated_deltanet', got 'qwen3_next'"),
        ({"attn": {"layers": [1]}}, "config key 'attn' asks for softmax attention layers"),
        ({"conv_bias": True}, "config.json has unknown keys: conv_bias"),
    ],
)
def test_config_faults_name_the_file(make, tmp_path: Path, config, message: str):
    src = make(config=config)
    assert refused(src, tmp_path / "dst").startswith(f"{src / 'config.json'}: {message}")


def test_folders_of_no_kind(make, tmp_path: Path):
    dst = tmp_path / "dst"
    absent = tmp_path / "absent"
    expected = f"{absent} does not exist; name a converted folder or an fla checkpoint folder"
    assert refused(absent, dst) == expected
    with pytest.raises(UserError, match=re.escape(expected)):
        load_target(absent)

    src = make()
    file = src / "model.safetensors"
    assert refused(file, dst) == f"{file} is a file; name the folder that holds config.json and the weights"
    file.unlink()
    line = f"{src} has no weights; expected model.safetensors, model.safetensors.index.json, pytorch_model.bin"
    assert refused(src, dst) == f"{line} or a folder params"
    (src / "config.json").write_text("{")
    (src / "params").mkdir()
    with pytest.raises(UserError, match=re.escape(f"cannot read {src / 'config.json'} as JSON: ")):
        load_target(src)
    (src / "config.json").unlink()
    assert refused(src, dst) == f"{src} has no config.json; name a converted folder or an fla checkpoint folder"


def test_unknown_dtype(gdn: Path, tmp_path: Path):
    wrong: Any = "float16"
    for call in (
        lambda: convert(gdn / "base", tmp_path / "dst", dtype=wrong),
        lambda: export(gdn / "base", tmp_path / "dst", dtype=wrong),
        lambda: load_target(gdn / "base", wrong),
    ):
        with pytest.raises(UserError, match="dtype must be 'float32' or 'bfloat16', got 'float16'"):
            call()


def test_converted_folders_are_not_converted_again(gdn: Path, tmp_path: Path):
    first = tmp_path / "first"
    convert(gdn / "base", first, report=silent)
    line = f"{first} is converted already; decode from it as it is, or turn it back with: specla export"
    assert refused(first, tmp_path / "second") == line
    # Structure decides: what config.json says of itself does not.
    config = json.loads((first / "config.json").read_text())
    del config["specla"]
    (first / "config.json").write_text(json.dumps(config))
    assert refused(first, tmp_path / "second") == line


def test_damaged_converted_folder(gdn: Path, tmp_path: Path):
    folder = tmp_path / "dst"
    convert(gdn / "base", folder, report=silent)
    good = json.loads((folder / "config.json").read_text())

    (folder / "config.json").write_text(json.dumps({**good, "specla": {"format_version": 2}}))
    with pytest.raises(UserError, match="specla.format_version must be 1, got 2"):
        load_target(folder)
    (folder / "config.json").write_text(json.dumps({**good, "tie_word_embeddings": True, "vocab_size": 97}))
    with pytest.raises(UserError) as caught:
        load_target(folder)
    assert str(caught.value) == (
        f"{folder / 'params'} does not fit config.json: unexpected: lm_head/kernel; "
        "wrong shape: embeddings/embedding is [96, 64], must be [97, 64]"
    )
    (folder / "config.json").write_text(json.dumps(good))
    file = max(
        (file for file in (folder / "params").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    content = file.read_bytes()
    file.write_bytes(content[:100])
    rest = f"must have {len(content)}; copy or convert the model again"
    with pytest.raises(UserError, match=re.escape(f"{file} has 100 bytes, {rest}")):
        load_target(folder)
    file.unlink()
    with pytest.raises(UserError, match=re.escape(f"{file} is missing, {rest}")):
        export(folder, tmp_path / "fla")
    assert not (tmp_path / "fla").exists()
