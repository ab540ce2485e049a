"""Recovery in plain jnp: one weighted sum of outer products for all layers and heads, the truth for the kernels.

Numerics: fp32, products at full precision. The differences of path sums use both parts of G where the factors carry
them (``factors.py``). A row with ``last`` = -1 is selected, not computed, so it stays equal bit for bit.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.ancestors import ancestor_mask
from kernels_pallas.factors import Factors
from kernels_pallas.precise import einsum


def gdn_recover(state: jax.Array, factors: Factors, parents: jax.Array, last: jax.Array) -> jax.Array:
    """See ``api.gdn_recover``; the arguments are already checked."""
    *layers, rows, value_heads, _, dv = state.shape
    nodes, heads = factors.key.shape[-3:-1]
    group = value_heads // heads
    end = jnp.maximum(last, 0)[:, None, None]  # [B, 1, 1]
    path = jnp.take_along_axis(ancestor_mask(parents), end, axis=1)[:, 0, :, None]  # [B, N, 1]

    def to_end(total: jax.Array) -> tuple[jax.Array, jax.Array]:  # of the root to the end, of each node to the end
        whole = jnp.take_along_axis(total, end.reshape((1,) * len(layers) + end.shape), axis=-2)  # [.., B, 1, HV]
        return whole, whole - total

    whole, remaining = to_end(factors.log_decay)
    if factors.log_decay_low is not None:
        whole_low, remaining_low = to_end(factors.log_decay_low)
        whole, remaining = whole + whole_low, remaining + remaining_low
    weights = jnp.exp(jnp.where(path, remaining, -jnp.inf))  # [.., B, N, HV]
    # zero weight is not enough for nodes off the path: their values may be anything
    value = jnp.where(path[..., None], weights[..., None] * factors.value, 0)
    update = einsum(
        "...nhk,...nhrv->...hrkv",
        factors.key.astype(jnp.float32),
        value.reshape(*layers, rows, nodes, heads, group, dv),
    )
    kept = jnp.exp(jnp.swapaxes(whole, -1, -2))[..., None] * state  # [.., B, HV, 1, 1] times the state
    folded = kept + update.reshape(state.shape)
    return jnp.where(last[:, None, None, None] >= 0, folded, state)
