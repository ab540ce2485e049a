"""Verification in plain jnp: the closed form of the gated delta rule over a tree, the truth for the kernels.

Numerics: fp32 throughout, products at full precision; decays are masked before the exponential and summed between
nodes rather than subtracted (``decay.py``); u comes from a blocked inverse (``unit_lower_inverse.py``). Against a
float64 recurrence outputs and states agree to 2e-6 of their norm, for 64 nodes and keys correlated at 0.95.

Limits: [B, HV, N, N] fp32 temporaries. At beta near 2 (negative eigenvalues) repeated keys reflect instead of fading
and the rounding of k.k adds up along the path: 2e-6 for correlated keys, 1e-5 for 64 times the same key. Inputs of
real nodes must be finite: a mask is a zero in a product.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.ancestors import ancestor_mask, node_mask
from kernels_pallas.decay import between, path_sum
from kernels_pallas.factors import Factors
from kernels_pallas.precise import einsum
from kernels_pallas.unit_lower_inverse import unit_lower_inverse


def gdn_verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    parents: jax.Array,
    num_nodes: jax.Array | None,
    scale: float,
    layer: int | None = None,
) -> tuple[jax.Array, Factors]:
    """See ``api.gdn_verify``; the arguments are already checked."""
    if layer is not None:
        state = state[layer]
    rows, nodes, heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    group = value_heads // heads
    if num_nodes is not None:
        real = node_mask(num_nodes, nodes)[:, :, None]
        log_decay, beta = jnp.where(real, log_decay, 0), jnp.where(real, beta, 0)
        q, k, v = (jnp.where(real[..., None], x, 0) for x in (q, k, v))

    def by_head(x: jax.Array) -> jax.Array:  # [B, N, HV, ...] -> [B, H, R, N, ...], R value heads a key head
        return jnp.moveaxis(x.reshape(rows, nodes, heads, group, *x.shape[3:]), 1, 3)

    g, b, value = by_head(log_decay), by_head(beta), by_head(v.astype(jnp.float32))
    key = k.astype(jnp.float32)
    both = jnp.concatenate([key, q.astype(jnp.float32)], axis=1)  # [B, 2N, H, dk]: the state is read once for both
    committed = einsum("bmhk,bhrkv->bhrmv", both, state.reshape(rows, heads, group, dk, dv))
    similar = einsum("bmhk,bihk->bhmi", both, key)[:, :, None]  # [B, H, 1, 2N, N]

    if nodes == 1:  # a decode step: nothing to solve
        total, low = g, jnp.zeros_like(g)
        weights = similar[..., nodes:, :]
        u = b[..., None] * (value - jnp.exp(total)[..., None] * committed[..., :nodes, :])
        drafted = weights * u
    else:
        reach = ancestor_mask(parents, num_nodes)[:, None, None]  # [B, 1, 1, N, N]
        proper = reach & ~jnp.eye(nodes, dtype=bool)
        total, low = path_sum(g, reach)
        decay = jnp.exp(between(g, reach))  # [B, H, R, N, N]
        # `where` as well: 0 times a product of large keys may be NaN
        lower = jnp.where(proper, b[..., None] * decay * similar[..., :nodes, :], 0)
        weights = jnp.where(reach, decay * similar[..., nodes:, :], 0)
        surprise = b[..., None] * (value - jnp.exp(total)[..., None] * committed[..., :nodes, :])
        u = einsum("bhrti,bhriv->bhrtv", unit_lower_inverse(lower), surprise)
        drafted = einsum("bhrti,bhriv->bhrtv", weights, u)

    o = scale * (jnp.exp(total)[..., None] * committed[..., nodes:, :] + drafted)

    def by_node(x: jax.Array) -> jax.Array:  # [B, H, R, N, ...] -> [B, N, HV, ...]
        return jnp.moveaxis(x, 3, 1).reshape(rows, nodes, value_heads, *x.shape[4:])

    return by_node(o).astype(v.dtype), Factors(k, by_node(u), by_node(total), by_node(low))
