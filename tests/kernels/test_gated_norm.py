"""The gated norm: plain version and interpreted kernel against float64, lowering, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import gated_norm
from kernels_pallas.gated_norm import reference, triton
from tests.kernels.lowering import TRITON_CALL, beside_kernels, lower_for_cuda
from tests.kernels.oracle import error

EPS = 1e-5
SHAPES = [(1, 8, 256), (5, 2, 16), (8, 3, 32), (13, 1, 64), (16, 2, 128)]  # tokens, heads, size
BOUNDS = {"float32": 3e-7, "bfloat16": 3e-3}


def make(tokens: int, heads: int, size: int, dtype: str, start: int | None):
    """o, y or None, the scale; heads of very different size."""
    rng = np.random.default_rng(tokens)
    o = rng.standard_normal((tokens, heads, size)) * 10.0 ** rng.integers(-2, 3, (tokens, heads, 1))
    y = None if start is None else jnp.asarray(3 * rng.standard_normal((tokens, start + heads * size + 3)), jnp.float32)
    return jnp.asarray(o, dtype), y, jnp.asarray(1 + 0.2 * rng.standard_normal(size), jnp.float32)


def truth(o, y, scale, start: int | None) -> np.ndarray:
    wide = np.asarray(o).astype(np.float64)
    wide = wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + EPS) * np.asarray(scale, np.float64)
    wide = wide.reshape(wide.shape[0], -1)
    if y is not None:
        gate = np.asarray(y[:, start : start + wide.shape[1]].astype(o.dtype)).astype(np.float64)
        wide = wide * gate / (1 + np.exp(-gate))
    return wide


def check(run, tokens, heads, size, dtype, start):
    o, y, scale = make(tokens, heads, size, dtype, start)
    out = run(o, y, scale, start=start or 0, eps=EPS)
    assert out.shape == (-(-tokens // 8) * 8, heads * size)
    assert out.dtype == dtype
    assert error(out[:tokens], truth(o, y, scale, start)) < BOUNDS[dtype]
    assert not np.asarray(out[tokens:]).astype(np.float32).any()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("start", [None, 0, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, start, dtype):
    for run in (reference.gated_norm, functools.partial(triton.gated_norm, interpret=True)):
        check(run, *shape, dtype, start)


@pytest.mark.parametrize("tokens", [1, 13, 16])
@pytest.mark.parametrize("start", [None, 6144])
def test_lowers_to_one_launch(tokens, start):
    o, y, scale = (
        None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make(tokens, 8, 256, "bfloat16", start)
    )
    text = lower_for_cuda(functools.partial(triton.gated_norm, start=start or 0, eps=EPS), o, y, scale)
    assert text.count(TRITON_CALL) == 1
    assert not beside_kernels(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"o": jnp.zeros((2, 32))}, r"o must be \[N, HV, dv\], got \[2, 32\]"),
        ({"o": jnp.zeros((0, 2, 16))}, "o must have 1 token or more, got 0"),
        ({"o": jnp.zeros((2, 2, 16), jnp.float16)}, "o must be bfloat16 or float32, got float16"),
        ({"scale": jnp.zeros(8)}, r"scale must be \[dv\] = \[16\], got \[8\]"),
        ({"y": jnp.zeros((2, 36))}, r"y must be \[2, 37 or more\] for start 5, got \[2, 36\]"),
        ({"y": jnp.zeros((3, 40))}, r"y must be \[2, 37 or more\] for start 5, got \[3, 40\]"),
        ({"y": jnp.zeros(40)}, r"y must be \[N, width\], got \[40\]"),
        ({"start": -1}, r"y must be \[2, 31 or more\] for start -1, got \[2, 40\]"),
        ({"implementation": "mosaic_gpu"}, "is not written for gated_norm yet"),
    ],
)
def test_errors_name_the_argument(changes, message):
    options = {"o": jnp.zeros((2, 2, 16)), "y": jnp.zeros((2, 40)), "scale": jnp.ones(16), "start": 5} | changes
    with pytest.raises(ValueError, match=message):
        gated_norm(options.pop("o"), options.pop("y"), options.pop("scale"), **options, eps=EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("start", [None, 0, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu(shape, start, dtype):
    check(functools.partial(gated_norm, implementation="triton"), *shape, dtype, start)
