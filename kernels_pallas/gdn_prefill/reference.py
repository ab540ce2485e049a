"""Prefill in plain jnp: closed form inside a chunk, all chunks at once, then a scan that carries the state.

Numerics: as in verification, of which a chunk is the chain. Padding is masked at the door (decay 0, beta 0, key 0), so
it leaves the state as it is. Gradients stay finite for strong decay and for repeated keys: no power of A is formed and
nothing is divided.

Limits: T is padded to a multiple of the chunk; [B, T / chunk, HV, chunk, chunk] fp32 temporaries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ancestors import node_mask
from kernels_pallas.decay import between
from kernels_pallas.precise import einsum
from kernels_pallas.unit_lower_inverse import padded_size, unit_lower_inverse


def gdn_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array | None,
    scale: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.gdn_prefill``; the arguments are already checked."""
    rows, tokens, heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    group = value_heads // heads
    chunk = min(chunk, padded_size(tokens))
    chunks = -(-tokens // chunk)
    if lengths is not None:
        real = node_mask(lengths, tokens)[:, :, None]
        log_decay, beta = jnp.where(real, log_decay, 0), jnp.where(real, beta, 0)
        q, k, v = (jnp.where(real[..., None], x, 0) for x in (q, k, v))

    def by_chunk(x: jax.Array, *head_shape: int) -> jax.Array:  # [B, T, heads, ...] -> [chunks, B, *heads, chunk, ...]
        padding = [(0, 0), (0, chunks * chunk - tokens)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x.astype(jnp.float32), padding)
        x = x.reshape(rows, chunks, chunk, *head_shape, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 2 + len(head_shape))

    query, key = by_chunk(q, heads), by_chunk(k, heads)  # [X, B, H, c, dk]
    value = by_chunk(v, heads, group)  # [X, B, H, R, c, dv]
    g, b = by_chunk(log_decay, heads, group), by_chunk(beta, heads, group)  # [X, B, H, R, c]

    reach = jnp.tril(jnp.ones((chunk, chunk), dtype=bool))
    proper = jnp.tril(reach, -1)
    decay = jnp.exp(between(g, reach))  # [X, B, H, R, c, c]
    since_start = jnp.exp(jnp.cumsum(g, axis=-1))[..., None]  # [X, B, H, R, c, 1]
    to_end = decay[..., -1, :, None]  # [X, B, H, R, c, 1]
    similar = einsum("xbhtk,xbhik->xbhti", jnp.concatenate([key, query], axis=-2), key)[:, :, :, None]
    lower = jnp.where(proper, b[..., None] * decay * similar[..., :chunk, :], 0)
    weights = jnp.where(reach, decay * similar[..., chunk:, :], 0)
    inverse = unit_lower_inverse(lower)
    u_fresh = einsum("xbhrti,xbhriv->xbhrtv", inverse, b[..., None] * value)
    u_key = einsum("xbhrti,xbhrik->xbhrtk", inverse, b[..., None] * since_start * key[:, :, :, None])

    def step(s: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, u_fresh, u_key, weights, since_start, to_end = xs
        u = u_fresh - einsum("bhrtk,bhrkv->bhrtv", u_key, s)
        committed = einsum("bhtk,bhrkv->bhrtv", query, s)
        o = scale * (since_start * committed + einsum("bhrti,bhriv->bhrtv", weights, u))
        s = since_start[..., -1:, :] * s + einsum("bhtk,bhrtv->bhrkv", key, to_end * u)
        return s, o

    carry = state.reshape(rows, heads, group, dk, dv)
    carry, o = lax.scan(step, carry, (query, key, u_fresh, u_key, weights, since_start, to_end))
    o = jnp.moveaxis(o, (1, 0, 4), (0, 1, 2)).reshape(rows, chunks * chunk, value_heads, dv)[:, :tokens]
    return o.astype(v.dtype), carry.reshape(state.shape)
