"""The kernels of prefill: interpreted against the float64 recurrence, lowered for a GPU, and run on one where it is.

Bounds for bf16 q, k, v. The state is nearly that of fp32 (2e-5 after a thousand tokens). Outputs: rounding them to bf16
costs 1.7e-3, the products that shape them as much again, up to three times that where keys are all alike.
"""

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import gdn_prefill
from kernels_pallas.gdn_prefill import triton
from kernels_pallas.gdn_prefill.tiles import REVERSE, SCAN
from kernels_pallas.tiles import Tile
from tests.kernels.lowering import TRITON_CALL, lower_for_cuda
from tests.kernels.oracle import Inputs, error, random_inputs, run_chain

SMALL = Tile(columns=16)
STATE_BOUND, OUTPUT_BOUND, GRADIENT_BOUND = 5e-5, 7e-3, 1.2e-2
LENGTHS = np.array([0, 1, 63, 64, 65, 130], np.int32)
TILES = tuple({rule.tile: None for table in (SCAN, REVERSE) for rules in table.values() for rule in rules})
each_tile = pytest.mark.parametrize("tile", TILES, ids=repr)


def narrowed(inputs: Inputs) -> Inputs:
    """The same with q, k and v rounded to bf16, in fp32: what the kernels are given, for the oracle."""
    return replace(
        inputs, **{name: getattr(inputs, name).astype(jnp.bfloat16).astype(np.float32) for name in ("q", "k", "v")}
    )


def arguments(inputs: Inputs) -> tuple:
    return *(jnp.asarray(x, jnp.bfloat16) for x in inputs.args()[:3]), *inputs.args()[3:]


@partial(jax.jit, static_argnames=("tile", "interpret"))
def prefill(q, k, v, log_decay, beta, state, lengths=None, tile=SMALL, interpret=True):
    scale = q.shape[-1] ** -0.5
    return triton.gdn_prefill(
        q, k, v, log_decay, beta, state, lengths, scale, 64, tile=tile, reverse_tile=tile, interpret=interpret
    )


def check(inputs: Inputs, o, state, lengths, output_bound=OUTPUT_BOUND) -> None:
    o, state = np.asarray(o, np.float32), np.asarray(state)
    for b, length in enumerate(lengths):
        true_o, true_state = run_chain(inputs, b, length)
        assert error(state[b], true_state) < STATE_BOUND
        assert not o[b, length:].any()
        if length:
            assert error(o[b, :length], true_o) < output_bound


@each_tile
@pytest.mark.parametrize("decay", ["weak", "mixed"])
def test_ragged_lengths(tile, decay):
    """Lengths around the chunk edges and none at all in one batch; three value heads on each key head, dk is not dv."""
    inputs = random_inputs(
        np.random.default_rng(0), len(LENGTHS), 130, heads=1, value_heads=2, dk=64, dv=32, decay=decay
    )
    padding = (np.arange(130) >= LENGTHS[:, None])[..., None]
    loud = {"k": np.where(padding[..., None], 9, inputs.k), "v": np.where(padding[..., None], np.nan, inputs.v)}
    inputs = narrowed(replace(inputs, **loud, log_decay=np.where(padding, np.float32(-7), inputs.log_decay)))
    o, state = prefill(*arguments(inputs), LENGTHS, tile=replace(tile, columns=16))
    assert o.dtype == jnp.bfloat16
    check(inputs, o, state, LENGTHS)
    np.testing.assert_array_equal(state[0], inputs.state[0])


@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_whole_rows(tokens):
    inputs = narrowed(random_inputs(np.random.default_rng(1), 2, tokens, heads=1, value_heads=2, dk=32, dv=16))
    check(inputs, *prefill(*arguments(inputs)), [tokens] * 2)


@pytest.mark.parametrize("cut", [1, 64, 69])
def test_split_anywhere(cut):
    inputs = narrowed(random_inputs(np.random.default_rng(2), 1, 70, heads=1, value_heads=1, dk=16, dv=16))
    _, state = prefill(*arguments(inputs), np.array([cut], np.int32))
    rest = replace(inputs.tokens(slice(cut, None)), state=np.asarray(state))
    o, state = prefill(*arguments(rest))
    true_o, true_state = run_chain(inputs)
    assert error(state[0], true_state) < STATE_BOUND
    assert error(np.asarray(o, np.float32)[0], true_o[cut:]) < OUTPUT_BOUND


@pytest.mark.parametrize("correlation", [0.0, 0.95])
def test_state_after_a_thousand_tokens(correlation, monkeypatch):
    """Without any decay, so that no error fades; and the bound catches a state that enters products as bf16."""
    inputs = random_inputs(
        np.random.default_rng(3), 1, 1024, heads=1, value_heads=1, dk=64, dv=16, decay="none", correlation=correlation
    )
    inputs = narrowed(inputs)
    check(inputs, *prefill(*arguments(inputs)), [1024], output_bound=1.5 * OUTPUT_BOUND)
    if correlation == 0:
        monkeypatch.setattr(sys.modules["kernels_pallas.gdn_prefill.forward"], "STATE_PARTS", 1)
        _, state = prefill.__wrapped__(*arguments(inputs))
        assert error(state[0], run_chain(inputs)[1]) > 10 * STATE_BOUND


def test_extremes():
    """Known fault H12: g = 0 and -50, one key for all tokens, beta 1 and 2; padding has no gradient."""
    inputs = random_inputs(np.random.default_rng(4), 5, 70, heads=1, value_heads=1, correlation=1.0, decay="none")
    inputs.log_decay[2:4] = -50
    inputs.beta[::2], inputs.beta[1::2] = 1, 2
    lengths = np.array([70, 70, 70, 70, 0], np.int32)

    def loss(*args):
        o, state = prefill(*args, lengths)
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(state**2)

    value, gradients = jax.value_and_grad(loss, argnums=tuple(range(6)))(*arguments(inputs))
    assert np.isfinite(value)
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    assert not any(np.asarray(gradient[4], np.float32).any() for gradient in gradients[:5])


def gradients(function, inputs: Inputs, wide: bool, lengths) -> tuple:
    """Of a random linear function of both results."""
    rng = np.random.default_rng(5)
    weights, state_weights = (rng.standard_normal(x.shape).astype(np.float32) for x in (inputs.v, inputs.state))

    def loss(*args):
        o, state = function(*args, lengths)
        return jnp.sum(o.astype(jnp.float32) * weights) + 0.3 * jnp.sum(state * state_weights)

    args = inputs.args() if wide else arguments(inputs)
    return jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*args)


def check_gradients(got, wanted, bound=GRADIENT_BOUND) -> None:
    for name, one, other in zip(("q", "k", "v", "log_decay", "beta", "state"), got, wanted, strict=True):
        assert error(np.asarray(one, np.float32), np.asarray(other, np.float64)) < bound, name


@pytest.mark.filterwarnings("ignore:A large amount of constants")  # of the test
@pytest.mark.parametrize("decay", ["none", "weak", "mixed"])
def test_gradient(decay):
    """Against automatic differentiation of the fp32 reference."""
    inputs = random_inputs(
        np.random.default_rng(6), 2, 150, heads=1, value_heads=2, dk=64, dv=32, decay=decay, correlation=0.5
    )
    inputs.beta[0, :5] = 0  # the gradient of a zero beta is not zero
    inputs, lengths = narrowed(inputs), np.array([150, 90], np.int32)
    wanted = gradients(gdn_prefill, inputs, True, lengths)
    check_gradients(gradients(partial(prefill, tile=SMALL), inputs, False, lengths), wanted)
    assert np.asarray(wanted[4])[0, :5].any()


def test_gradient_by_finite_differences():
    """In float64, along a random direction, so that the reference of the other tests is not trusted alone."""
    inputs = narrowed(random_inputs(np.random.default_rng(7), 1, 70, heads=1, value_heads=1, dk=16, dv=16))
    found = gradients(prefill, inputs, False, None)
    rng = np.random.default_rng(5)
    weights, state_weights = (rng.standard_normal(x.shape).astype(np.float32) for x in (inputs.v, inputs.state))

    def loss(inputs: Inputs) -> float:
        o, state = run_chain(inputs)
        return float(np.sum(o * weights[0]) + 0.3 * np.sum(state * state_weights[0]))

    for name, gradient in zip(("q", "k", "v", "log_decay", "beta", "state"), found, strict=True):
        length = np.linalg.norm(np.asarray(gradient, np.float64))
        step = 1e-4 * np.asarray(gradient, np.float64) / length
        up, down = (loss(replace(inputs, **{name: getattr(inputs, name) + sign * step})) for sign in (1, -1))
        assert abs((up - down) / 2e-4 - length) < GRADIENT_BOUND * length, name


def specs(rows: int, tokens: int, heads: int, value_heads: int, dk: int, dv: int) -> list[jax.ShapeDtypeStruct]:
    key = jax.ShapeDtypeStruct((rows, tokens, heads, dk), jnp.bfloat16)
    value = jax.ShapeDtypeStruct((rows, tokens, value_heads, dv), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct((rows, tokens, value_heads), jnp.float32)
    state = jax.ShapeDtypeStruct((rows, value_heads, dk, dv), jnp.float32)
    return [key, key, value, gate, gate, state, jax.ShapeDtypeStruct((rows,), jnp.int32)]


@each_tile
@pytest.mark.parametrize("shape", [(8, 4096, 8, 8, 256, 256), (2, 130, 2, 4, 128, 64)])
def test_lowers(tile, shape):
    text = lower_for_cuda(partial(prefill, tile=tile, interpret=False), *specs(*shape))
    assert text.count(TRITON_CALL) == 2

    def loss(*args):
        o, state = prefill(*args, tile=tile, interpret=False)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    text = lower_for_cuda(jax.grad(loss, argnums=tuple(range(6))), *specs(*shape))
    assert text.count(TRITON_CALL) == 3


@pytest.mark.parametrize(("dk", "dv"), [(16, 16), (32, 64), (64, 16), (128, 256)])
def test_lowers_all_sizes(dk, dv):
    run = partial(triton.gdn_prefill, scale=1.0, chunk=64)
    assert lower_for_cuda(run, *specs(1, 100, 1, 2, dk, dv)).count(TRITON_CALL) == 2


def test_what_it_cannot_do_is_named():
    inputs = random_inputs(np.random.default_rng(8), 1, 3)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        gdn_prefill(*arguments(inputs), implementation="triton")
    q, k, v = specs(1, 3, 1, 1, 64, 64)[:3]
    wide = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    assert triton.unsupported(q, k, v, 64) is None
    assert triton.unsupported(q, k, wide, 64) == "v must be bfloat16, got float32"
    assert triton.unsupported(q, k, v, 32) == "chunk must be 64, got 32"
    assert "head sizes must be" in triton.unsupported(*specs(1, 3, 1, 1, 48, 64)[:3], 64)
    assert "2^31" in triton.unsupported(*specs(256, 4096, 8, 8, 256, 256)[:3], 64)
    many = specs(64, 4096, 8, 8, 256, 256)
    assert triton.unsupported(*many[:3], 64) is None
    with pytest.raises(ValueError, match="fewer than 2"):
        jax.eval_shape(jax.grad(lambda *args: prefill(*args)[1].sum()), *many)


@pytest.mark.gpu
@each_tile
def test_on_a_gpu(tile):
    """Every tile at the size it is for, forward and backward, against the reference in fp32."""
    inputs = narrowed(
        random_inputs(np.random.default_rng(9), 4, 600, heads=8, value_heads=8, dk=256, dv=256, decay="weak")
    )
    lengths = np.array([600, 320, 65, 0], np.int32)
    run = partial(prefill, tile=tile, interpret=False)
    wanted_o, wanted_state = jax.jit(partial(gdn_prefill, implementation="reference"))(*inputs.args(), lengths)
    o, state = run(*arguments(inputs), lengths)
    assert error(state, np.asarray(wanted_state, np.float64)) < STATE_BOUND
    assert error(np.asarray(o, np.float32), np.asarray(wanted_o, np.float64)) < OUTPUT_BOUND
    np.testing.assert_array_equal(state[3], inputs.state[3])
    wanted = gradients(partial(gdn_prefill, implementation="reference"), inputs, True, lengths)
    check_gradients(gradients(run, inputs, False, lengths), wanted, 1.5 * GRADIENT_BOUND)


@pytest.mark.gpu
def test_the_choice_on_a_gpu():
    """bf16 inputs of head sizes that the Mosaic kernel does not take; fp32 ones go to the reference."""
    inputs = random_inputs(np.random.default_rng(10), 2, 200, heads=2, value_heads=4, dk=128, dv=32, decay="weak")
    text = jax.jit(gdn_prefill).lower(*arguments(inputs)).as_text()
    assert text.count(TRITON_CALL) == 2
    assert "mosaic_gpu" not in text
    assert TRITON_CALL not in jax.jit(gdn_prefill).lower(*inputs.args()).as_text()
    o, state = jax.jit(gdn_prefill)(*inputs.args())
    for b in range(2):
        true_o, true_state = run_chain(inputs, b)
        assert error(o[b], true_o) < 1e-5
        assert error(state[b], true_state) < 1e-5
    narrow = narrowed(inputs)
    check(narrow, *jax.jit(gdn_prefill)(*arguments(narrow)), [200] * 2)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dk", "dv"), [(1, 16, 32), (2, 64, 64), (4, 128, 128)])
def test_other_sizes_on_a_gpu(heads, dk, dv):
    inputs = narrowed(random_inputs(np.random.default_rng(11), 2, 100, heads=heads, value_heads=heads, dk=dk, dv=dv))
    run = partial(triton.gdn_prefill, lengths=None, scale=dk**-0.5, chunk=64)
    check(inputs, *jax.jit(run)(*arguments(inputs)), [100] * 2)
