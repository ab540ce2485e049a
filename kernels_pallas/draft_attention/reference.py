"""The attention of a level of drafting in plain jnp: the truth for the kernel.

Numerics: rotations, scores and softmax in fp32. What tensor cores read is rounded to the dtype of the ring: projections
before they are rotated, queries and keys after, and the weights of the softmax. Sums are fp32, of fp32 operands at full
precision.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax


def rotate(halves: Iterable[jax.Array], position: jax.Array, theta: float) -> tuple[jax.Array, jax.Array]:
    """Both halves of heads, [.., dh / 2], turned as ``position`` (which broadcasts with them) asks for, in fp32."""
    first, second = halves
    half = first.shape[-1]
    angle = position.astype(jnp.float32) * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    return first * cos - second * sin, second * cos + first * sin


def held_position(length: jax.Array, slot: jax.Array, window: int) -> jax.Array:
    """The position that ``slot`` of a ring of ``window`` slots holds; negative if it holds none."""
    last = length - 1
    return last - (last - slot) % window


def draft_attention(
    qkv: jax.Array,
    ring_key: jax.Array,
    ring_value: jax.Array,
    draft_key: jax.Array,
    draft_value: jax.Array,
    ancestors: jax.Array,
    length: jax.Array,
    level: jax.Array,
    *,
    num_heads: int,
    theta: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``api.draft_attention``; the arguments are already checked."""
    rows, nodes, _ = qkv.shape
    window, key_heads, size = ring_key.shape[1:]
    dtype = ring_key.dtype
    position = length[:, None] - 1 + level  # [B, 1]
    first = (level - 1) * nodes

    def rotated(x: jax.Array) -> jax.Array:
        turned = rotate(jnp.split(x, 2, axis=-1), position[:, :, None, None], theta)
        return jnp.concatenate(turned, axis=-1).astype(dtype)

    heads = qkv.astype(dtype).reshape(rows, nodes, -1, size)
    query, key, value = jnp.split(heads, [num_heads, num_heads + key_heads], axis=2)
    draft_key = lax.dynamic_update_slice_in_dim(draft_key, rotated(key), first, axis=1)
    draft_value = lax.dynamic_update_slice_in_dim(draft_value, value, first, axis=1)

    slot = jnp.arange(draft_key.shape[1])
    own = slot == first + jnp.arange(nodes)[:, None]  # [T, S]
    drafts = ((ancestors & (slot < first)) | own) & (slot // nodes + 1 > level - window)
    held = held_position(length[:, None], jnp.arange(window), window)  # [B, W]
    ring = (held >= 0) & (held > position - window)
    seen = jnp.concatenate([jnp.broadcast_to(ring[:, None], (rows, nodes, window)), drafts], axis=-1)

    query = rotated(query).reshape(rows, nodes, key_heads, -1, size)
    scores = [_einsum("btkgd,bskd->bkgts", query, keys) for keys in (ring_key, draft_key)]
    scores = jnp.concatenate(scores, axis=-1) * size**-0.5
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    mixed = _einsum("bkgts,bskd->btkgd", weights[..., :window], ring_value)
    mixed += _einsum("bkgts,bskd->btkgd", weights[..., window:], draft_value)
    return mixed.reshape(rows, nodes, -1).astype(dtype), draft_key, draft_value


def _einsum(formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.einsum(formula, left, right, precision=precision, preferred_element_type=jnp.float32)
