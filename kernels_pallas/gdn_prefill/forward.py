"""Forward kernels of prefill for a Hopper GPU: one over all chunks at once, one along the chunks of a row.

A chunk is 64 tokens. With G the sums of the log decays inside a chunk, D[t, i] = exp(G_t - G_i) for i <= t and S the
state at its start, a head computes

    (I + A) Z = V - exp(G) K S        A[t, i] = D[t, i] (k_t . k_i) beta_i for i < t
    O = scale exp(G) Q S + P U        U = beta Z,  P[t, i] = scale D[t, i] (q_t . k_i)
    S <- exp(G_63) S + K^T (exp(G_63 - G) U)

Z, the error of the state's prediction, stands in place of U = beta Z in the system: then beta can be zero and still
have a gradient.

``prepare`` (chunks x value heads x rows programs) writes (I + A)^-1, P and the exponentials. ``scan`` (tiles of dv x
value heads x rows) keeps a [dk, columns] piece of the state in registers and walks along the chunks.

Bytes moved, a value head and token, bf16: ``prepare`` reads 4 dk and writes 392; ``scan`` reads 4 dk (once a tile of
dv, from L2 after the first), 2 dv + 392 and writes 2 dv, and for a gradient 2 dv + dk dv / 32 more. At 8 rows x 4096
tokens x 8 heads of 256 that is 0.37 GB and 0.64 GB: 0.23 ms at 4.4 TB/s. Products, in that shape: 100 GFLOP and 206.

Numerics: products of bf16 on tensor cores, summed in fp32. q, k, v are exact. What is computed here enters a product as
one bf16 number where it only shapes an output (S beside q, P, U beside P), and as two, 16 bits, where it feeds the
state: (I + A)^-1, S beside k, V less what was expected, and what is added to the state. The state itself stays in fp32.
Decays are differences of sums inside a chunk, taken in two parts as in ``decay.py``. Against float64, after 1,024
tokens with dk = 256: 5e-6 to 2e-5 of the state; 2.6e-3 to 5.3e-3 of the outputs, of which their rounding is 1.7e-3.

Limits: q, k, v in bf16; dk and dv of 16 to 256, powers of two; arrays below 2^31 elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import pallas_triton
from kernels_pallas.decay import STEP
from kernels_pallas.tiles import Tile

CHUNK = 64
STATE_PARTS = 2  # of the state beside k; with 1 the state's error is 1e-4 to 1.4e-3 after 1,024 tokens, not 2e-5


class Prepared(NamedTuple):
    """What a chunk needs beside its tokens; [B, HV, chunks, ...], zero or one at padding.

    high, low: bf16 parts of (I + A)^-1 [.., 64, 64]. A gradient reads only the first and keeps no other.
    weights: P [.., 64, 64], bf16.
    since_start: exp(G) [.., 64], fp32; its last is what the chunk does to the state it found.
    to_end: exp(G_63 - G) [.., 64], fp32.
    """

    high: jax.Array
    low: jax.Array | None
    weights: jax.Array
    since_start: jax.Array
    to_end: jax.Array


def decay_sums(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of the log decays of a chunk, from its start to each token, in two parts: differences keep their digits.

    The coarse parts are multiples of 2^-8 and add up exactly, the fine ones with an error near 1e-8 (see decay.py).
    """
    coarse = jnp.floor(log_decay / STEP) * STEP
    return jnp.cumsum(coarse, axis=-1), jnp.cumsum(log_decay - coarse, axis=-1)


def parts(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """``count`` (1 or 2) bf16 numbers whose sum is the fp32 ``x`` to 8 or 16 bits; the first is ``x`` rounded."""
    if count == 1:
        return (x.astype(jnp.bfloat16),)
    # Rounded on the bits: a compiler may drop a cast to bf16 and back as excess precision.
    bits = (lax.bitcast_convert_type(x, jnp.int32) + 2**15) & -(2**16)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


@dataclass(frozen=True)
class Products:
    """Products of bf16 parts.

    interpret: without tensor cores; XLA's CPU runtime does not have all products of bf16.
    """

    interpret: bool

    def product(
        self,
        given: Sequence[jax.Array],
        computed: Sequence[jax.Array],
        plus: jax.Array | None = None,
        *,
        transpose: bool = False,
    ) -> jax.Array:
        """``given @ computed + plus`` in fp32 of matrices in parts, ``given`` or its transpose; never two low parts.

        Added one by one to ``plus``, so that the tensor cores do it and no second accumulator takes registers.
        """
        total = plus
        for i, j in ((0, 1), (1, 0), (0, 0)):  # the small ones first
            if i < len(given) and j < len(computed):
                one = self._dot(given[i], computed[j], trans_a=transpose)
                total = one if total is None else total + one
        assert total is not None
        return total

    def gram(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """Dot products of the rows of two matrices."""
        return self._dot(left, right, trans_b=True)

    def _dot(self, left: jax.Array, right: jax.Array, trans_a: bool = False, trans_b: bool = False) -> jax.Array:
        if self.interpret:
            left, right = (x.astype(jnp.float32) for x in (left, right))
        return pltriton.dot(left, right, trans_a=trans_a, trans_b=trans_b)


def chunk_rows(ref, chunk: jax.Array, real: jax.Array) -> jax.Array:
    """Rows of a chunk from a ref [T, D] or [T]; zero where not ``real`` [64]."""
    mask = real[:, None] if len(ref.shape) == 2 else real
    return pltriton.load(ref.at[pl.ds(chunk * CHUNK, CHUNK)], mask=mask, other=0)


def store_rows(ref, chunk: jax.Array, inside: jax.Array, values: jax.Array) -> None:
    """Write a chunk's rows [64, D] to a ref [T, D], those that are ``inside`` [64]."""
    pltriton.store(ref.at[pl.ds(chunk * CHUNK, CHUNK)], values, mask=inside[:, None])


def _unit_lower_inverse(lower: jax.Array, row: jax.Array, products: Products) -> jax.Array:
    """(I + lower)^-1 by doubling blocks, ``X <- X - X C X`` with C the corners that join two blocks."""

    def corners(size: int) -> jax.Array:
        t, i = row[:, None] // size, row[None, :] // size
        return jnp.where((t // 2 == i // 2) & (t != i), lower, 0.0)

    inverse = jnp.where(row[:, None] == row[None, :], 1.0, 0.0) - corners(1)
    for size in (2, 4, 8, 16, 32):
        x = parts(inverse, 2)
        inverse = products.product(x, parts(-products.product(parts(corners(size), 2), x), 2), inverse)
    return inverse


def _prepare_kernel(
    lengths_ref,
    q_ref,
    k_ref,
    log_decay_ref,
    beta_ref,
    high_ref,
    low_ref,
    weights_ref,
    since_ref,
    to_end_ref,
    *,
    scale,
    products,
):
    row = lax.iota(jnp.int32, CHUNK)
    real = pl.program_id(0) * CHUNK + row < lengths_ref[...]
    k = pltriton.load(k_ref, mask=real[:, None], other=0)  # [64, dk]
    q = pltriton.load(q_ref, mask=real[:, None], other=0)
    g = pltriton.load(log_decay_ref, mask=real, other=0)  # [64]
    beta = pltriton.load(beta_ref, mask=real, other=0)
    sums = decay_sums(g)
    left = [jnp.sum(jnp.where(row == CHUNK - 1, x, 0.0)) - x for x in sums]
    pltriton.store(since_ref, jnp.exp(sums[0] + sums[1]))
    pltriton.store(to_end_ref, jnp.exp(left[0] + left[1]))

    reach = row[:, None] >= row[None, :]
    between = [x[:, None] - x[None, :] for x in sums]
    decay = jnp.exp(jnp.where(reach, between[0] + between[1], -jnp.inf))
    pltriton.store(weights_ref, (scale * decay * products.gram(q, k)).astype(jnp.bfloat16))
    proper = row[:, None] > row[None, :]
    lower = jnp.where(proper, decay * beta[None, :] * products.gram(k, k), 0.0)
    high, low = parts(_unit_lower_inverse(lower, row, products), 2)
    pltriton.store(high_ref, high)
    pltriton.store(low_ref, low)


def prepare(
    q: jax.Array,
    k: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    lengths: jax.Array,
    scale: float,
    tile: Tile,
    interpret: bool = False,
) -> Prepared:
    """What all chunks need beside their tokens; ``lengths`` [B] int32, at most T."""
    rows, tokens, heads, dk = q.shape
    value_heads = beta.shape[2]
    group = value_heads // heads
    chunks = pl.cdiv(tokens, CHUNK)
    by_token = pl.BlockSpec((None, CHUNK, None, dk), lambda x, h, b: (b, x, h // group, 0))
    gate = pl.BlockSpec((None, CHUNK, None), lambda x, h, b: (b, x, h))
    square = pl.BlockSpec((None, None, None, CHUNK, CHUNK), lambda x, h, b: (b, h, x, 0, 0))
    line = pl.BlockSpec((None, None, None, CHUNK), lambda x, h, b: (b, h, x, 0))
    shape = (rows, value_heads, chunks, CHUNK)
    squares = jax.ShapeDtypeStruct((*shape, CHUNK), jnp.bfloat16)
    lines = jax.ShapeDtypeStruct(shape, jnp.float32)
    run = pl.pallas_call(
        partial(_prepare_kernel, scale=scale, products=Products(interpret)),
        grid=(chunks, value_heads, rows),
        in_specs=[pl.BlockSpec((None,), lambda x, h, b: (b,)), by_token, by_token, gate, gate],
        out_specs=[square, square, square, line, line],
        out_shape=[squares, squares, squares, lines, lines],
        compiler_params=pallas_triton.params(tile.warps, tile.stages),
        interpret=interpret,
        name="gdn_prefill_prepare",
    )
    return Prepared(*run(lengths, q, k, log_decay, beta))


def _scan_kernel(
    lengths_ref,
    q_ref,
    k_ref,
    v_ref,
    beta_ref,
    high_ref,
    low_ref,
    weights_ref,
    since_ref,
    to_end_ref,
    state_ref,
    o_ref,
    last_ref,
    *saved_refs,
    scale,
    products,
):
    tokens = q_ref.shape[0]
    chunks = high_ref.shape[0]
    length = lengths_ref[...]
    row = lax.iota(jnp.int32, CHUNK)

    # What a product needs is loaded just before it: loads on their way to shared memory take registers, and two
    # programs fit a multiprocessor.
    def step(x: jax.Array, s: jax.Array) -> jax.Array:
        token = x * CHUNK + row
        real, inside = token < length, token < tokens
        since_start, to_end = (ref[x][:, None] for ref in (since_ref, to_end_ref))
        beta = chunk_rows(beta_ref, x, real)[:, None]
        kept = pltriton.load(since_ref.at[x, pl.ds(CHUNK - 1, 1)])[:, None]  # [1, 1]

        state = parts(s, STATE_PARTS)
        k = chunk_rows(k_ref, x, real)
        expected = products.product((k,), state)
        o = scale * since_start * products.product((chunk_rows(q_ref, x, real),), state[:1])
        rest = chunk_rows(v_ref, x, real).astype(jnp.float32) - since_start * expected
        z = products.product((high_ref[x], low_ref[x]), parts(rest, 2))
        u = beta * z
        o = products.product((weights_ref[x],), parts(u, 1), o)
        store_rows(o_ref, x, inside, o.astype(o_ref.dtype))
        if saved_refs:
            z_ref, starts_ref = saved_refs
            store_rows(z_ref, x, inside, z.astype(z_ref.dtype))
            starts_ref[x] = state[0]
        return products.product((k,), parts(to_end * u, 2), kept * s, transpose=True)

    def blank(x: jax.Array, _: None) -> None:
        store_rows(o_ref, x, x * CHUNK + row < tokens, jnp.zeros((CHUNK, o_ref.shape[1]), o_ref.dtype))

    # A gradient wants every chunk's start; without one the chunks after a row's end have nothing to compute.
    stop = chunks if saved_refs else pl.cdiv(length, CHUNK)
    last_ref[...] = lax.fori_loop(0, stop, step, state_ref[...])
    if not saved_refs:
        lax.fori_loop(stop, chunks, blank, None)


class Scanned(NamedTuple):
    """What ``scan`` returns: outputs, the state at the end, and if asked for Z and the states at the chunks' starts.

    o: [B, T, HV, dv] in the dtype of v, zero at padding. state: [B, HV, dk, dv] fp32.
    z: [B, T, HV, dv] bf16. starts: [B, HV, chunks, dk, dv] bf16.
    """

    o: jax.Array
    state: jax.Array
    z: jax.Array | None = None
    starts: jax.Array | None = None


def scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    prepared: Prepared,
    lengths: jax.Array,
    scale: float,
    tile: Tile,
    save: bool = False,
    interpret: bool = False,
) -> Scanned:
    """The outputs and the state after ``lengths`` tokens; with ``save`` also what a gradient needs."""
    rows, tokens, heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    group = value_heads // heads
    chunks = pl.cdiv(tokens, CHUNK)
    columns = tile.columns
    by_token = pl.BlockSpec((None, tokens, None, dk), lambda j, h, b: (b, 0, h // group, 0))
    value = pl.BlockSpec((None, tokens, None, columns), lambda j, h, b: (b, 0, h, j))
    gate = pl.BlockSpec((None, tokens, None), lambda j, h, b: (b, 0, h))
    square = pl.BlockSpec((None, None, chunks, CHUNK, CHUNK), lambda j, h, b: (b, h, 0, 0, 0))
    line = pl.BlockSpec((None, None, chunks, CHUNK), lambda j, h, b: (b, h, 0, 0))
    states = pl.BlockSpec((None, None, dk, columns), lambda j, h, b: (b, h, 0, j))
    out_specs = [value, states]
    out_shape = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    if save:
        out_specs += [value, pl.BlockSpec((None, None, chunks, dk, columns), lambda j, h, b: (b, h, 0, 0, j))]
        out_shape.append(jax.ShapeDtypeStruct(v.shape, jnp.bfloat16))
        out_shape.append(jax.ShapeDtypeStruct((rows, value_heads, chunks, dk, dv), jnp.bfloat16))
    run = pl.pallas_call(
        partial(_scan_kernel, scale=scale, products=Products(interpret)),
        grid=(dv // columns, value_heads, rows),
        in_specs=[
            pl.BlockSpec((None,), lambda j, h, b: (b,)),
            *(by_token, by_token, value, gate),
            *(square, square, square, line, line),
            states,
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pallas_triton.params(tile.warps, tile.stages),
        interpret=interpret,
        name="gdn_prefill_scan",
    )
    return Scanned(*run(lengths, q, k, v, beta, *prepared, state))
