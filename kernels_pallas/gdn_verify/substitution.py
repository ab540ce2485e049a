"""Forward substitution in a Mosaic GPU kernel, of X + M X = G with M strictly lower triangular."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import mosaic

ROWS = 32  # of one straight line of code: more would outgrow the instruction cache
TOGETHER = 4  # rows of a loop's step: their sums do not wait for each other


def substitute(given: Callable[[Any], jax.Array], rows: int, m_smem, rest_smem, x_smem, interpret: bool) -> None:
    """Writes X, ``X[t] = G[t] - sum_i M[t, i] X[i]``. The caller lets the threads meet before they read it.

    A thread owns a column of X, and all read the same entry of M at a time. Only as many warps work as there are
    columns: the others would repeat what these do.

    Args:
        given: G by row, vectors [n] spread over the threads; the row is a traced number for those from ``ROWS`` on.
        rows: of X, at most 64.
        m_smem: M [>= rows, rows], fp32.
        rest_smem: fp32 [ROWS, n] for what is left to do of the rows from ``ROWS`` on, if there are such rows.
        x_smem: fp32 [>= rows, n], not where ``given`` comes from.
        interpret: whether the kernel is interpreted.
    """

    def work() -> None:
        x = _straight([given(t) for t in range(min(rows, ROWS))], m_smem, 0)
        if rows > ROWS:
            later = range(rows - ROWS)

            def reduce(step, carry):
                some = [TOGETHER * step + k for k in range(TOGETHER)]
                rest = [given(ROWS + t) for t in some]
                for i in range(ROWS):
                    rest = [r - m_smem[ROWS + t, i] * x[i] for t, r in zip(some, rest, strict=True)]
                for t, r in zip(some, rest, strict=True):
                    rest_smem[t] = r
                return carry

            lax.fori_loop(0, len(later) // TOGETHER, reduce, 0)
            # Without a barrier: a thread reads what it wrote itself.
            x += _straight([vector(rest_smem, t) for t in later], m_smem, ROWS)
        for t in range(rows):
            x_smem[t, :] = x[t]

    pl.when(mosaic.holds(x_smem.shape[1], interpret))(work)


def _straight(given: list[jax.Array], m_smem, start: int) -> list[jax.Array]:
    x = list(given)
    for t in range(len(x)):
        for i in range(t):
            x[t] = x[t] - m_smem[start + t, start + i] * x[i]
    return x


def vector(ref, t) -> jax.Array:
    """Row t of ``ref``, spread over the threads."""
    return mosaic.load(ref.at[t], mosaic.spread(ref.shape[1]))
