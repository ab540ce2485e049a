"""Chunked prefill against the float64 recurrence."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import gdn_prefill
from tests.kernels.oracle import error, random_inputs, run_chain

BOUND = 2e-6
_prefill = jax.jit(gdn_prefill)


def prefill(*args) -> tuple[np.ndarray, np.ndarray]:
    o, state = _prefill(*args)
    return np.asarray(o), np.asarray(state)


@pytest.mark.parametrize("decay", ["weak", "mixed"])
def test_ragged_lengths(decay):
    """Known faults B2, B4, B5: lengths around the chunk edges, short ones and none at all, in one batch."""
    lengths = np.array([0, 1, 2, 3, 63, 64, 65, 127, 128, 129], np.int32)
    inputs = random_inputs(np.random.default_rng(0), len(lengths), 140, decay=decay)
    padding = (np.arange(140) >= lengths[:, None])[..., None]
    v = np.where(padding[..., None], np.float32(1e30), inputs.v)
    log_decay = np.where(padding, np.float32(-7), inputs.log_decay)
    inputs = replace(inputs, v=v, log_decay=log_decay)
    o, state = prefill(*inputs.args(), lengths)
    for b, length in enumerate(lengths):
        true_o, true_state = run_chain(inputs, b, length)
        assert error(state[b], true_state) < BOUND
        assert not o[b, length:].any()
        if length:
            assert error(o[b, :length], true_o) < BOUND
    np.testing.assert_array_equal(state[0], inputs.state[0])


@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_whole_rows(tokens):
    """Without lengths, with fewer tokens than a chunk and with more."""
    inputs = random_inputs(np.random.default_rng(1), 2, tokens, decay="strong")
    o, state = prefill(*inputs.args())
    for b in range(2):
        true_o, true_state = run_chain(inputs, b)
        assert error(o[b], true_o) < BOUND
        assert error(state[b], true_state) < BOUND


def test_split_anywhere():
    """Known fault A12: a prompt of 70 in two parts equals the whole, wherever it is cut."""
    inputs = random_inputs(np.random.default_rng(2), 1, 70, decay="weak")
    true_o, true_state = run_chain(inputs)
    for cut in (1, 2, 3, 4, 63, 64, 65, 69):

        def part(start: int, length: int, state: np.ndarray):
            tokens = [np.resize(x[:, start : start + length], (1, 70, *x.shape[2:])) for x in inputs.args()[:5]]
            o, state = prefill(*tokens, state, np.array([length], np.int32))
            return o[:, :length], state

        first, state = part(0, cut, inputs.state)
        second, state = part(cut, 70 - cut, state)
        assert error(np.concatenate([first, second], 1)[0], true_o) < BOUND, cut
        assert error(state[0], true_state) < BOUND, cut


def test_extremes_stay_finite_with_gradients():
    """Known fault H12: g = -50, one key for all tokens, beta 1 and 2; padding has no gradient."""
    inputs = random_inputs(np.random.default_rng(3), 5, 70, correlation=1.0, decay="none")
    inputs.log_decay[2:4] = -50
    inputs.beta[::2], inputs.beta[1::2] = 1, 2
    lengths = np.array([70, 70, 70, 70, 0], np.int32)

    def loss(*args):
        o, state = gdn_prefill(*args, lengths)
        return jnp.sum(o**2) + jnp.sum(state**2)

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(6))))(*inputs.args())
    assert np.isfinite(value)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    assert not any(np.asarray(gradient[4]).any() for gradient in gradients[:5])


def test_gradient_is_that_of_the_recurrence():
    inputs = random_inputs(np.random.default_rng(4), 1, 21, decay="strong", heads=1, value_heads=2, dk=4, dv=3)

    def chunked(*args):
        o, state = gdn_prefill(*args, chunk=8)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(state))

    def serial(q, k, v, log_decay, beta, state):
        def step(s, x):
            q, k, v, log_decay, beta = x  # q, k [dk], one key head for all
            s = jnp.exp(log_decay)[:, None, None] * s
            s = s + k[:, None] * (beta[:, None] * (v - jnp.einsum("hkv,k->hv", s, k)))[:, None, :]
            return s, jnp.einsum("hkv,k->hv", s, q) * q.shape[-1] ** -0.5

        s, o = jax.lax.scan(step, state[0], (q[0, :, 0], k[0, :, 0], v[0], log_decay[0], beta[0]))
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(s))

    wanted = jax.jit(jax.grad(serial, argnums=tuple(range(6))))(*inputs.args())
    got = jax.jit(jax.grad(chunked, argnums=tuple(range(6))))(*inputs.args())
    for one, other in zip(got, wanted, strict=True):
        assert error(one, np.asarray(other, np.float64)) < 1e-5


def test_bf16_inputs():
    inputs = random_inputs(np.random.default_rng(5), 2, 9, decay="weak")
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (inputs.q, inputs.k, inputs.v))
    gates = (inputs.log_decay, inputs.beta, inputs.state)
    o, state = prefill(q, k, v, *gates)
    o_wide, state_wide = prefill(*(x.astype(jnp.float32) for x in (q, k, v)), *gates)
    assert o.dtype == jnp.bfloat16
    np.testing.assert_array_equal(o, o_wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(state, state_wide)


def test_wrong_arguments_are_named():
    inputs = random_inputs(np.random.default_rng(6), 2, 3)
    with pytest.raises(ValueError, match="chunk must be 8, 16, 32, 64 or 128, got 48"):
        gdn_prefill(*inputs.args(), chunk=48)
    with pytest.raises(ValueError, match=r"lengths must be \[B\] = \[2\], got \[1\]"):
        gdn_prefill(*inputs.args(), lengths=np.array([3], np.int32))
    with pytest.raises(ValueError, match="at least one token"):
        gdn_prefill(*inputs.tokens(slice(0, 0)).args())
