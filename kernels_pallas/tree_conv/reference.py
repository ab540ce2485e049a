"""The short convolution in plain jnp: W gathers along the parents, the truth for the kernels.

Numerics: fp32 sums from the oldest tap to the newest, in the same order along a tree and over a prompt, so a chain
gives the bits that a prompt gives. Windows are gathered, never computed.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.ancestors import node_mask, walk_up


def tree_conv(
    x: jax.Array, window: jax.Array, weight: jax.Array, parents: jax.Array, num_nodes: jax.Array | None
) -> jax.Array:
    """See ``api.tree_conv``; the arguments are already checked."""
    rows, nodes, _ = x.shape
    taps = weight.shape[0]
    line = _line(window, x)
    start = jnp.broadcast_to(jnp.arange(taps - 1, taps - 1 + nodes, dtype=jnp.int32), (rows, nodes))
    places = walk_up(parents, start, taps - 1, taps)
    y = _convolve([_gather(line, place) for place in reversed(places)], weight)
    if num_nodes is not None:
        y = jnp.where(node_mask(num_nodes, nodes)[..., None], y, 0)
    return y.astype(x.dtype)


def recover_window(window: jax.Array, x: jax.Array, parents: jax.Array, last: jax.Array) -> jax.Array:
    """See ``api.recover_window``; the arguments are already checked."""
    length = window.shape[-2]
    if length == 0:
        return window
    places = walk_up(parents, (last + length)[:, None], length, length)
    return _gather(_line(window, x), jnp.concatenate(places[::-1], axis=1)).astype(window.dtype)


def prefill_conv(
    x: jax.Array, window: jax.Array, weight: jax.Array, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See ``api.prefill_conv``; the arguments are already checked."""
    tokens = x.shape[1]
    taps = weight.shape[0]
    line = _line(window, x)
    y = _convolve([line[:, j : j + tokens] for j in range(taps)], weight)
    if lengths is None:
        return y.astype(x.dtype), line[:, tokens:].astype(window.dtype)
    y = jnp.where(node_mask(lengths, tokens)[..., None], y, 0)
    after = _gather(line, lengths[:, None] + jnp.arange(taps - 1, dtype=jnp.int32))
    return y.astype(x.dtype), after.astype(window.dtype)


def _line(window: jax.Array, x: jax.Array) -> jax.Array:
    """The committed inputs and then the new ones, [.., B, W-1+N, C], in the wider of their dtypes."""
    dtype = jnp.promote_types(window.dtype, x.dtype)
    return jnp.concatenate([window.astype(dtype), x.astype(dtype)], axis=-2)


def _gather(line: jax.Array, places: jax.Array) -> jax.Array:
    """``line`` [.., B, M, C] at ``places`` [B, K]: [.., B, K, C]."""
    places = places.reshape((1,) * (line.ndim - 3) + (*places.shape, 1))
    return jnp.take_along_axis(line, places, axis=-2, mode="clip")


def _convolve(inputs: list[jax.Array], weight: jax.Array) -> jax.Array:
    taps = weight.astype(jnp.float32)
    total = jnp.zeros((), dtype=jnp.float32)
    for tap, x in zip(taps, inputs, strict=True):
        total = total + tap * x.astype(jnp.float32)
    return jax.nn.silu(total)
