"""Who stands above whom in a draft tree.

A row of ``parents`` is a forest in topological order: ``parents[t] < t``, and -1 where the committed prefix is the
parent. Everything here is of static size and takes log2 N or W steps, never one step a node.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kernels_pallas.shapes import check_tree


def node_mask(num_nodes: Int[Array, " B"], nodes: int) -> Bool[Array, "B N"]:
    """True for the first ``num_nodes`` of ``nodes`` places: those that hold a real node."""
    return jnp.arange(nodes) < num_nodes[:, None]


def ancestor_mask(parents: Int[Array, "B N"], num_nodes: Int[Array, " B"] | None = None) -> Bool[Array, "B N N"]:
    """``mask[b, t, i]``: i is t or an ancestor of t, and both are real nodes.

    Path doubling: the relation "at most 2^j steps up" times itself is "at most 2^(j+1) steps up", so ceil(log2 N)
    boolean products are enough for a chain of N nodes. (Not written as products: on a GPU, XLA tries the many tilings
    of a product for seconds, however small it is.) A place from ``num_nodes`` on is padding: it reaches nobody and
    nobody reaches it, whatever its parent says. A parent that breaks the order counts as -1.

    Raises ``ValueError`` for a wrong shape or dtype, and for N outside 1 to 64.
    """
    check_tree(parents, num_nodes)
    nodes = parents.shape[1]
    index = jnp.arange(nodes)
    is_parent = (parents[:, :, None] == index) & (index < index[:, None])  # [B, N, N]
    reach = is_parent | (index == index[:, None])
    if num_nodes is not None:
        real = node_mask(num_nodes, nodes)
        reach &= real[:, :, None] & real[:, None, :]
    for _ in range((nodes - 1).bit_length()):
        reach = jnp.any(reach[:, :, :, None] & reach[:, None, :, :], axis=2)
    return reach


def ancestor_bits(
    parents: Int[Array, "B N"], num_nodes: Int[Array, " B"] | None = None
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """``ancestor_mask`` in two int32 words a node: bit i of the first for nodes 0 to 31, of the second for 32 to 63.

    Pointer doubling on the words themselves, which XLA makes two launches of where the mask takes six to eight. The
    same for all layers of a round: XLA finds the repeated calls and computes them once.
    """
    check_tree(parents, num_nodes)
    nodes = parents.shape[1]
    index = jnp.arange(nodes)
    real = jnp.broadcast_to(True, parents.shape) if num_nodes is None else node_mask(num_nodes, nodes)
    above = jnp.where(real & (parents < index), parents, -1)
    own = jnp.where(real, jnp.uint32(1) << (index % 32).astype(jnp.uint32), jnp.uint32(0))
    words = [jnp.where(index // 32 == i, own, jnp.uint32(0)) for i in range(2)]

    def from_above(values: jax.Array, nothing: jax.Array) -> jax.Array:
        found = jnp.take_along_axis(values, jnp.maximum(above, 0), axis=1, mode="promise_in_bounds")
        return jnp.where(above >= 0, found, nothing)

    for _ in range((nodes - 1).bit_length()):
        words = [word | from_above(word, jnp.uint32(0)) for word in words]
        above = from_above(above, jnp.int32(-1))
    low, high = (jax.lax.bitcast_convert_type(word, jnp.int32) for word in words)
    return low, high


def walk_up(parents: Int[Array, "B N"], start: Int[Array, "B M"], window: int, steps: int) -> list[Int[Array, "B M"]]:
    """The places met on the way up from ``start``: ``steps`` arrays, the start itself first.

    Places count along ``[window, nodes]``: the ``window`` last committed inputs, oldest first, then the nodes. Above a
    node with parent -1 stands the newest committed input, above each input the one before it, and the oldest stays.
    """
    above_window = jnp.maximum(jnp.arange(window, dtype=jnp.int32) - 1, 0)
    above_nodes = jnp.maximum(parents, -1) + window
    above = jnp.concatenate([jnp.broadcast_to(above_window, (parents.shape[0], window)), above_nodes], axis=1)
    places = [start]
    for _ in range(steps - 1):
        places.append(jnp.take_along_axis(above, places[-1], axis=1, mode="clip"))
    return places
