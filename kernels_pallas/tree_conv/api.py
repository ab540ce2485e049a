"""The front of a Gated DeltaNet mixer: from the fused projection of a layer's input to what the delta rule reads.

For a draft tree (``tree_conv``) that is the short depthwise convolution along parents, silu, the split into heads, the
L2 norm of q and k, and the gates. A node reads itself and its W - 1 nearest ancestors, through the root into the window
of the last W - 1 committed inputs. The window is part of the committed state: ``gdn_recover`` moves it along the
accepted path, just as it folds that path into S. Over a prompt only the convolution is here (``prefill_conv``).

Bytes moved: inputs and outputs once; the window is W - 1 vectors.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import pallas_triton
from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_float32, check_rank, check_rows, check_shape, check_tree
from kernels_pallas.tree_conv import reference, triton
from kernels_pallas.tree_conv.reference import MixerInputs

_TREE_CONV = {"triton": triton.tree_conv, "reference": reference.tree_conv}
_PREFILL_CONV = {"reference": reference.prefill_conv}


@jax.named_scope("tree_conv")
def tree_conv(
    projected: Float[Array, "B N P"],
    window: Float[Array, "*L B V C"] | None,
    weight: Float[Array, "W C"] | None,
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    parents: Int[Array, "B N"],
    num_nodes: Int[Array, " B"] | None = None,
    *,
    key_heads: int,
    dk: int,
    dv: int | None = None,
    dtype: jax.typing.DTypeLike,
    max_beta: float = 1.0,
    layer: int | None = None,
    implementation: Implementation | None = None,
) -> MixerInputs:
    """q, k, v, the gates and the convolution's inputs of every node of a draft tree.

    With x the first C = 2 H dk + HV dv columns of ``projected`` rounded to ``dtype``, and sums in fp32:

        y_t       = silu(sum_j weight_j x_(ancestor W-1-j steps above t)), rounded to dtype; its columns are q | k | v
        q, k      = y / sqrt(|y|^2 + 1e-6) head by head, rounded to dtype
        log_decay = -exp(A_log) softplus(a + dt_bias)
        beta      = max_beta sigmoid(b)

    Args:
        projected: fp32, columns q | k | v | (others, not read) | a | b, the last two of HV columns each.
        window: the last V = W - 1 committed inputs, oldest first; zeros before the start of a text. None, with
            ``weight``, for a target without short convolution: y = silu(x).
        weight: the taps, oldest first; the last is the node's own.
        A_log, dt_bias: fp32; their size is the number of value heads.
        parents: int32, ``parents[t] < t``; -1 stands for the committed prefix.
        num_nodes: int32; places from there on are padding: all outputs are zero, but for ``inputs``. None: all are
            real.
        key_heads, dk, dv: H and the head sizes; ``dv`` None takes it from the channels of ``weight``.
        dtype: of the model, float32 or bfloat16.
        max_beta: 2 for a target with negative eigenvalues, else 1.
        layer: if given, ``window`` has a leading layer axis and this layer of it is read, without a copy.
        implementation: "triton", "reference", or None for the best one that can run here.

    Raises:
        ValueError: a shape or dtype does not fit, N is not 1 to 64, or the implementation cannot run.
    """
    check_rank("projected", projected, "B N P")
    check_float32("projected", projected)
    check_tree(parents, num_nodes)
    rows, nodes, width = projected.shape
    check_shape("parents", parents, "B N", (rows, nodes))
    check_rank("A_log", A_log, "HV")
    check_shape("dt_bias", dt_bias, "HV", A_log.shape)
    for name, array in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_float32(name, array)
    value_heads = A_log.size
    if key_heads < 1 or value_heads < 1 or value_heads % key_heads:
        raise ValueError(f"A_log must have a multiple of {key_heads=} heads, got {value_heads}")
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype}")
    dv = _value_size(weight, value_heads, 2 * key_heads * dk) if dv is None else dv
    channels = 2 * key_heads * dk + value_heads * dv
    if width < channels + 2 * value_heads:
        raise ValueError(
            f"projected must have at least {channels + 2 * value_heads} columns (q, k, v of {channels} and two gates "
            f"of {value_heads}), got {width}"
        )
    if (weight is None) != (window is None):
        raise ValueError("weight and window must both be given or both be None")
    if weight is not None and window is not None:
        _check_taps(window, weight, rows, channels, layer)
    run = choose("tree_conv", implementation, _TREE_CONV, {"triton": pallas_triton.why_not(dk, dv)})
    return run(
        projected,
        window,
        weight,
        A_log,
        dt_bias,
        parents,
        num_nodes,
        key_heads=key_heads,
        dk=dk,
        dv=dv,
        dtype=dtype,
        max_beta=max_beta,
        layer=layer,
    )


def prefill_conv(
    x: Float[Array, "B T C"],
    window: Float[Array, "B V C"],
    weight: Float[Array, "W C"],
    lengths: Int[Array, " B"] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B V C"]]:
    """``silu`` of the causal convolution over a prompt, in the dtype of ``x``, and the window after ``lengths`` tokens.

    Outputs from ``lengths`` on are zero, and inputs from there on are not looked at. A row shorter than W - 1 keeps the
    newest old inputs in its window; a row of length 0 keeps all of it.

    Args:
        x: the inputs of the tokens.
        window, weight: as in ``tree_conv``, of one layer.
        lengths: int32, 0 to T; None means T for every row.
        starts: tokens that see nothing before them; nor do those after them look past them. The window returned takes
            no notice of it.
        implementation: "reference", or None for the best one that can run here.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    check_rank("x", x, "B T C")
    check_rows("lengths", lengths, x.shape[0])
    _check_taps(window, weight, x.shape[0], x.shape[2])
    if starts is not None:
        check_shape("starts", starts, "B T", x.shape[:2])
    return choose("prefill_conv", implementation, _PREFILL_CONV)(x, window, weight, lengths, starts)


def _value_size(weight: jax.Array | None, value_heads: int, keys: int) -> int:
    """dv, from the channels of ``weight`` that the ``keys`` of q and k leave over."""
    if weight is None:
        raise ValueError("dv must be given where weight is None")
    check_rank("weight", weight, "W C")
    channels = weight.shape[1]
    if channels <= keys or (channels - keys) % value_heads:
        raise ValueError(f"weight must have {keys} channels and a multiple of {value_heads} more, got {channels}")
    return (channels - keys) // value_heads


def _check_taps(window: jax.Array, weight: jax.Array, rows: int, channels: int, layer: int | None = None) -> None:
    check_rank("weight", weight, "W C")
    taps = weight.shape[0]
    if taps < 1:
        raise ValueError(f"weight must have at least one tap, got {list(weight.shape)}")
    check_shape("weight", weight, "W C", (taps, channels))
    if layer is None:
        check_shape("window", window, "B W-1 C", (rows, taps - 1, channels))
        return
    check_rank("window", window, "L B W-1 C")
    layers = window.shape[0]
    check_shape("window", window, "L B W-1 C", (layers, rows, taps - 1, channels))
    if not 0 <= layer < layers:
        raise ValueError(f"layer must be 0 to {layers - 1}, got {layer}")
