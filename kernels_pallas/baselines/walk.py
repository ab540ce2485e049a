"""Verification that keeps a state a node: the way of serving engines, where each node continues its parent's state.

One launch, a program a tile of columns of one value head. It takes the nodes in order, one after the other: the state
of the node's parent comes from the buffer of states in global memory (from the committed state for parent -1), is
updated by the gated delta rule, and goes to the node's own place in the buffer. Recovery is then a copy of one place.

Bytes moved: dk dv fp32 written a node and value head, and as much read again, less what stays in registers (``keep``)
or in the cache. Numerics: fp32 sums on CUDA cores, no tensor cores. Serial in the nodes; the inputs of the next node
are loaded while this one is computed.

Limits: dk and columns are powers of two; one program's tile must fit its registers (dk * columns / (32 warps) each);
the buffer of states must stay below 2^31 elements, as offsets inside a kernel are 32 bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import pallas_triton

MOST_ELEMENTS = 2**31


@functools.partial(jax.jit, static_argnames=("keep", "columns", "warps", "interpret"))  # traced once for all layers
def walk_verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    parents: jax.Array,
    states: jax.Array,
    *,
    keep: bool = False,
    columns: int = 16,
    warps: int = 2,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, N, HV, dv] in the dtype of ``v``, and the state after every node.

    Args:
        q, k, v, log_decay, beta, state, parents: as in ``gdn_verify``.
        states: fp32 [B, N, HV, dk, dv], the buffer that is written in place; its contents do not matter.
        keep: leave the state in registers for a node whose parent is the node just before.
        columns: of dv, a program.
        warps: a program.
        interpret: run without a GPU.

    Raises:
        ValueError: ``states`` is too large.
    """
    if states.size >= MOST_ELEMENTS:
        raise ValueError(f"states must stay below 2^31 elements, got {list(states.shape)}")
    rows, nodes, heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    group = value_heads // heads
    gate = pl.BlockSpec((None, nodes, None), lambda c, h, b: (b, 0, h))
    by_key_head = pl.BlockSpec((None, nodes, None, dk), lambda c, h, b: (b, 0, h // group, 0))
    by_value_head = pl.BlockSpec((None, nodes, None, columns), lambda c, h, b: (b, 0, h, c))
    all_states = pl.BlockSpec((None, nodes, None, dk, columns), lambda c, h, b: (b, 0, h, 0, c))
    return pl.pallas_call(
        functools.partial(_kernel, nodes=nodes, keep=keep, scale=dk**-0.5, barrier=not interpret),
        grid=(dv // columns, value_heads, rows),
        in_specs=[
            by_key_head,
            by_key_head,
            by_value_head,
            gate,
            gate,
            pl.BlockSpec((None, None, dk, columns), lambda c, h, b: (b, h, 0, c)),
            pl.BlockSpec((None, nodes), lambda c, h, b: (b, 0)),
            all_states,
        ],
        out_specs=[by_value_head, all_states],
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(states.shape, states.dtype)],
        input_output_aliases={7: 1},
        compiler_params=pallas_triton.params(warps),
        interpret=interpret,
        name="walk_verify",
    )(q, k, v, log_decay, beta, state, parents, states)


def _kernel(
    q_ref,  # [N, dk]
    k_ref,
    v_ref,  # [N, columns]
    log_decay_ref,  # [N]
    beta_ref,
    state_ref,  # [dk, columns]
    parents_ref,  # [N]
    _,
    o_ref,  # [N, columns]
    states_ref,  # [N, dk, columns]
    *,
    nodes: int,
    keep: bool,
    scale: float,
    barrier: bool,
) -> None:
    def inputs(t):
        k, q, v = (ref[t].astype(jnp.float32) for ref in (k_ref, q_ref, v_ref))
        return k, q, v, jnp.exp(log_decay_ref[t]), beta_ref[t], parents_ref[t]

    def stored(parent):
        return lax.cond(parent < 0, lambda: state_ref[...], lambda: states_ref[jnp.maximum(parent, 0)])

    def step(t, carry):
        (k, q, v, decay, beta, parent), s = carry
        ahead = inputs(jnp.minimum(t + 1, nodes - 1))
        s = lax.cond(parent == t - 1, lambda: s, lambda: stored(parent)) if keep else stored(parent)
        s = decay * s
        u = beta * (v - jnp.sum(s * k[:, None], axis=0))
        s = s + k[:, None] * u[None, :]
        o_ref[t] = (scale * jnp.sum(s * q[:, None], axis=0)).astype(o_ref.dtype)
        states_ref[t] = s
        if barrier:  # a later node may load with other threads than these that store
            pltriton.debug_barrier()
        return ahead, s if keep else None

    # Kept from the start, the committed state is what node 0 finds: its parent, -1, is "the node just before".
    lax.fori_loop(0, nodes, step, (inputs(jnp.int32(0)), state_ref[...] if keep else None))
