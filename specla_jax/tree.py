"""Draft trees: fixed-shape arrays of nodes in topological order, node 0 the root.

Everything here is pure, batched over rows and free of host work, so that it can run inside the generation loop.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftTree:
    """One draft tree a row; ``B`` rows, ``N`` nodes.

    Attributes:
      tokens: [B, N] int32. Node 0 is the root, the newest committed token. Padding nodes hold 0.
      parents: [B, N] int32. ``parents[t] < t``; -1 for the root and for padding nodes.
      num_nodes: [B] int32. Real nodes, root included, at least 1; the nodes after them are padding.
      log_prob: [B, N] float32. Cumulative draft log-probability of the node: 0 for the root, and never above the
        parent's. Padding nodes hold -inf.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    num_nodes: Int[Array, " B"]
    log_prob: Float[Array, "B N"]


def root_only(root: Int[Array, " B"], nodes: int) -> DraftTree:
    """The tree that proposes nothing: the root token and ``nodes - 1`` padding nodes."""
    first = jnp.arange(nodes) == 0  # [N]
    return DraftTree(
        tokens=jnp.where(first, root[:, None], 0).astype(jnp.int32),
        parents=jnp.full((root.shape[0], nodes), -1, jnp.int32),
        num_nodes=jnp.ones(root.shape[0], jnp.int32),
        log_prob=jnp.broadcast_to(jnp.where(first, 0.0, -jnp.inf), (root.shape[0], nodes)).astype(jnp.float32),
    )


def node_depth(parents: Int[Array, "B N"], num_nodes: Int[Array, " B"]) -> Int[Array, "B N"]:
    """Edges between each node and the root; 0 for the root and for padding nodes."""
    n = parents.shape[1]
    ancestor = jnp.where(jnp.arange(n) < num_nodes[:, None], parents, -1)
    depth = (ancestor >= 0).astype(jnp.int32)
    # Pointer doubling: after i steps `ancestor` is 2^i levels up and `depth` counts the edges in between.
    for _ in range((n - 1).bit_length()):
        depth = depth + jnp.where(ancestor >= 0, _take(depth, ancestor), 0)
        ancestor = jnp.where(ancestor >= 0, _take(ancestor, ancestor), -1)
    return depth


def select_nodes(pool: DraftTree, nodes: int, tau: float | None) -> DraftTree:
    """Prunes by confidence, then keeps the ``nodes`` best of a pool.

    With q the cumulative log-probability and q* the largest q below the root, a node stays if ``q >= q* - tau``
    (``tau=None`` keeps all); of these the ``nodes`` with the largest q stay, equal ones by lower index. The root
    always stays. A node counts with the least q on its path, so the kept set is closed under ancestors whatever
    the pool holds.

    Args:
      pool: P >= 1 nodes, in topological order.
      nodes: nodes of the result; a smaller pool is padded.
      tau: nats, 0 or more.

    Returns:
      A tree of exactly ``nodes`` nodes, in the order of the pool.
    """
    size = pool.tokens.shape[1]
    index = jnp.arange(size)
    real = index < pool.num_nodes[:, None]  # [B, P]
    score = _path_minimum(jnp.where(real, pool.log_prob, -jnp.inf), pool.parents)
    score = jnp.where(real, score, -jnp.inf)
    below = real & (index > 0)
    keep = real
    if tau is not None:
        best = jnp.max(jnp.where(below, score, -jnp.inf), axis=1, keepdims=True)
        keep = real & (score >= best - tau)
    keep = keep | (index == 0)
    score = jnp.where(index == 0, jnp.inf, jnp.where(keep, score, -jnp.inf))
    # A kept node of score -inf has nothing pruned beside it (q* is -inf as well), so ties still fall to kept nodes.
    _, chosen = jax.lax.top_k(score, min(nodes, size))  # equal values: lower index first
    taken = _take(keep, chosen)
    return _gather_nodes(pool, jnp.where(taken, chosen, size), nodes)


def merge_duplicates(tree: DraftTree, levels: int) -> DraftTree:
    """Makes one node of nodes with the same parent and the same token.

    The first one stays, with the largest log-probability among them; the children of the others become its children
    and are merged in turn. The result is compacted and has the same static size.

    Args:
      tree: any tree.
      levels: static bound on the depth of its nodes. Each level takes one pass over all pairs of nodes; the number of
        passes is fixed, because a loop that ends on a computed value would make a GPU wait for the host.
    """
    size = tree.tokens.shape[1]
    index = jnp.arange(size)
    real = index < tree.num_nodes[:, None]  # [B, P]
    same_token = (tree.tokens[:, :, None] == tree.tokens[:, None, :]) & real[:, :, None] & real[:, None, :]

    def settle_one_more_level(_: int, first: Array) -> Array:
        parent = _map_parents(first, tree.parents)
        same = same_token & (parent[:, :, None] == parent[:, None, :])  # [B, P, P]
        return jnp.where(real, jnp.argmax(same, axis=2), index).astype(jnp.int32)

    start = jnp.broadcast_to(index, tree.tokens.shape).astype(jnp.int32)
    first = jax.lax.fori_loop(0, levels, settle_one_more_level, start)

    member = (first[:, None, :] == index[:, None]) & real[:, None, :]  # [B, kept, merged into it]
    merged = DraftTree(
        tokens=tree.tokens,
        parents=_map_parents(first, tree.parents),
        num_nodes=tree.num_nodes,
        log_prob=jnp.max(jnp.where(member, tree.log_prob[:, None, :], -jnp.inf), axis=2),
    )
    return _gather_nodes(merged, jnp.where(real & (first == index), index, size), size)


def _take(values: Array, index: Int[Array, "B M"]) -> Array:
    return jnp.take_along_axis(values, jnp.maximum(index, 0), axis=1)


def _map_parents(first: Int[Array, "B P"], parents: Int[Array, "B P"]) -> Int[Array, "B P"]:
    return jnp.where(parents >= 0, _take(first, parents), -1)


def _path_minimum(values: Float[Array, "B P"], parents: Int[Array, "B P"]) -> Float[Array, "B P"]:
    ancestor = parents
    for _ in range((values.shape[1] - 1).bit_length()):
        values = jnp.where(ancestor >= 0, jnp.minimum(values, _take(values, ancestor)), values)
        ancestor = jnp.where(ancestor >= 0, _take(ancestor, ancestor), -1)
    return values


def _gather_nodes(pool: DraftTree, chosen: Int[Array, "B M"], nodes: int) -> DraftTree:
    """The chosen nodes (P = none) as a compacted tree of ``nodes`` nodes; parents must be chosen too."""
    size = pool.tokens.shape[1]
    chosen = jnp.sort(chosen, axis=1)
    chosen = jnp.pad(chosen, ((0, 0), (0, max(0, nodes - chosen.shape[1]))), constant_values=size)[:, :nodes]
    real: Bool[Array, "B N"] = chosen < size
    at = jnp.where(real, chosen, 0)
    parents = _take(pool.parents, at)
    # The new index of a parent is the number of chosen nodes before it.
    renumbered = jnp.sum(chosen[:, None, :] < parents[:, :, None], axis=2, dtype=jnp.int32)  # [B, N]
    return DraftTree(
        tokens=jnp.where(real, _take(pool.tokens, at), 0),
        parents=jnp.where(real & (parents >= 0), renumbered, -1),
        num_nodes=jnp.sum(real, axis=1, dtype=jnp.int32),
        log_prob=jnp.where(real, _take(pool.log_prob, at), -jnp.inf),
    )
