"""The step of decoding over packed weights, against the model over its parameters."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import Reference, load_reference
from specla_jax.config import DraftConfig
from specla_jax.decode_step import DecodeStep, decode_weights
from specla_jax.drafters import EagleConfig, init_eagle, save_drafter
from specla_jax.generate import generate, prepare
from specla_jax.memory import nbytes
from specla_jax.model import GatedDeltaNetLM, call
from specla_jax.state import RecurrentState

PARENTS = np.array([[-1, 0, 0, 1, 2, 3, 3], [-1, 0, 1, 2, 0, 0, 0]], np.int32)
COUNTS = np.array([7, 4], np.int32)


@partial(jax.jit, static_argnums=0)
def both(parts, params, prompt, tokens):
    """What model and step make of a tree behind a prompt."""
    model, step = parts
    state = RecurrentState.zeros(model.config, 2, model.dtype)
    _, _, state = call(model, params, "prefill", prompt, None, state)
    tree = tokens, jnp.asarray(PARENTS), jnp.asarray(COUNTS), state
    weights = decode_weights(params, model.config, model.dtype)
    return [whole_sums(*made) for made in (call(model, params, "verify", *tree), step.verify(weights, *tree))]


def whole_sums(logits, features, factors):
    """The low part of a path sum is what rounding left of it: compared as part of the sum."""
    delta = factors.delta
    return logits, features, replace(factors, delta=replace(delta, log_decay_low=delta.log_decay + delta.log_decay_low))


def check_both(reference: Reference, dtype, feature_layers, bound: float) -> None:
    model = GatedDeltaNetLM(reference.model.config, dtype, feature_layers)
    layers = feature_layers or model.config.feature_layers
    step = DecodeStep(config=model.config, dtype=dtype, feature_layers=layers, implementation="reference")
    ids = jnp.asarray(reference.expected["input_ids"])
    expected, got = both((model, step), reference.model.params, ids[:, :12], ids[:, 12:19])
    assert jax.tree.structure(expected) == jax.tree.structure(got)
    real = np.arange(PARENTS.shape[1]) < COUNTS[:, None]
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        axis = [slice(None)] * (1 if one.shape[:2] != real.shape else 0)
        one, other = (np.asarray(x.astype(jnp.float32))[(*axis, real)] for x in (one, other))
        np.testing.assert_allclose(other, one, atol=bound * np.abs(one).max(), rtol=0)


def test_the_step_is_the_models(reference: Reference) -> None:
    """Logits, features and factors of the real nodes."""
    check_both(reference, "float32", None, 1e-5)


def test_the_step_in_bfloat16_with_other_features(base: Reference) -> None:
    check_both(base, "bfloat16", (0, 1, 1), 0.02)


@pytest.mark.parametrize("name", ["gva", "tied", "no-conv"])
def test_greedy_tokens(name: str) -> None:
    reference = load_reference(name)
    draft = DraftConfig(depth=3, branch=2, nodes=6)
    for method, options in (("ar", {}), ("tree", {"draft": draft})):
        result = generate(
            reference.model, reference.prompts, method=method, packed="reference", max_new_tokens=32, **options
        )
        assert result.tokens == [tokens[:32] for tokens in reference.greedy], method


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_a_drafter_over_packed_weights(base: Reference, tmp_path: Path, draft_vocab_size) -> None:
    """The same text, and of random weights the same drafts accepted."""
    config = EagleConfig(
        hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64, target_hidden_size=64,
        target_num_hidden_layers=2, target_vocab_size=96, window=24, draft_vocab_size=draft_vocab_size,
    )  # fmt: skip
    save_drafter(init_eagle(jax.random.key(0), config), config, tmp_path)
    options = {"method": "tree", "drafter": tmp_path, "draft": DraftConfig(depth=3, branch=3, nodes=12)}
    plain, packed = (
        generate(base.model, base.prompts, **options, max_new_tokens=48, packed=name) for name in (None, "reference")
    )
    assert packed.tokens == plain.tokens == [tokens[:48] for tokens in base.greedy]
    assert packed.accepted_at_depth == plain.accepted_at_depth
    assert sum(packed.accepted) > 0


def test_packed_weights_are_made_once_and_counted(base: Reference) -> None:
    model = base.model
    packed = prepare(model, base.prompts, method="ar", packed="reference")
    plain = prepare(model, base.prompts, method="ar")
    assert packed.params.decode is model.decode_weights
    assert plain.params.decode is None
    more = packed.bytes["weights"] - plain.bytes["weights"]
    assert more == nbytes((model.params, model.decode_weights)) - nbytes(model.params)
    matrices = nbytes(model.params) - nbytes(model.params["embeddings"])
    assert 0.9 * matrices < more < 1.5 * matrices  # rows are filled up to 64
    assert model.decode_weights.embeddings is model.params["embeddings"]["embedding"]


def test_kernels_that_cannot_run_here_are_refused(base: Reference) -> None:
    with pytest.raises(ValueError, match="'mosaic_gpu' of stream_matmul cannot run: it needs an NVIDIA GPU"):
        prepare(base.model, base.prompts, method="ar", packed="mosaic_gpu")
