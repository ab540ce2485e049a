"""The inverse of a unit lower triangular matrix by blocks and matrix products.

Two halves at a time: with (I + A) = [[P, 0], [C, Q]] the inverse is [[P', 0], [-Q' C P', Q']]. Blocks of two rows are
exact as they stand (I - A), and doubling them up to N takes two products a level: log2 N levels, no row loop and no
``triangular_solve`` (which cuts an XLA command buffer, and is slow).

No power of A is ever formed, so nothing overflows or cancels when keys repeat: every intermediate is a block of the
result. Doubling the powers over 64 rows diverges for keys correlated at 0.95; the product (I - A)(I + A^2)(I + A^4) on
8 rows, which takes as many products as the merges below, costs a digit when beta nears 2 (1e-5 against 2e-6).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.precise import einsum

_BLOCK = 8


def unit_lower_inverse(lower: Float[Array, "*X N N"]) -> Float[Array, "*X N N"]:
    """``(I + lower)^-1`` in fp32 for a strictly lower triangular ``lower``; differentiable.

    Any N; it is padded with zeros to 8 * 2^j inside, which changes no digit of the result.
    """
    nodes = lower.shape[-1]
    padding = padded_size(nodes) - nodes
    padded = jnp.pad(lower.reshape(-1, nodes, nodes), [(0, 0), (0, padding), (0, padding)])
    return _inverse(padded)[:, :nodes, :nodes].reshape(lower.shape)


def padded_size(nodes: int) -> int:
    """The least 8 * 2^j that is not below ``nodes``."""
    return max(_BLOCK, 1 << (nodes - 1).bit_length())


# One batch axis throughout: XLA's CPU runtime aborts on a product of eight axes, which an axis a level would reach.


def _inverse(lower: jax.Array) -> jax.Array:  # [M, N, N]
    size = lower.shape[-1]
    if size == _BLOCK:
        return _small_inverse(lower)
    half = size // 2
    halves = _inverse(jnp.concatenate([lower[:, :half, :half], lower[:, half:, half:]]))
    upper_left, lower_right = jnp.split(halves, 2)
    corner = -_product(lower_right, _product(lower[:, half:, :half], upper_left))
    top = jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, lower_right], axis=-1)], axis=-2)


def _small_inverse(lower: jax.Array) -> jax.Array:
    """The same merges inside 8 x 8 tiles, where masks are cheaper than slices: X <- X - X C X."""
    row = jnp.arange(_BLOCK)

    def corner(size: int) -> jax.Array:  # lower left quarters of the blocks of 2 * size rows
        same_pair = row[:, None] // (2 * size) == row // (2 * size)
        return jnp.where(same_pair & (row[:, None] // size != row // size), lower, 0.0)

    inverse = jnp.eye(_BLOCK, dtype=lower.dtype) - corner(1)
    for size in (2, 4):
        inverse -= _product(inverse, _product(corner(size), inverse))
    return inverse


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return einsum("mij,mjk->mik", left, right)
