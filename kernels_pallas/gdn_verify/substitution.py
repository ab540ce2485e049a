"""Forward substitution in a Mosaic GPU kernel, of X + M X = G with M strictly lower triangular, 16 rows at a time.

Within a block of rows a thread owns a column of X, and all read the same entry of M at a time. What a block gives to
the rows below it is a product, which all threads share, each for a piece of 4 rows.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic

ROWS = 16  # of a block: most of what it gives to the rows below is then in the shared part
SKEW = 4  # numbers between the rows of M, so that the rows of a column lie in different banks


def substitute(given_smem, rows: int, m_smem, x_smem, interpret: bool) -> None:
    """Writes X, ``X[t] = G[t] - sum_i M[t, i] X[i]``. The caller lets the threads meet before and after.

    Args:
        given_smem: G [>= rows, n] fp32, whose rows from ``ROWS`` on are overwritten. May be ``x_smem``.
        rows: of X: 16, 32 or 64.
        m_smem: M [>= rows, rows], fp32, its rows ``SKEW`` numbers apart.
        x_smem: fp32 [>= rows, n].
        interpret: whether the kernel is interpreted.
    """
    for start in range(0, rows, ROWS):
        # Only as many warps work as there are columns: the others would repeat what these do.
        pl.when(mosaic.holds(x_smem.shape[1], interpret))(lambda start=start: _solve(given_smem, m_smem, x_smem, start))
        if start + ROWS < rows:
            mosaic.meet()
            _reduce(given_smem, m_smem, x_smem, start, rows)
            mosaic.meet()


def _solve(given_smem, m_smem, x_smem, start: int) -> None:
    x = [mosaic.load(given_smem.at[start + t], mosaic.spread(x_smem.shape[1])) for t in range(ROWS)]
    for t in range(ROWS):
        for i in range(t):
            x[t] = x[t] - m_smem[start + t, start + i] * x[i]
    for t in range(ROWS):
        x_smem[start + t, :] = x[t]


def _reduce(given_smem, m_smem, x_smem, start: int, rows: int) -> None:
    """What the block that starts there gives to the rows below it."""
    below, layout = pl.ds(start + ROWS, rows - start - ROWS), mosaic.pieces(4, 16, 2)
    rest = mosaic.load(given_smem.at[below], layout)

    def along(vector: jax.Array, axis: int) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, rest.shape, (axis,)), layout)

    for i in range(start, start + ROWS):
        m = mosaic.load(m_smem.at[below, i], layout.reduce(1))
        rest = rest - along(m, 0) * along(mosaic.load(x_smem.at[i], layout.reduce(0)), 1)
    given_smem[below, :] = rest


def identity(size: int) -> jax.Array:
    """I [size, size], fp32: what T = (I + M)^-1 is solved for."""
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, (size, size), axis, layout=mosaic.pieces(4, 16, 2)) for axis in (0, 1)
    )
    return jnp.where(row == column, 1.0, 0.0)
