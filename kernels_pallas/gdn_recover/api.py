"""Recovery: fold the accepted path of a draft tree into the committed state, the window of the convolution with it.

All layers go in one call, with a leading layer axis on the state and the factors. Bytes moved, for each layer and row
that accepted something, P being the nodes on its path: every state read once and written once, 8 HV dk dv; the factors
of the path, P (H dk keys + 4 HV (dv + 2)); V inputs read and V written, 2 V C in the dtype of the window. The states
are nearly all of it: 100 MB for 24 layers of 8 heads of 256 x 256. A row that accepted nothing moves nothing, if
``state`` and ``window`` are donated; otherwise XLA copies both first.
"""

from collections.abc import Callable
from typing import overload

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas.factors import Factors
from kernels_pallas.gdn_recover import reference, triton
from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.pallas_triton import why_not
from kernels_pallas.shapes import check_float32, check_rows, check_shape, check_tree

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array | None]]] = {
    "triton": triton.gdn_recover,
    "reference": reference.gdn_recover,
}


@overload
def gdn_recover(
    state: Float[Array, "*L B HV dk dv"],
    factors: Factors,
    parents: Int[Array, "B N"],
    last: Int[Array, " B"],
    window: None = None,
    conv_inputs: None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*L B HV dk dv"]: ...


@overload
def gdn_recover(
    state: Float[Array, "*L B HV dk dv"],
    factors: Factors,
    parents: Int[Array, "B N"],
    last: Int[Array, " B"],
    window: Float[Array, "*L B V C"],
    conv_inputs: Float[Array, "*L B N C"],
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*L B HV dk dv"], Float[Array, "*L B V C"]]: ...


def gdn_recover(
    state: Float[Array, "*L B HV dk dv"],
    factors: Factors,
    parents: Int[Array, "B N"],
    last: Int[Array, " B"],
    window: Float[Array, "*L B V C"] | None = None,
    conv_inputs: Float[Array, "*L B N C"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*L B HV dk dv"] | tuple[Float[Array, "*L B HV dk dv"], Float[Array, "*L B V C"]]:
    """The state after the path from the root to ``last``; with a window, the pair of both.

    Summed over the nodes i of that path,

        S' = exp(G_last) S + sum_i exp(G_last - G_i) k_i u_i^T

    and the window becomes the V = W - 1 inputs that end at ``last``, oldest first. A path shorter than the window
    leaves the newest old inputs in front. The window is moved, not computed.

    Args:
        state: fp32, with or without a leading layer axis.
        factors: from ``gdn_verify``, with the same leading axis. Nodes off the path may hold anything.
        parents: int32, the tree that was verified; the same for all layers.
        last: int32, the deepest accepted node; a row with -1 keeps its state and its window, bit for bit.
        window: the last V committed inputs of the short convolution; given together with ``conv_inputs``.
        conv_inputs: the inputs of the nodes, as ``tree_conv`` got them.
        implementation: "reference" (differentiable), "triton", or None for the best one that can run here.

    Raises:
        ValueError: a shape or dtype does not fit, one of ``window`` and ``conv_inputs`` is missing, or the
            implementation cannot run.
    """
    if state.ndim not in (4, 5):
        raise ValueError(f"state must be [B, HV, dk, dv] or [L, B, HV, dk, dv], got {list(state.shape)}")
    *layers, rows, value_heads, dk, dv = state.shape
    check_float32("state", state)
    check_tree(parents, None)
    check_rows("last", last, rows)
    nodes = parents.shape[1]
    check_shape("parents", parents, "B N", (rows, nodes))
    heads = factors.key.shape[-2]
    if heads < 1 or value_heads % heads:
        raise ValueError(f"factors.key must have a divisor of state's {value_heads} heads, got {heads}")
    lead = "L " if layers else ""
    check_shape("factors.key", factors.key, f"{lead}B N H dk", (*layers, rows, nodes, heads, dk))
    check_shape("factors.value", factors.value, f"{lead}B N HV dv", (*layers, rows, nodes, value_heads, dv))
    check_shape("factors.log_decay", factors.log_decay, f"{lead}B N HV", (*layers, rows, nodes, value_heads))
    if factors.log_decay_low is not None:
        check_shape("factors.log_decay_low", factors.log_decay_low, f"{lead}B N HV", factors.log_decay.shape)
    run = choose("gdn_recover", implementation, _IMPLEMENTATIONS, {"triton": why_not(dk, dv)})
    if window is None and conv_inputs is None:
        return run(state, factors, parents, last, None, None)[0]
    if window is None or conv_inputs is None:
        missing, given = ("window", "conv_inputs") if window is None else ("conv_inputs", "window")
        raise ValueError(f"{missing} must be given with {given}, got None")
    if window.ndim != len(layers) + 3:
        raise ValueError(f"window must be [{lead.replace(' ', ', ')}B, W-1, C], got {list(window.shape)}")
    length, channels = window.shape[-2:]
    check_shape("window", window, f"{lead}B W-1 C", (*layers, rows, length, channels))
    check_shape("conv_inputs", conv_inputs, f"{lead}B N C", (*layers, rows, nodes, channels))
    new_state, new_window = run(state, factors, parents, last, window, conv_inputs)
    assert new_window is not None
    return new_state, new_window
