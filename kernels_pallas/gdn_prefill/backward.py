"""The gradient of prefill on a Hopper GPU: one kernel backwards along the chunks, then matrix products over all chunks.

In the letters of ``forward.py``, with E the gradient of the state at a chunk's end and S the state at its start:

    dU = P^T dO + exp(G_63 - G) K E
    dZ = (I + A)^-T beta dU                                         also the gradient of V
    gradient of S = exp(G_63) E + scale Q^T exp(G) dO - K^T exp(G) dZ

Only these need the chunks in order. The rest, once S and E of every chunk are there, is products that XLA does in one
batch each: dO S^T, dZ S^T and U E^T, and the 64 x 64 ones. The gradient of A is -dZ Z^T; that of beta is what dU . Z
and A = D (k . k) beta make of it. No inverse is differentiated and nothing is divided.

Bytes moved, a value head and token, bf16: the kernel reads 4 dk (once a tile of dv, from L2 after the first) + 2 dv +
264 and writes 4 dv + dk dv / 32; the products read both states, dk dv / 16, and about 20 (dk + dv) in between. At 16
rows x 1024 tokens x 8 heads of 256 that is 0.6 GB and about 2 GB, 0.15 and 0.5 ms at 4.4 TB/s.

Numerics: products of bf16 summed in fp32, the carried gradient in fp32, the sums of the gates' gradients in fp32.
Errors of 3e-3 to 9e-3 of every gradient, where rounding it to bf16 costs 1.7e-3.

Limits: those of ``forward.py``.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import pallas_triton
from kernels_pallas.ancestors import node_mask
from kernels_pallas.gdn_prefill.forward import (
    CHUNK,
    Prepared,
    Products,
    chunk_rows,
    decay_sums,
    parts,
    store_rows,
)
from kernels_pallas.tiles import Tile


def _reverse_kernel(
    lengths_ref,
    q_ref,
    k_ref,
    do_ref,
    beta_ref,
    high_ref,
    weights_ref,
    since_ref,
    to_end_ref,
    last_ref,
    dv_ref,
    du_ref,
    ends_ref,
    first_ref,
    *,
    scale,
    products,
):
    tokens = q_ref.shape[0]
    chunks = high_ref.shape[0]
    length = lengths_ref[...]
    row = lax.iota(jnp.int32, CHUNK)

    def step(n: jax.Array, e: jax.Array) -> jax.Array:
        x = chunks - 1 - n
        token = x * CHUNK + row
        real, inside = token < length, token < tokens
        since_start, to_end = (ref[x][:, None] for ref in (since_ref, to_end_ref))
        beta = chunk_rows(beta_ref, x, real)[:, None]
        kept = pltriton.load(since_ref.at[x, pl.ds(CHUNK - 1, 1)])[:, None]  # [1, 1]

        end = parts(e, 1)
        k = chunk_rows(k_ref, x, real)
        du = to_end * products.product((k,), end)
        ends_ref[x] = end[0]
        do = chunk_rows(do_ref, x, real)
        du = products.product((weights_ref[x],), (do,), du, transpose=True)
        dz = products.product((high_ref[x],), parts(beta * du, 1), transpose=True)
        store_rows(du_ref, x, inside, du.astype(du_ref.dtype))
        store_rows(dv_ref, x, inside, dz.astype(dv_ref.dtype))
        e = products.product(
            (chunk_rows(q_ref, x, real),), parts(scale * since_start * do, 1), kept * e, transpose=True
        )
        return products.product((k,), parts(-since_start * dz, 1), e, transpose=True)

    first_ref[...] = lax.fori_loop(0, chunks, step, last_ref[...])


def reverse(
    q: jax.Array,
    k: jax.Array,
    do: jax.Array,
    beta: jax.Array,
    dstate: jax.Array,
    prepared: Prepared,
    lengths: jax.Array,
    scale: float,
    tile: Tile,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns dV and dU [B, T, HV, dv] bf16, E of every chunk [B, HV, chunks, dk, dv] bf16, and S's gradient."""
    rows, tokens, heads, dk = q.shape
    value_heads, dv = do.shape[2:]
    group = value_heads // heads
    chunks = pl.cdiv(tokens, CHUNK)
    columns = tile.columns
    by_token = pl.BlockSpec((None, tokens, None, dk), lambda j, h, b: (b, 0, h // group, 0))
    value = pl.BlockSpec((None, tokens, None, columns), lambda j, h, b: (b, 0, h, j))
    gate = pl.BlockSpec((None, tokens, None), lambda j, h, b: (b, 0, h))
    square = pl.BlockSpec((None, None, chunks, CHUNK, CHUNK), lambda j, h, b: (b, h, 0, 0, 0))
    line = pl.BlockSpec((None, None, chunks, CHUNK), lambda j, h, b: (b, h, 0, 0))
    states = pl.BlockSpec((None, None, dk, columns), lambda j, h, b: (b, h, 0, j))
    values = jax.ShapeDtypeStruct(do.shape, jnp.bfloat16)
    run = pl.pallas_call(
        partial(_reverse_kernel, scale=scale, products=Products(interpret)),
        grid=(dv // columns, value_heads, rows),
        in_specs=[
            pl.BlockSpec((None,), lambda j, h, b: (b,)),
            *(by_token, by_token, value, gate),
            *(square, square, line, line),
            states,
        ],
        out_specs=[
            value,
            value,
            pl.BlockSpec((None, None, chunks, dk, columns), lambda j, h, b: (b, h, 0, 0, j)),
            states,
        ],
        out_shape=[
            values,
            values,
            jax.ShapeDtypeStruct((rows, value_heads, chunks, dk, dv), jnp.bfloat16),
            jax.ShapeDtypeStruct(dstate.shape, jnp.float32),
        ],
        compiler_params=pallas_triton.params(tile.warps, tile.stages),
        interpret=interpret,
        name="gdn_prefill_reverse",
    )
    _, _, weights, since_start, to_end = prepared
    return tuple(run(lengths, q, k, do, beta, prepared.high, weights, since_start, to_end, dstate))


def _einsum(formula: str, *operands: jax.Array) -> jax.Array:
    """Products of bf16, summed and returned in fp32."""
    narrow = (x.astype(jnp.bfloat16) for x in operands)
    return jnp.einsum(formula, *narrow, preferred_element_type=jnp.float32)


def gradients(
    q: jax.Array,
    k: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    z: jax.Array,
    starts: jax.Array,
    do: jax.Array,
    dz: jax.Array,
    du: jax.Array,
    ends: jax.Array,
    lengths: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k, log_decay and beta from what both kernels left; in plain XLA, all chunks at once."""
    rows, tokens, heads, _ = q.shape
    value_heads = beta.shape[2]
    group = value_heads // heads
    chunks = starts.shape[2]
    real = node_mask(lengths, tokens)[:, :, None]

    def by_chunk(x: jax.Array, *head_shape: int) -> jax.Array:  # [B, T, heads, ..] -> [B, *heads, chunks, 64, ..]
        x = jnp.where(real.reshape(rows, tokens, *(1,) * (x.ndim - 2)), x, 0)
        x = jnp.pad(x, [(0, 0), (0, chunks * CHUNK - tokens)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(rows, chunks, CHUNK, *head_shape, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (1 + len(head_shape), 2 + len(head_shape)))

    def by_token(x: jax.Array, head_axes: int) -> jax.Array:  # the way back
        x = jnp.moveaxis(x, (1 + head_axes, 2 + head_axes), (1, 2))
        return x.reshape(rows, chunks * CHUNK, -1, *x.shape[3 + head_axes :])[:, :tokens]

    grouped = (heads, group)
    query, key = by_chunk(q, heads), by_chunk(k, heads)  # [B, H, X, c, dk]
    do, dz, du, z = (by_chunk(x, *grouped) for x in (do, dz, du, z))  # [B, H, R, X, c, dv]
    g, b = by_chunk(log_decay, *grouped), by_chunk(beta, *grouped)  # [B, H, R, X, c]
    starts, ends = (x.reshape(rows, *grouped, *x.shape[2:]) for x in (starts, ends))  # [B, H, R, X, dk, dv]
    sums = decay_sums(g)
    reach = jnp.tril(jnp.ones((CHUNK, CHUNK), dtype=bool))
    decay = jnp.exp(jnp.where(reach, sum(x[..., :, None] - x[..., None, :] for x in sums), -jnp.inf))
    proper = jnp.where(jnp.tril(reach, -1), decay, 0)
    since_start = jnp.exp(sum(sums))[..., None]
    to_end = decay[..., -1, :, None]
    u = b[..., None] * z
    alike = _einsum("bhxtk,bhxik->bhxti", key, key)[:, :, None]
    asked = _einsum("bhxtk,bhxik->bhxti", query, key)[:, :, None]

    # Through the state at the start (both at once), and through what is added to it.
    both = jnp.concatenate([scale * since_start * do, -since_start * dz], axis=-2)
    dq_start, dk_start = jnp.split(_einsum("bhrxtv,bhrxkv->bhrxtk", both, starts), 2, axis=-2)
    dk_end = _einsum("bhrxtv,bhrxkv->bhrxtk", to_end * u, ends)
    # Through the 64 x 64 matrices; the names are those of their factors q . k and k . k.
    d_asked = scale * decay * _einsum("bhrxtv,bhrxiv->bhrxti", do, u)
    d_lower = -_einsum("bhrxtv,bhrxiv->bhrxti", dz, z) * proper
    d_alike = d_lower * b[..., None, :]
    symmetric = jnp.sum(d_alike + jnp.swapaxes(d_alike, -1, -2), axis=2)
    asking = jnp.sum(d_asked, axis=2)
    dq = jnp.sum(dq_start, axis=2) + _einsum("bhxti,bhxik->bhxtk", asking, key)
    dk_ = jnp.sum(dk_start + dk_end, axis=2) + _einsum("bhxti,bhxik->bhxtk", symmetric, key)
    dk_ += _einsum("bhxti,bhxtk->bhxik", asking, query)

    dbeta = jnp.sum(du.astype(jnp.float32) * z, axis=-1) + jnp.sum(d_lower * alike, axis=-2)
    # G_t acts on token t as reader with plus and as writer with minus; G_63 on everything that is carried on.
    between = d_alike * alike + d_asked * asked
    reader = dq_start * query[:, :, None] + dk_start * key[:, :, None]
    writer = jnp.sum(dk_end * key[:, :, None], axis=-1)
    d_sum = jnp.sum(between, axis=-1) - jnp.sum(between, axis=-2) + jnp.sum(reader, axis=-1) - writer
    carried = jnp.sum(starts.astype(jnp.float32) * ends, axis=(-2, -1))[..., None] * since_start[..., -1, :]
    at_end = jnp.sum(writer, axis=-1, keepdims=True) + carried
    dg = lax.cumsum(d_sum, axis=4, reverse=True) + at_end
    dg = jnp.where(real, by_token(dg, 2), 0)
    return by_token(dq, 1).astype(q.dtype), by_token(dk_, 1).astype(k.dtype), dg, by_token(dbeta, 2)
