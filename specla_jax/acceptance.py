"""Acceptance: which nodes of a verified tree are kept, and which tokens a round commits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kernels_pallas import ancestor_mask
from specla_jax.tree import DraftTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Commit:
    """What one round adds to a row's text.

    The token after path node ``j`` is ``tokens[j]``; committing ``count`` tokens folds the first ``count`` nodes of
    the path into the state, so the state again covers all tokens but the last.

    Attributes:
      path: accepted nodes, root first, padded with -1.
      tokens: the target's token after each of them: the accepted drafts, then the bonus token.
      count: tokens committed, after trimming at a stop token or the length limit; 0 for a finished row.
      accepted: how many of them were drafted.
      stopped: the last committed token is a stop token.
    """

    path: Int[Array, "B depth+1"]
    tokens: Int[Array, "B depth+1"]
    count: Int[Array, " B"]
    accepted: Int[Array, " B"]
    stopped: Bool[Array, " B"]

    @property
    def last(self) -> Int[Array, " B"]:
        """Deepest node to fold into the state; -1 where nothing is committed."""
        at = jnp.take_along_axis(self.path, jnp.maximum(self.count - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(self.count > 0, at, -1)


def accept(
    tree: DraftTree,
    depth: Int[Array, "B N"],
    drawn: Int[Array, "B N"],
    levels: int,
    room: Int[Array, " B"],
    stop_tokens: Int[Array, " S"],
) -> Commit:
    """Follows the target's own tokens down the tree.

    From the root on, go to the child that equals the token drawn at the node; where there is none, that token is the
    bonus token. This is exact for any tree that does not depend on the coins, greedy or sampled (design 3).

    Args:
      tree: without duplicate children.
      depth: of each node.
      drawn: the target's token after each node.
      levels: draft depth + 1.
      room: tokens each row may still commit; 0 or less for a finished row.
      stop_tokens: ids that end a text, padded with -1.
    """
    # A node is on the path if it and all its ancestors equal the token drawn at their parents.
    parent_drew = jnp.take_along_axis(drawn, jnp.maximum(tree.parents, 0), axis=1)
    differs = (tree.tokens != parent_drew) & (tree.parents >= 0)
    reaches = ancestor_mask(tree.parents, tree.num_nodes)  # [B, N, N]
    on_path = reaches.diagonal(axis1=1, axis2=2) & ~jnp.any(reaches & differs[:, None, :], axis=-1)

    at_level = on_path[:, None, :] & (depth[:, None, :] == jnp.arange(levels)[:, None])  # [B, levels, N]
    reached = at_level.any(-1)
    path = jnp.where(reached, jnp.argmax(at_level, axis=-1), -1)
    length = reached.sum(-1)

    tokens = jnp.take_along_axis(drawn, jnp.maximum(path, 0), axis=1)
    is_stop = (tokens[:, :, None] == stop_tokens).any(-1)
    first_stop = jnp.where(is_stop.any(-1), jnp.argmax(is_stop, axis=-1) + 1, levels)
    count = jnp.clip(jnp.minimum(jnp.minimum(length, first_stop), room), 0)
    return Commit(
        path=path,
        tokens=tokens,
        count=count,
        accepted=jnp.minimum(count, jnp.maximum(length - 1, 0)),
        stopped=(count > 0) & (count == first_stop) & is_stop.any(-1),
    )
