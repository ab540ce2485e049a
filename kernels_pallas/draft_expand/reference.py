"""The children of a level of drafting in plain jnp: the truth for the kernel.

Numerics: log-probabilities and norms in fp32; a token's embedding is rounded to the dtype of the hidden states first.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.norm import rms_norm


class Frontier(NamedTuple):
    """The nodes that the next level grows from, best first.

    Attributes:
      tokens: [B, branch] int32.
      log_prob: [B, branch] fp32, of the path from the root.
      feature: [B, branch, D]. Hidden states of their parents.
      ancestors: [B, branch, S] bool. Draft slots of their proper ancestors.
      pair: [B, branch, Dt+D]. The norms of the token's embedding and of the feature, side by side.
    """

    tokens: Int[Array, "B branch"]
    log_prob: Float[Array, "B branch"]
    feature: Float[Array, "B branch D"]
    ancestors: Bool[Array, "B branch S"]
    pair: Float[Array, "B branch both"]


class Expansion(NamedTuple):
    """All children of a level, those of one node together and best first, and the best of them.

    Attributes:
      tokens: [B, T*branch] int32, of the target's vocabulary.
      log_prob: [B, T*branch] fp32, of the path from the root.
      chosen: [B, branch] int32. Which children the frontier holds.
      frontier: the best children.
    """

    tokens: Int[Array, "B children"]
    log_prob: Float[Array, "B children"]
    chosen: Int[Array, "B branch"]
    frontier: Frontier


def best_children(
    logits: Float[Array, "B T V"], temperature: Float[Array, ""], branch: int, draft_to_target: Int[Array, " V"] | None
) -> tuple[Int[Array, "B T branch"], Float[Array, "B T branch"]]:
    """The likeliest tokens of each node, of the target's vocabulary, and their log-probabilities, best first."""
    # The softmax of the best alone: of all of them it would write an array as large as the logits. The barrier: XLA
    # joins the slice below with that of the best, and then, on a CPU, sorts the whole vocabulary.
    best, token = lax.optimization_barrier(lax.top_k(logits, branch))
    above = best[..., :1]
    total = jnp.sum(jnp.exp((logits - above) / temperature), axis=-1, keepdims=True)
    log_prob = (best - above) / temperature - jnp.log(total)
    token = token if draft_to_target is None else draft_to_target[token]
    return token.astype(jnp.int32), log_prob


def take(values: Array, index: Array) -> Array:
    """``take_along_axis`` of indices that are in bounds, which are then not checked."""
    return jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds")


def draft_expand(
    logits: jax.Array,
    hidden: jax.Array,
    log_prob: jax.Array,
    ancestors: jax.Array,
    level: jax.Array,
    temperature: jax.Array,
    embedding: jax.Array,
    embedding_scale: jax.Array,
    hidden_scale: jax.Array,
    draft_to_target: jax.Array | None,
    *,
    eps: float,
    branch: int,
) -> Expansion:
    """See ``api.draft_expand``; the arguments are already checked."""
    rows = logits.shape[0]
    token, step = best_children(logits, temperature, branch, draft_to_target)
    tokens = token.reshape(rows, -1)
    children = (log_prob[:, :, None] + step).reshape(rows, -1)

    best, chosen = lax.top_k(children, branch)
    parent = chosen // branch
    slot = (level - 1) * branch + parent  # below the root's level 0, where no node has one
    own = jnp.arange(ancestors.shape[2]) == slot[:, :, None]
    picked = take(tokens, chosen)
    feature = take(hidden, parent[:, :, None])
    embedded = embedding[picked].astype(hidden.dtype)
    normed = (rms_norm(x, w, eps) for x, w in ((embedded, embedding_scale), (feature, hidden_scale)))
    frontier = Frontier(
        tokens=picked,
        log_prob=best,
        feature=feature,
        ancestors=take(ancestors, parent[:, :, None]) | own,
        pair=jnp.concatenate([*normed], axis=-1).astype(hidden.dtype),
    )
    return Expansion(tokens, children, chosen, frontier)
