"""The front of a mixer in plain jnp: gathers along the parents, norms and gates, the truth for the kernels.

Numerics: fp32 sums from the oldest tap to the newest, in the same order along a tree and over a prompt, so a chain
gives the bits that a prompt gives. Gates stay in fp32. Windows are gathered, never computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.ancestors import node_mask, walk_up


class MixerInputs(NamedTuple):
    """What the delta rule reads of each node, and what recovery needs of the convolution.

    q, k: unit vectors, in the dtype of the model, as v is. Zero at padding nodes, as all but ``inputs`` are.
    log_decay, beta: the gates, fp32.
    inputs: what the convolution read at the node itself, rounded to the dtype of the model: a factor of recovery.
    """

    q: Float[Array, "B N H dk"]
    k: Float[Array, "B N H dk"]
    v: Float[Array, "B N HV dv"]
    log_decay: Float[Array, "B N HV"]
    beta: Float[Array, "B N HV"]
    inputs: Float[Array, "B N C"]


def l2_norm(x: Float[Array, "*X D"]) -> Float[Array, "*X D"]:
    """Unit vectors along the last axis, in fp32; 1e-6 is added to the sum of squares, as fla does."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def gates(
    a: Float[Array, "*X HV"],
    b: Float[Array, "*X HV"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    max_beta: float,
) -> tuple[Float[Array, "*X HV"], Float[Array, "*X HV"]]:
    """``log_decay`` = -exp(A_log) softplus(a + dt_bias) and ``beta`` = max_beta sigmoid(b), in fp32."""
    log_decay = -jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)
    return log_decay, jax.nn.sigmoid(b) * max_beta


def tree_conv(
    projected: jax.Array,
    window: jax.Array | None,
    weight: jax.Array | None,
    A_log: jax.Array,
    dt_bias: jax.Array,
    parents: jax.Array,
    num_nodes: jax.Array | None,
    *,
    key_heads: int,
    dk: int,
    dv: int,
    dtype: jnp.dtype,
    max_beta: float,
    layer: int | None,
) -> MixerInputs:
    """See ``api.tree_conv``; the arguments are already checked."""
    rows, nodes, _ = projected.shape
    value_heads, keys = A_log.size, key_heads * dk
    inputs = projected[..., : 2 * keys + value_heads * dv].astype(dtype)
    if weight is None or window is None:
        y = jax.nn.silu(inputs.astype(jnp.float32))
    else:
        y = _along_parents(inputs, window if layer is None else window[layer], weight, parents)
    a, b = jnp.split(projected[..., -2 * value_heads :], 2, axis=-1)
    log_decay, beta = gates(a, b, A_log, dt_bias, max_beta)
    if num_nodes is not None:
        real = node_mask(num_nodes, nodes)[..., None]
        y, log_decay, beta = (jnp.where(real, x, 0) for x in (y, log_decay, beta))
    q, k, v = jnp.split(y.astype(dtype), [keys, 2 * keys], axis=-1)
    q, k = (l2_norm(x.reshape(rows, nodes, key_heads, dk)).astype(dtype) for x in (q, k))
    return MixerInputs(q, k, v.reshape(rows, nodes, value_heads, dv), log_decay, beta, inputs)


def _along_parents(x: jax.Array, window: jax.Array, weight: jax.Array, parents: jax.Array) -> jax.Array:
    """``silu`` of the convolution along the parents of each node, [B, N, C] in fp32."""
    rows, nodes, _ = x.shape
    taps = weight.shape[0]
    line = _line(window, x)
    start = jnp.broadcast_to(jnp.arange(taps - 1, taps - 1 + nodes, dtype=jnp.int32), (rows, nodes))
    places = walk_up(parents, start, taps - 1, taps)
    return _convolve([_gather(line, place) for place in reversed(places)], weight)


def prefill_conv(
    x: jax.Array, window: jax.Array, weight: jax.Array, lengths: jax.Array | None, starts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """See ``api.prefill_conv``; the arguments are already checked."""
    tokens = x.shape[1]
    taps = weight.shape[0]
    line = _line(window, x)
    inputs = [line[:, j : j + tokens] for j in range(taps)]
    if starts is not None:
        place = jnp.arange(tokens)
        start = jax.lax.cummax(jnp.where(starts, place, -taps), axis=1)  # [B, T], far back before the first one
        inputs = [jnp.where((place - start >= taps - 1 - j)[..., None], x, 0) for j, x in enumerate(inputs)]
    y = _convolve(inputs, weight)
    if lengths is None:
        return y.astype(x.dtype), line[:, tokens:].astype(window.dtype)
    y = jnp.where(node_mask(lengths, tokens)[..., None], y, 0)
    after = _gather(line, lengths[:, None] + jnp.arange(taps - 1, dtype=jnp.int32))
    return y.astype(x.dtype), after.astype(window.dtype)


def _line(window: jax.Array, x: jax.Array) -> jax.Array:
    """The committed inputs and then the new ones, [B, W-1+N, C], in the wider of their dtypes."""
    dtype = jnp.promote_types(window.dtype, x.dtype)
    return jnp.concatenate([window.astype(dtype), x.astype(dtype)], axis=1)


def _gather(line: jax.Array, places: jax.Array) -> jax.Array:
    """``line`` [B, M, C] at ``places`` [B, K]: [B, K, C]."""
    return jnp.take_along_axis(line, places[..., None], axis=1, mode="clip")


def _convolve(inputs: list[jax.Array], weight: jax.Array) -> jax.Array:
    taps = weight.astype(jnp.float32)
    total = jnp.zeros((), dtype=jnp.float32)
    for tap, x in zip(taps, inputs, strict=True):
        total = total + tap * x.astype(jnp.float32)
    return jax.nn.silu(total)
