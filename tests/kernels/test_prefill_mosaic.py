"""The Mosaic GPU walk of prefill: interpreted against the float64 recurrence, lowered for a GPU, and run on one.

Two warpgroups are left to the GPU: interpreted, they are two threads that wait for each other.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import gdn_prefill
from kernels_pallas.gdn_prefill import mosaic_gpu
from kernels_pallas.gdn_prefill.tiles import MOSAIC
from kernels_pallas.tiles import TUNED_ON, Tile
from tests.kernels.lowering import TRITON_CALL, lower_for_cuda
from tests.kernels.oracle import error, random_inputs
from tests.kernels.test_prefill_triton import (
    OUTPUT_BOUND,
    STATE_BOUND,
    arguments,
    check,
    check_gradients,
    gradients,
    narrowed,
    specs,
)

ONE, TWO = Tile(columns=64), Tile(columns=128)
MOSAIC_CALL = "custom_call @mosaic_gpu"
TILES = list(dict.fromkeys(rule.tile for rule in MOSAIC[TUNED_ON]))
needs_jax_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")


def prefill(q, k, v, log_decay, beta, state, lengths=None, tile=ONE, interpret=True):
    scale = q.shape[-1] ** -0.5
    run = partial(mosaic_gpu.gdn_prefill, scale=scale, chunk=64, tile=tile, interpret=interpret)
    return jax.jit(run)(q, k, v, log_decay, beta, state, lengths)


@needs_jax_0_11
@pytest.mark.parametrize(
    ("dk", "dv", "decay", "lengths"), [(64, 128, "mixed", (0, 70, 190)), (128, 64, "none", (64, 1, 190))]
)
def test_ragged_lengths(dk, dv, decay, lengths):
    """At and inside chunks, more chunks than fit shared memory, and NaN as padding; value heads share a key head."""
    lengths = np.array(lengths, np.int32)
    inputs = random_inputs(np.random.default_rng(0), 3, 190, heads=1, value_heads=2, dk=dk, dv=dv, decay=decay)
    inputs = narrowed(inputs)
    padding = (np.arange(190) >= lengths[:, None])[..., None, None]
    loud = {name: np.where(padding, np.float32(np.nan), getattr(inputs, name)) for name in ("q", "k", "v")}
    loud["log_decay"] = np.where(padding[..., 0], np.float32(-7), inputs.log_decay)
    o, state = prefill(*arguments(replace(inputs, **loud)), lengths)
    assert o.dtype == jnp.bfloat16
    check(inputs, o, state, lengths)
    if not lengths[0]:
        np.testing.assert_array_equal(state[0], inputs.state[0])


@needs_jax_0_11
def test_a_row_that_ends_inside_a_chunk():
    inputs = narrowed(random_inputs(np.random.default_rng(1), 1, 70, heads=1, value_heads=1, dk=64, dv=64))
    o, state = prefill(*arguments(inputs))
    assert o.shape == inputs.v.shape
    check(inputs, o, state, [70])


@needs_jax_0_11
def test_a_gradient_is_that_of_the_triton_kernels():
    """Which write on their way what the gradient reads."""
    inputs = narrowed(random_inputs(np.random.default_rng(2), 1, 70, heads=1, value_heads=1, dk=64, dv=64))
    wanted = gradients(gdn_prefill, inputs, True, None)
    check_gradients(gradients(partial(prefill), inputs, False, None), wanted)


@needs_jax_0_11
@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.parametrize("shape", [(8, 4096, 8, 8, 256, 256), (2, 130, 2, 4, 64, 128)])
def test_lowers(tile, shape):
    run = partial(mosaic_gpu.gdn_prefill, scale=1.0, chunk=64, tile=tile)
    text = lower_for_cuda(lambda *args: run(*args), *specs(*shape))
    assert text.count(MOSAIC_CALL) == 1
    assert text.count(TRITON_CALL) == 1


@needs_jax_0_11
def test_what_is_unsupported():
    q, k, v = specs(1, 3, 1, 1, 64, 64)[:3]
    assert mosaic_gpu.unsupported(q, k, v, 64) is None
    assert mosaic_gpu.unsupported(q, k, v, 32) == "chunk must be 64, got 32"
    assert "head sizes must be 64, 128 or 256, got 32" in mosaic_gpu.unsupported(*specs(1, 3, 1, 1, 32, 64)[:3], 64)
    inputs = random_inputs(np.random.default_rng(3), 1, 3, heads=1, value_heads=1, dk=64, dv=64)
    with pytest.raises(ValueError, match="cannot run as a Mosaic GPU kernel: q must be bfloat16"):
        prefill(*inputs.args())
    with pytest.raises(ValueError, match="tile must have 64 or 128 columns, got 32"):
        prefill(*arguments(inputs), tile=Tile(columns=32))


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("tile", [ONE, TWO], ids=repr)
@pytest.mark.parametrize(("heads", "dk", "dv"), [(8, 256, 256), (1, 64, 128), (2, 128, 64)])
def test_on_a_gpu(tile, heads, dk, dv):
    """Against the reference in fp32, ragged rows with NaN as padding, and the same bits every time."""
    inputs = narrowed(
        random_inputs(np.random.default_rng(4), 4, 600, heads=heads, value_heads=2 * heads, dk=dk, dv=dv, decay="weak")
    )
    lengths = np.array([600, 320, 65, 0], np.int32)
    padding = (np.arange(600) >= lengths[:, None])[..., None, None]
    loud = {name: np.where(padding, np.float32(np.nan), getattr(inputs, name)) for name in ("q", "k", "v")}
    wanted_o, wanted_state = jax.jit(partial(gdn_prefill, implementation="reference"))(*inputs.args(), lengths)
    first, second = (prefill(*arguments(replace(inputs, **loud)), lengths, tile, False) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    o, state = first
    assert error(state, np.asarray(wanted_state, np.float64)) < STATE_BOUND
    assert error(np.asarray(o, np.float32), np.asarray(wanted_o, np.float64)) < OUTPUT_BOUND
    assert not any(np.asarray(o, np.float32)[b, length:].any() for b, length in enumerate(lengths))
    np.testing.assert_array_equal(state[3], inputs.state[3])


@pytest.mark.gpu
@needs_jax_0_11
def test_the_choice_on_a_gpu():
    inputs = random_inputs(np.random.default_rng(5), 2, 200, heads=2, value_heads=4, dk=128, dv=256, decay="weak")
    assert jax.jit(gdn_prefill).lower(*arguments(inputs)).as_text().count(MOSAIC_CALL) == 1
    narrow = narrowed(inputs)
    check(narrow, *jax.jit(gdn_prefill)(*arguments(narrow)), [200] * 2)
