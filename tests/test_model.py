"""The target against the reference implementation, and against itself under padding and splitting."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import GDN, Reference
from specla_jax.checkpoint import load_target, parameter_shapes
from specla_jax.config import TargetConfig
from specla_jax.errors import UserError
from specla_jax.model import GatedDeltaNetLM
from specla_jax.state import RecurrentState, recover


@partial(jax.jit, static_argnums=0)
def run_prefill(model: GatedDeltaNetLM, params, tokens, lengths, state):
    hidden, _, state = model.apply({"params": params}, tokens, lengths, state, method="prefill")
    return model.apply({"params": params}, hidden, method="head"), state


@partial(jax.jit, static_argnums=0)
def run_verify(model: GatedDeltaNetLM, params, tokens, parents, num_nodes, state):
    return model.apply({"params": params}, tokens, parents, num_nodes, state, method="verify")


def prefill(reference: Reference, tokens, lengths, state=None):
    """Logits at every position and the state, by one program for all tokens of one shape."""
    model = GatedDeltaNetLM(reference.model.config)
    if state is None:
        state = RecurrentState.zeros(reference.model.config, len(tokens), "float32")
    lengths = None if lengths is None else np.asarray(lengths)
    tokens = np.array(tokens)  # a copy: the caller may write over its own while the program reads
    return run_prefill(model, reference.model.params, tokens, lengths, state)


def test_logits_and_states_of_the_reference(reference: Reference) -> None:
    """150 positions of both rows; the state at the end; the conv window holds the reference's last columns."""
    logits, state = prefill(reference, reference.expected["input_ids"], None)
    np.testing.assert_allclose(logits, reference.expected["logits"], atol=5e-4, rtol=0)
    for layer in range(reference.model.config.num_hidden_layers):
        np.testing.assert_allclose(state.S[layer], reference.expected[f"recurrent_state.{layer}"], atol=5e-5, rtol=0)
        if state.conv is None:
            assert not reference.model.config.use_short_conv
            continue
        columns = np.concatenate([reference.expected[f"conv_state.{part}.{layer}"] for part in "qkv"], axis=1)
        np.testing.assert_allclose(state.conv[layer], columns[:, :, 1:].transpose(0, 2, 1), atol=5e-5, rtol=0)


@pytest.mark.parametrize("pad", [0, 5, 95, 10**6, -1])
def test_padding_touches_nothing(base: Reference, pad: int) -> None:
    """A prompt of 17 in a bucket of 64 leaves the state of 17 tokens, whatever the pad id; a row of 0 none."""
    ids = np.asarray(base.expected["input_ids"])
    padded = np.full((3, 64), pad)
    padded[0, :17], padded[1, :2] = ids[0, :17], ids[1, :2]
    logits, state = prefill(base, padded, [17, 2, 0])
    for row, length in ((0, 17), (1, 2)):
        alone_logits, alone = prefill(base, ids[row : row + 1, :length], None)
        np.testing.assert_allclose(logits[row, :length], alone_logits[0], atol=1e-4)
        np.testing.assert_allclose(state.S[:, row], alone.S[:, 0], atol=1e-5)
        np.testing.assert_allclose(state.conv[:, row], alone.conv[:, 0], atol=1e-5)
    assert not state.S[:, 2].any()
    assert not state.conv[:, 2].any()


@pytest.mark.parametrize("split", [1, 2, 3, 4, 63, 64, 65, 69])
def test_a_prompt_may_be_split_anywhere(base: Reference, split: int) -> None:
    ids = np.asarray(base.expected["input_ids"])[:, :70]
    whole_logits, whole = prefill(base, ids, None)
    padded = np.zeros((2, 70), np.int32)
    padded[:, :split] = ids[:, :split]
    _, state = prefill(base, padded, [split] * 2)
    padded[:, : 70 - split] = ids[:, split:]
    logits, state = prefill(base, padded, [70 - split] * 2, state)
    np.testing.assert_allclose(logits[:, : 70 - split], whole_logits[:, split:], atol=2e-4)
    np.testing.assert_allclose(state.S, whole.S, atol=1e-5)
    np.testing.assert_allclose(state.conv, whole.conv, atol=1e-5)


def test_verification_continues_a_filled_state(base: Reference) -> None:
    """Five tokens after twenty: a chain of five gives the prefill's logits, and recovering it the prefill's state."""
    ids = jnp.asarray(base.expected["input_ids"])
    _, state = prefill(base, ids[:, :20], None)
    expected_logits, expected = prefill(base, ids[:, :25], None)
    model = GatedDeltaNetLM(base.model.config)
    parents = jnp.broadcast_to(jnp.arange(5) - 1, (2, 5))
    nodes = jnp.full(2, 5)
    logits, _, factors = run_verify(model, base.model.params, ids[:, 20:25], parents, nodes, state)
    np.testing.assert_allclose(logits, expected_logits[:, 20:], atol=2e-4)
    fold = jax.jit(recover)
    recovered = fold(state, factors, parents, nodes - 1)
    np.testing.assert_allclose(recovered.S, expected.S, atol=1e-5)
    np.testing.assert_allclose(recovered.conv, expected.conv, atol=1e-5)
    untouched = fold(state, factors, parents, jnp.full(2, -1))
    np.testing.assert_array_equal(untouched.S, state.S)
    np.testing.assert_array_equal(untouched.conv, state.conv)


def test_bfloat16_keeps_state_factors_and_logits_in_float32() -> None:
    model = load_target(GDN / "bf16", dtype="bfloat16")
    network = GatedDeltaNetLM(model.config, "bfloat16")
    state = RecurrentState.zeros(model.config, 2, "bfloat16")
    tokens, nodes = jnp.ones((2, 4), jnp.int32), jnp.full(2, 4)
    parents = jnp.broadcast_to(jnp.arange(4) - 1, (2, 4))
    logits, features, factors = run_verify(network, model.params, tokens, parents, nodes, state)
    assert logits.dtype == state.S.dtype == factors.delta.value.dtype == factors.delta.log_decay.dtype == jnp.float32
    assert features.dtype == state.conv.dtype == factors.conv.dtype == factors.delta.key.dtype == jnp.bfloat16
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        gate = path[-1].key in ("A_log", "dt_bias")
        assert leaf.dtype == (jnp.float32 if gate else jnp.bfloat16), path
    # And bfloat16 stays near float32.
    exact = load_target(GDN / "bf16", dtype="float32")
    expected = jax.jit(GatedDeltaNetLM(exact.config).apply)({"params": exact.params}, tokens)
    assert float(jnp.abs(logits - expected).max()) < 0.3


def test_gradients_are_finite_with_padding(base: Reference) -> None:
    model = GatedDeltaNetLM(base.model.config)
    tokens = jnp.zeros((2, 9), jnp.int32).at[:, :3].set(7)

    @jax.jit
    def loss(params):
        return model.apply({"params": params}, tokens, jnp.asarray([3, 0]))[:, :3].sum()

    for leaf in jax.tree.leaves(jax.grad(loss)(base.model.params)):
        assert jnp.isfinite(leaf).all()


def test_initial_parameters_have_the_checkpoints_layout(reference: Reference) -> None:
    config = reference.model.config
    made = jax.eval_shape(GatedDeltaNetLM(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    assert jax.tree.structure(made) == jax.tree.structure(reference.model.params)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, reference.model.params)
    assert len(parameter_shapes(config)) == len(jax.tree.leaves(made))


def fla_config(**changes) -> dict:
    return json.loads((GDN / "base" / "config.json").read_text()) | changes


def test_sizes_are_derived_as_fla_derives_them() -> None:
    config = TargetConfig.from_fla(fla_config(hidden_size=2048, head_dim=256, expand_v=1, hidden_ratio=4))
    assert (config.intermediate_size, config.head_v_dim, config.num_v_heads) == (5632, 256, 2)
    assert TargetConfig.from_fla(fla_config(hidden_size=1024)).intermediate_size == 2816
    assert TargetConfig.from_fla(fla_config(head_dim=16, expand_v=0.75)).head_v_dim == 12
    assert TargetConfig.from_fla(fla_config(num_v_heads=6)).num_v_heads == 6
    assert TargetConfig.from_fla(config.to_fla("float32")) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'gated_deltanet', got 'llama'"),
        ({"attn": {"layers": [1]}}, "config key 'attn' asks for softmax attention layers"),
        ({"attnres_block_size": 4}, "attention residuals"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'swish', got 'gelu'"),
        ({"expand_v": 0.3}, "head_dim * expand_v must be an integer, got 16 * 0.3"),
        ({"num_v_heads": 3}, "num_v_heads must be a multiple of num_heads=2, got 3"),
        ({"conv_size": 6}, "conv_size must be 2 to 5, got 6"),
        ({"num_heads": 0}, "num_heads must be a positive integer, got 0"),
        ({"use_magic": True}, "config.json has unknown keys: use_magic"),
        ({"norm_first": True}, "norm_first=true"),
    ],
)
def test_configurations_that_cannot_run_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        TargetConfig.from_fla(fla_config(**change))
    assert message in str(error.value)
