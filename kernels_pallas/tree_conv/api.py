"""The short depthwise convolution of a Gated DeltaNet layer: along a draft tree, its recovery, and over a prompt.

A node reads itself and its W - 1 nearest ancestors, through the root into the window of the last W - 1 committed
inputs. The window is part of the committed state: it must follow the accepted path just as S does.

Bytes moved: inputs and outputs once; the window is W - 1 vectors.
"""

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_rank, check_rows, check_shape, check_tree
from kernels_pallas.tree_conv import reference

_TREE_CONV = {"reference": reference.tree_conv}
_RECOVER_WINDOW = {"reference": reference.recover_window}
_PREFILL_CONV = {"reference": reference.prefill_conv}


def tree_conv(
    x: Float[Array, "B N C"],
    window: Float[Array, "B V C"],
    weight: Float[Array, "W C"],
    parents: Int[Array, "B N"],
    num_nodes: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B N C"]:
    """``silu`` of the convolution along the parents of each node, in the dtype of ``x`` (fp32 inside).

    Args:
        x: the inputs of the nodes.
        window: the last V = W - 1 committed inputs, oldest first; zeros before the start of a text.
        weight: the taps, oldest first; the last is the node's own.
        parents: int32, ``parents[t] < t``; -1 stands for the committed prefix.
        num_nodes: int32; places from there on are padding with zero outputs. None: all are real.
        implementation: "reference", or None for the best one that can run here.

    Raises:
        ValueError: a shape or dtype does not fit, N is not 1 to 64, or the implementation cannot run.
    """
    check_rank("x", x, "B N C")
    check_tree(parents, num_nodes)
    check_shape("parents", parents, "B N", x.shape[:2])
    _check_taps(x, window, weight)
    return choose("tree_conv", implementation, _TREE_CONV)(x, window, weight, parents, num_nodes)


def recover_window(
    window: Float[Array, "*L B V C"],
    x: Float[Array, "*L B N C"],
    parents: Int[Array, "B N"],
    last: Int[Array, " B"],
    implementation: Implementation | None = None,
) -> Float[Array, "*L B V C"]:
    """The window after the path from the root to ``last``: the V = W - 1 inputs that end at ``last``, oldest first.

    A path shorter than the window leaves the newest old inputs in front. Values are moved, not computed: a row with
    ``last`` = -1 keeps its window bit for bit.

    Args:
        window, x: as in ``tree_conv``, with or without a leading layer axis.
        parents: int32, the tree that was verified; the same for all layers.
        last: int32, the deepest accepted node, or -1.
        implementation: "reference", or None for the best one that can run here.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    if window.ndim not in (3, 4):
        raise ValueError(f"window must be [B, W-1, C] or [L, B, W-1, C], got {list(window.shape)}")
    *layers, rows, _, channels = window.shape
    check_tree(parents, None)
    nodes = parents.shape[1]
    check_shape("parents", parents, "B N", (rows, nodes))
    check_shape("x", x, "L B N C" if layers else "B N C", (*layers, rows, nodes, channels))
    check_rows("last", last, rows)
    return choose("recover_window", implementation, _RECOVER_WINDOW)(window, x, parents, last)


def prefill_conv(
    x: Float[Array, "B T C"],
    window: Float[Array, "B V C"],
    weight: Float[Array, "W C"],
    lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B V C"]]:
    """``silu`` of the causal convolution over a prompt, in the dtype of ``x``, and the window after ``lengths`` tokens.

    Outputs from ``lengths`` on are zero, and inputs from there on are not looked at. A row shorter than W - 1 keeps the
    newest old inputs in its window; a row of length 0 keeps all of it.

    Args:
        x, window, weight: as in ``tree_conv``.
        lengths: int32, 0 to T; None means T for every row.
        implementation: "reference", or None for the best one that can run here.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    check_rank("x", x, "B T C")
    check_rows("lengths", lengths, x.shape[0])
    _check_taps(x, window, weight)
    return choose("prefill_conv", implementation, _PREFILL_CONV)(x, window, weight, lengths)


def _check_taps(x: jax.Array, window: jax.Array, weight: jax.Array) -> None:
    check_rank("weight", weight, "W C")
    rows, _, channels = x.shape
    taps = weight.shape[0]
    if taps < 1:
        raise ValueError(f"weight must have at least one tap, got {list(weight.shape)}")
    check_shape("weight", weight, "W C", (taps, channels))
    check_shape("window", window, "B W-1 C", (rows, taps - 1, channels))
