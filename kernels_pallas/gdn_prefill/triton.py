"""Prefill by Pallas-Triton kernels, with a gradient of its own: see ``forward.py`` and ``backward.py`` for the maths.

A gradient keeps, in place of everything autodiff would, what ``forward.scan`` can write on the way: Z and the states at
the chunks' starts, both in bf16, and the 64 x 64 matrices. A value head and token that is 2 dv + dk dv / 32 + 264
bytes; for a layer of 8 heads of 256 x 256, 23 KB a token. All of it carries the name ``SAVED``, so that a remat policy
that saves that name does not run the kernels twice.

Limits: q, k, v in bf16 (fp32 ones would need six products in place of one, and go to the reference); chunks of 64; no
forward-mode derivative.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas import pallas_triton
from kernels_pallas.gdn_prefill.backward import gradients, reverse
from kernels_pallas.gdn_prefill.forward import CHUNK, Prepared, Scanned, prepare, scan
from kernels_pallas.gdn_prefill.tiles import PREPARE, REVERSE, SCAN
from kernels_pallas.tiles import Rule, Tile, first

SAVED = "gdn_prefill"
_MOST = 2**31  # elements of an array: offsets inside the kernels are 32 bits


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is fixed when a program is compiled; ``walk`` is another ``scan``, for where no gradient is wanted."""

    scale: float
    prepare: Tile
    scan: Tile
    reverse: Tile
    interpret: bool
    walk: Callable[..., Scanned] | None


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int) -> str | None:
    """Why the kernels do not take these inputs, or None if they do."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != jnp.bfloat16:
            return f"{name} must be bfloat16, got {x.dtype}"
    if chunk != CHUNK:
        return f"chunk must be {CHUNK}, got {chunk}"
    if max(q.size, v.size) >= _MOST:
        return f"arrays must stay below 2^31 elements, got {list(q.shape)} and {list(v.shape)}"
    return pallas_triton.unsupported(q.shape[-1], v.shape[-1])


def why_not(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int) -> str | None:
    """Why the kernels cannot run here on these inputs, or None if they can."""
    return pallas_triton.why_not(q.shape[-1], v.shape[-1]) or unsupported(q, k, v, chunk)


def gdn_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array | None,
    scale: float,
    chunk: int,
    *,
    tile: Tile | None = None,
    reverse_tile: Tile | None = None,
    prepare_tile: Tile | None = None,
    interpret: bool = False,
    walk: Callable[..., Scanned] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.gdn_prefill``; the arguments are already checked, and ``unsupported`` has nothing against them.

    ``tile`` is the one of the forward walk along the chunks; ``interpret`` runs the kernels without a GPU. ``walk``, a
    function of the module, takes the place of ``forward.scan`` but where a gradient is asked for.
    """
    rows, tokens, value_heads, dv = v.shape

    def choose(tile: Tile | None, table: Mapping[str, Sequence[Rule]]) -> Tile:
        return (tile or first(table, nodes=chunk, heads=rows * value_heads)).within(q.shape[-1], dv)

    plan = _Plan(
        scale=scale,
        prepare=choose(prepare_tile, PREPARE),
        scan=choose(tile, SCAN),
        reverse=choose(reverse_tile, REVERSE),
        interpret=interpret,
        walk=walk,
    )
    lengths = jnp.full(rows, tokens, jnp.int32) if lengths is None else jnp.minimum(lengths, tokens)
    return _prefill(plan, q, k, v, log_decay, beta, state, lengths)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _prefill(plan: _Plan, q, k, v, log_decay, beta, state, lengths) -> tuple[jax.Array, jax.Array]:
    _, scanned = _run(plan, q, k, v, log_decay, beta, state, lengths, save=False)
    return scanned.o, scanned.state


def _run(plan: _Plan, q, k, v, log_decay, beta, state, lengths, save: bool) -> tuple[Prepared, Scanned]:
    prepared = prepare(q, k, log_decay, beta, lengths, plan.scale, plan.prepare, plan.interpret)
    inputs = q, k, v, beta, state, prepared, lengths, plan.scale
    if plan.walk is None or save:
        return prepared, scan(*inputs, plan.scan, save, plan.interpret)
    return prepared, plan.walk(*inputs, plan.interpret)


def _forward(plan: _Plan, q, k, v, log_decay, beta, state, lengths):
    states = -(-q.shape[1] // CHUNK) * state.size
    if states >= _MOST:
        raise ValueError(f"a gradient must keep fewer than 2^31 numbers of the state, {list(q.shape)} needs {states}")
    both = _run(plan, q, k, v, log_decay, beta, state, lengths, save=True)
    prepared, scanned = jax.tree.map(lambda x: checkpoint_name(x, SAVED), both)
    residuals = q, k, log_decay, beta, lengths, prepared._replace(low=None), scanned.z, scanned.starts
    return (scanned.o, scanned.state), residuals


def _backward(plan: _Plan, residuals, cotangents):
    q, k, log_decay, beta, lengths, prepared, z, starts = residuals
    do, dstate = cotangents
    dv, du, ends, dfirst = reverse(q, k, do, beta, dstate, prepared, lengths, plan.scale, plan.reverse, plan.interpret)
    dq, dk, dlog_decay, dbeta = gradients(q, k, log_decay, beta, z, starts, do, dv, du, ends, lengths, plan.scale)
    return dq, dk, dv, dlog_decay, dbeta, dfirst, None


_prefill.defvjp(_forward, _backward)
