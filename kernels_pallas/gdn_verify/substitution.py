"""Forward substitution in a Mosaic GPU kernel, of X + M X = G with M strictly lower triangular."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from kernels_pallas import mosaic

ROWS = 32  # of one straight line of code: more would outgrow the instruction cache


def substitute(given: Callable[[Any], jax.Array], rows: int, m_smem, rest_smem) -> list[jax.Array]:
    """The rows of X, vectors [n] spread over the threads: ``X[t] = G[t] - sum_i M[t, i] X[i]``.

    A thread owns a column of X, and all read the same entry of M at a time. Warps that have no column of their own
    repeat another's work: no value has to be handed over.

    Args:
        given: G by row; the row is a traced number for those from ``ROWS`` on.
        rows: of X, at most 64.
        m_smem: M [>= rows, rows], fp32.
        rest_smem: fp32 [ROWS, n] for what is left to do of the rows from ``ROWS`` on, if there are such rows.
    """
    x = _straight([given(t) for t in range(min(rows, ROWS))], m_smem, 0)
    if rows <= ROWS:
        return x

    # Nothing is stored where a slower warp may still read: it goes to another place than ``given`` comes from.
    def reduce(t, carry):
        rest = given(ROWS + t)
        for i in range(ROWS):
            rest = rest - m_smem[ROWS + t, i] * x[i]
        rest_smem[t] = rest
        return carry

    lax.fori_loop(0, rows - ROWS, reduce, 0)
    mosaic.meet()
    return x + _straight([vector(rest_smem, t) for t in range(rows - ROWS)], m_smem, ROWS)


def _straight(given: list[jax.Array], m_smem, start: int) -> list[jax.Array]:
    x = list(given)
    for t in range(len(x)):
        for i in range(t):
            x[t] = x[t] - m_smem[start + t, start + i] * x[i]
    return x


def vector(ref, t) -> jax.Array:
    """Row t of ``ref``, spread over the threads."""
    return mosaic.load(ref.at[t], mosaic.spread(ref.shape[1]))
