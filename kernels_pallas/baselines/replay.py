"""Verification and recovery that keep no state but the committed one, and run tokens again instead.

Verification: a program a tile of columns, value head and leaf walks from the root down to its leaf, in registers. The
committed state is read once a leaf, and inner nodes are computed once for every leaf below them; all of these give the
same bits. Recovery: the accepted path is run once more from its inputs, the state read once and written once, all
layers in one launch.

Numerics: fp32 sums on CUDA cores. Serial along a path; the inputs of the next node are loaded while this one is
computed. Limits: dk and columns are powers of two.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import pallas_triton
from kernels_pallas.ancestors import ancestor_mask


def paths(parents: jax.Array, leaves_only: bool = True) -> tuple[jax.Array, jax.Array]:
    """The way from the root to every node: nodes [B, N, N], padded with 0 behind, and how many they are [B, N].

    With ``leaves_only`` a node that has children counts 0: some leaf's path holds it.
    """
    nodes = parents.shape[1]
    reach = ancestor_mask(parents)
    index = jnp.arange(nodes, dtype=jnp.int32)
    path = jnp.sort(jnp.where(reach, index, nodes), axis=-1)
    count = jnp.sum(reach, axis=-1, dtype=jnp.int32)
    if leaves_only:
        has_child = jnp.any(parents[:, :, None] == index, axis=1)
        count = jnp.where(has_child, 0, count)
    return jnp.where(path < nodes, path, 0), count


@functools.partial(jax.jit, static_argnames=("columns", "warps", "interpret"))  # traced once for all layers
def replay_verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    path: jax.Array,
    count: jax.Array,
    *,
    columns: int = 16,
    warps: int = 2,
    interpret: bool = False,
) -> jax.Array:
    """Outputs [B, N, HV, dv] in the dtype of ``v``.

    Args:
        q, k, v, log_decay, beta, state: as in ``gdn_verify``.
        path, count: from ``paths``.
        columns: of dv, a program.
        warps: a program.
        interpret: run without a GPU.
    """
    rows, nodes, heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    group = value_heads // heads
    gate = pl.BlockSpec((None, nodes, None), lambda c, h, m: (m // nodes, 0, h))
    by_key_head = pl.BlockSpec((None, nodes, None, dk), lambda c, h, m: (m // nodes, 0, h // group, 0))
    by_value_head = pl.BlockSpec((None, nodes, None, columns), lambda c, h, m: (m // nodes, 0, h, c))
    return pl.pallas_call(
        functools.partial(_verify_kernel, scale=dk**-0.5),
        grid=(dv // columns, value_heads, rows * nodes),
        in_specs=[
            by_key_head,
            by_key_head,
            by_value_head,
            gate,
            gate,
            pl.BlockSpec((None, None, dk, columns), lambda c, h, m: (m // nodes, h, 0, c)),
            pl.BlockSpec((None, None, nodes), lambda c, h, m: (m // nodes, m % nodes, 0)),
            pl.BlockSpec((None, 1), lambda c, h, m: (m // nodes, m % nodes)),
        ],
        out_specs=by_value_head,
        out_shape=jax.ShapeDtypeStruct(v.shape, v.dtype),
        compiler_params=pallas_triton.params(warps),
        interpret=interpret,
        name="replay_verify",
    )(q, k, v, log_decay, beta, state, path, count)


@functools.partial(jax.jit, static_argnames=("columns", "warps", "interpret"))  # traced once for all layers
def replay_recover(
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    path: jax.Array,
    count: jax.Array,
    *,
    columns: int = 16,
    warps: int = 2,
    interpret: bool = False,
) -> jax.Array:
    """The state [L, B, HV, dk, dv] after the accepted path, written in place.

    Args:
        k, v, log_decay, beta, state: as in ``gdn_verify``, with a leading layer axis.
        path: int32 [B, D], the accepted nodes from the root down; the same for all layers.
        count: int32 [B], how many of ``path`` were accepted.
        columns: of dv, a program.
        warps: a program.
        interpret: run without a GPU.
    """
    layers, rows, nodes, heads, dk = k.shape
    value_heads, dv = v.shape[3:]
    group = value_heads // heads
    gate = pl.BlockSpec((None, None, nodes, None), lambda c, h, m: (m // rows, m % rows, 0, h))
    whole = pl.BlockSpec((None, None, None, dk, columns), lambda c, h, m: (m // rows, m % rows, h, 0, c))
    return pl.pallas_call(
        _recover_kernel,
        grid=(dv // columns, value_heads, layers * rows),
        in_specs=[
            pl.BlockSpec((None, None, nodes, None, dk), lambda c, h, m: (m // rows, m % rows, 0, h // group, 0)),
            pl.BlockSpec((None, None, nodes, None, columns), lambda c, h, m: (m // rows, m % rows, 0, h, c)),
            gate,
            gate,
            whole,
            pl.BlockSpec((None, path.shape[1]), lambda c, h, m: (m % rows, 0)),
            pl.BlockSpec((1,), lambda c, h, m: (m % rows,)),
        ],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        input_output_aliases={4: 0},
        compiler_params=pallas_triton.params(warps),
        interpret=interpret,
        name="replay_recover",
    )(k, v, log_decay, beta, state, path, count)


def _verify_kernel(
    q_ref,  # [N, dk]
    k_ref,
    v_ref,  # [N, columns]
    log_decay_ref,  # [N]
    beta_ref,
    state_ref,  # [dk, columns]
    path_ref,  # [N]
    count_ref,  # [1]
    o_ref,  # [N, columns]
    *,
    scale: float,
) -> None:
    count = count_ref[0]

    @pl.when(count > 0)
    def _():
        def emit(t, s, q):
            o_ref[t] = (scale * jnp.sum(s * q[:, None], axis=0)).astype(o_ref.dtype)

        _run(path_ref, count, (k_ref, v_ref, log_decay_ref, beta_ref, q_ref), state_ref[...], emit)


def _recover_kernel(k_ref, v_ref, log_decay_ref, beta_ref, state_ref, path_ref, count_ref, out_ref) -> None:
    out_ref[...] = _run(path_ref, count_ref[0], (k_ref, v_ref, log_decay_ref, beta_ref), state_ref[...])


def _run(path_ref, count, refs, s, emit=None):
    """The recurrence over the first ``count`` nodes of the path; ``emit(t, state, q)`` after each."""

    def inputs(place):
        t = path_ref[place]
        k, v, decay, beta, *q = (ref[t].astype(jnp.float32) for ref in refs)
        return t, k, v, jnp.exp(decay), beta, *q

    def step(place, carry):
        (t, k, v, decay, beta, *q), s = carry
        ahead = inputs(jnp.minimum(place + 1, jnp.maximum(count, 1) - 1))
        s = decay * s
        u = beta * (v - jnp.sum(s * k[:, None], axis=0))
        s = s + k[:, None] * u[None, :]
        if emit is not None:
            emit(t, s, *q)
        return ahead, s

    return lax.fori_loop(0, count, step, (inputs(jnp.int32(0)), s))[1]
