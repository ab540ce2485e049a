"""The gated norm in one Pallas-Triton launch: a program takes one head of one row."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import pallas_triton
from kernels_pallas.norm import rms_norm


@functools.partial(jax.jit, static_argnames=("start", "eps", "interpret"))  # traced once for all layers
def gated_norm(
    o: jax.Array,
    y: jax.Array | None,
    scale: jax.Array,
    *,
    start: int,
    eps: float,
    interpret: bool = False,
) -> jax.Array:
    """See ``api.gated_norm``; the arguments are already checked."""
    tokens, heads, size = o.shape
    rows = tokens + -tokens % 8

    def row(t):
        return jnp.minimum(t, tokens - 1)  # those beyond the tokens read the last one, and write zeros

    specs = [
        pl.BlockSpec((None, None, size), lambda t, h: (row(t), h, 0)),
        pl.BlockSpec((size,), lambda t, h: (0,)),
        *([] if y is None else [pl.BlockSpec((None, y.shape[1]), lambda t, h: (row(t), 0))]),
    ]
    return pl.pallas_call(
        functools.partial(_kernel, tokens=tokens, start=start, eps=eps),
        grid=(rows, heads),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, size), lambda t, h: (t, h)),
        out_shape=jax.ShapeDtypeStruct((rows, heads * size), o.dtype),
        compiler_params=pallas_triton.params(warps=1),
        interpret=interpret,
        name="gated_norm",
    )(o, scale, *([] if y is None else [y]))


def _kernel(
    o_ref,  # [dv]
    scale_ref,  # [dv]
    *refs,  # y [P] where there is one, and the output [dv]
    tokens: int,
    start: int,
    eps: float,
):
    *y_ref, out_ref = refs
    size = o_ref.shape[0]
    o = rms_norm(o_ref[...], scale_ref[...], eps)
    if y_ref:
        column = start + pl.program_id(1) * size + jnp.arange(size, dtype=jnp.int32)
        gate = pltriton.load(y_ref[0].at[column]).astype(out_ref.dtype).astype(jnp.float32)
        o = o * jax.nn.silu(gate)
    out_ref[...] = jnp.where(pl.program_id(0) < tokens, o, 0.0).astype(out_ref.dtype)
