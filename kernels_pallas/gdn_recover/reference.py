"""Recovery in plain jnp: one weighted sum of outer products for all layers and heads, the truth for the kernels.

Numerics: fp32, products at full precision. The differences of path sums use both parts of G where the factors carry
them (``factors.py``). A row with ``last`` = -1 is selected, not computed, so it stays equal bit for bit. The window is
gathered, never computed.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.ancestors import ancestor_mask, walk_up
from kernels_pallas.factors import Factors
from kernels_pallas.precise import einsum


def gdn_recover(
    state: jax.Array,
    factors: Factors,
    parents: jax.Array,
    last: jax.Array,
    window: jax.Array | None = None,
    conv_inputs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``api.gdn_recover``; the arguments are already checked."""
    new_state = _fold(state, factors, parents, last)
    if window is None or conv_inputs is None:
        return new_state, None
    return new_state, _move(window, conv_inputs, parents, last)


def _fold(state: jax.Array, factors: Factors, parents: jax.Array, last: jax.Array) -> jax.Array:
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
    # zero weight is not enough for nodes off the path: their factors may be anything
    key = jnp.where(path[..., None], factors.key.astype(jnp.float32), 0)
    value = jnp.where(path[..., None], weights[..., None] * factors.value, 0)
    update = einsum("...nhk,...nhrv->...hrkv", key, value.reshape(*layers, rows, nodes, heads, group, dv))
    kept = jnp.exp(jnp.swapaxes(whole, -1, -2))[..., None] * state  # [.., B, HV, 1, 1] times the state
    folded = kept + update.reshape(state.shape)
    return jnp.where(last[:, None, None, None] >= 0, folded, state)


def _move(window: jax.Array, x: jax.Array, parents: jax.Array, last: jax.Array) -> jax.Array:
    length = window.shape[-2]
    if length == 0:
        return window
    ordered = jnp.where(parents < jnp.arange(parents.shape[1]), parents, -1)  # as ``ancestor_mask`` reads them
    places = jnp.concatenate(walk_up(ordered, (last + length)[:, None], length, length)[::-1], axis=1)  # [B, V]
    dtype = jnp.promote_types(window.dtype, x.dtype)
    line = jnp.concatenate([window.astype(dtype), x.astype(dtype)], axis=-2)  # [.., B, V + N, C]
    places = places.reshape((1,) * (line.ndim - 3) + (*places.shape, 1))
    return jnp.take_along_axis(line, places, axis=-2, mode="clip").astype(window.dtype)
