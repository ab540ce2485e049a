"""Drafter folders: kept exactly, mapped from old names, or refused with the list."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specla_jax.config import DraftConfig
from specla_jax.drafters import EagleConfig, EagleDrafter, get_drafter, init_eagle, load_drafter, save_drafter
from specla_jax.errors import UserError
from specla_jax.target import TargetIdentity

CONFIG = EagleConfig(
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=12,
    target_hidden_size=8,
    target_num_hidden_layers=3,
    target_vocab_size=20,
    target_vocabulary_hash="abc",
    draft_vocab_size=5,
    feature_norm=False,
)
EMBEDDING = np.arange(160, dtype=np.float32).reshape(20, 8)


def target_of(**changes):
    identity = TargetIdentity(hidden_size=8, num_hidden_layers=3, vocab_size=20, vocabulary_hash="abc")
    params = {"embeddings": {"embedding": jnp.asarray(EMBEDDING)}, "lm_head": {"kernel": jnp.ones((8, 20))}}
    return SimpleNamespace(identity=replace(identity, **changes), params=params, dtype="float32")


@pytest.fixture
def folder(tmp_path):
    save_drafter(init_eagle(jax.random.key(0), CONFIG), CONFIG, tmp_path / "drafter")
    return tmp_path / "drafter"


def edit(folder, rename=None, **changes):
    """Replaces tensors (None removes one); ``rename`` maps the whole file."""
    file = folder / "model.safetensors"
    flat = {name.replace(".", "__"): value for name, value in load_file(file).items()} | changes
    flat = {name.replace("__", "."): value for name, value in flat.items() if value is not None}
    save_file({n: np.ascontiguousarray(v) for n, v in (rename(flat) if rename else flat).items()}, file)


def old_names(flat):
    """The same weights under the names of EAGLE files, with the draft vocabulary as offsets."""
    names = {
        "fc.kernel": "fc",
        "embedding_norm.scale": "midlayer.input_layernorm",
        "hidden_norm.scale": "midlayer.hidden_norm",
        "mlp_norm.scale": "midlayer.post_attention_layernorm",
        "mlp.down_proj.kernel": "midlayer.mlp.down_proj",
        "norm.scale": "norm",
        "lm_head.kernel": "lm_head",
    } | {f"attn.{x}_proj.kernel": f"midlayer.self_attn.{x}_proj" for x in "qkvo"}
    old = {f"{new}.weight": flat[name].T for name, new in names.items()}
    gate, up = np.split(flat["mlp.gate_up_proj.kernel"].T, 2)
    mapping = flat["draft_to_target"].astype(np.int64)
    kept = np.zeros(20, bool)
    kept[mapping] = True
    return old | {
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "d2t": mapping - np.arange(5),
        "t2d": kept,
    }


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, draft_vocab_size=None, feature_norm=True, window=7)])
def test_saved_and_loaded_is_bit_equal(tmp_path, config, dtype):
    params = init_eagle(jax.random.key(0), config, dtype)
    save_drafter(params, config, tmp_path / "new" / "drafter")
    loaded_config, loaded = load_drafter(tmp_path / "new" / "drafter", target_of())
    assert loaded_config == config
    same(loaded, params)
    assert sorted(file.name for file in (tmp_path / "new" / "drafter").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_get_drafter_binds_what_the_drafter_needs(folder, tmp_path):
    target, draft = target_of(), DraftConfig(depth=2, nodes=3)
    drafter, params = get_drafter(str(folder), draft, target)
    assert drafter == EagleDrafter(draft=draft, config=CONFIG, dtype="float32")
    assert params.keys() == {"eagle", "embedding", "temperature"}  # a reduced draft vocabulary has its own head
    whole = replace(CONFIG, draft_vocab_size=None)
    save_drafter(init_eagle(jax.random.key(0), whole), whole, tmp_path / "whole")
    assert get_drafter(tmp_path / "whole", draft, target)[1]["head"] is target.params["lm_head"]["kernel"]


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_old_names_are_mapped(folder, prefix):
    expected = load_drafter(folder, target_of())[1]
    edit(folder, lambda flat: {name.replace("midlayer.", prefix): value for name, value in old_names(flat).items()})
    same(load_drafter(folder, target_of())[1], expected)


def test_old_file_with_its_own_embedding(folder):
    edit(folder, lambda flat: old_names(flat) | {"embed_tokens.weight": EMBEDDING})
    load_drafter(folder, target_of())
    edit(folder, lambda flat: flat | {"embed_tokens.weight": EMBEDDING + 1})
    with pytest.raises(UserError, match="embed_tokens.weight differs from the target's embedding"):
        load_drafter(folder, target_of())


def test_old_file_that_cannot_be_mapped_is_refused_with_the_list(folder):
    def spoil(flat):
        old = old_names(flat) | {"midlayer.extra.weight": np.ones(3, np.float32), "t2d": np.arange(20) < 5}
        return {name: value for name, value in old.items() if "up_proj" not in name and name != "norm.weight"}

    edit(folder, spoil)
    with pytest.raises(UserError) as error:
        load_drafter(folder, target_of())
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "d2t and t2d disagree",
        "unknown tensors midlayer.extra.weight, midlayer.mlp.gate_proj.weight",
        "missing tensors mlp.gate_up_proj.kernel, norm.scale",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__kernel": None, "norm__scale": None}, "missing tensors fc.kernel, norm.scale"),
        ({"more": np.ones(2, np.float32)}, "unexpected tensors more"),
        ({"norm__scale": np.ones(9, np.float32)}, r"norm.scale must have shape \(8,\), got \(9,\)"),
        ({"norm__scale": np.ones(8, np.int32)}, "norm.scale must be floating point, got int32"),
        ({"norm__scale": np.full(8, np.nan, np.float32)}, "norm.scale has values that are not finite"),
        ({"draft_to_target": np.array([0, 1, 2, 3, 20], np.int32)}, "draft_to_target must lie in 0 to 19"),
        ({"draft_to_target": np.array([0, 1, 2, 3, 3], np.int32)}, "draft_to_target names a token twice"),
        ({"draft_to_target": np.arange(5)}, "draft_to_target must be int32, got int64"),
    ],
)
def test_wrong_tensors_are_named(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(UserError, match=message):
        load_drafter(folder, target_of())


def test_another_target_is_refused_with_every_difference(folder):
    other = target_of(hidden_size=16, num_hidden_layers=4, vocab_size=21, vocabulary_hash="xyz")
    with pytest.raises(UserError) as error:
        load_drafter(folder, other)
    assert str(error.value).endswith(
        "is a drafter for another target (hidden size 8, not 16; num hidden layers 3, not 4; vocab size 20, not 21; "
        "vocabulary hash abc, not xyz); use one that was trained for this target"
    )
    with pytest.raises(UserError, match=r"\(vocabulary hash abc, not xyz\)"):
        load_drafter(folder, target_of(vocabulary_hash="xyz"))
    load_drafter(folder, target_of(vocabulary_hash=None))  # nothing to compare with


def test_broken_files_are_named(folder):
    settings, weights = folder / "config.json", folder / "model.safetensors"
    good = json.loads(settings.read_text())
    cases = [
        ("{", "config.json is not valid JSON"),
        (json.dumps(good | {"model_type": "llama"}), "model_type must be 'specla_eagle', got 'llama'"),
        (json.dumps(good | {"top": 1}), "config.json has the unknown keys top"),
        (json.dumps({k: v for k, v in good.items() if k != "head_dim"}), "config.json lacks the keys head_dim"),
        (json.dumps(good | {"window": -1}), "config.json: window must be a positive integer, got -1"),
        (json.dumps(good | {"rope_theta": "a"}), "config.json: .*not supported"),
    ]
    for text, message in cases:
        settings.write_text(text)
        with pytest.raises(UserError, match=message):
            load_drafter(folder, target_of())
    settings.write_text(json.dumps(good))
    weights.write_bytes(b"not tensors")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_drafter(folder, target_of())
    weights.unlink()
    with pytest.raises(UserError, match="model.safetensors does not exist"):
        load_drafter(folder, target_of())


def test_parameters_of_another_shape_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="missing tensors draft_to_target, lm_head.kernel"):
        save_drafter(init_eagle(jax.random.key(0), replace(CONFIG, draft_vocab_size=None)), CONFIG, tmp_path)
    assert list(tmp_path.iterdir()) == []
