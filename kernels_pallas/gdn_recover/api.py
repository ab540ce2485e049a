"""Recovery: fold the accepted path of a draft tree into the committed state.

All layers go in one call, with a leading layer axis on the state and the factors. Bytes moved: each state is read
once and written once; the factors are read once.
"""

from jaxtyping import Array, Float, Int

from kernels_pallas.factors import Factors
from kernels_pallas.gdn_recover import reference
from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_float32, check_rows, check_shape, check_tree

_IMPLEMENTATIONS = {"reference": reference.gdn_recover}


def gdn_recover(
    state: Float[Array, "*L B HV dk dv"],
    factors: Factors,
    parents: Int[Array, "B N"],
    last: Int[Array, " B"],
    implementation: Implementation | None = None,
) -> Float[Array, "*L B HV dk dv"]:
    """The state after the path from the root to ``last``.

    Summed over the nodes i of that path,

        S' = exp(G_last) S + sum_i exp(G_last - G_i) k_i u_i^T

    Args:
        state: fp32, with or without a leading layer axis.
        factors: from ``gdn_verify``, with the same leading axis.
        parents: int32, the tree that was verified; the same for all layers.
        last: int32, the deepest accepted node; a row with -1 keeps its state, bit for bit.
        implementation: "reference", or None for the best one that can run here.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
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
    return choose("gdn_recover", implementation, _IMPLEMENTATIONS)(state, factors, parents, last)
