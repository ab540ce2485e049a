"""The product of a few tokens with a large matrix, with what stands before and after it in a layer.

A decoding step or the verification of a draft tree multiplies 1 to 64 tokens with every matrix of the model. The time
is that of reading the matrix once; so the norm before the product, and SwiGLU or the residual after it, are computed
beside the stream instead of in launches of their own.

Bytes moved: the weights once; x, the residual and the output are small beside them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_rank, check_shape
from kernels_pallas.stream_matmul import mosaic_gpu, reference
from kernels_pallas.stream_matmul.reference import BLOCK

_DTYPES = (jnp.float32, jnp.bfloat16)


def stream_matmul(
    x: Float[Array, "N K"],
    weights: Float[Array, "P K"],
    *,
    norm: tuple[Float[Array, " K"], float] | None = None,
    residual: Float[Array, "N M"] | None = None,
    swiglu: bool = False,
    features: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "N M"]:
    """``x`` times packed weights: the rows of the result do not depend on how many tokens there are.

        y = rms_norm(x, scale, eps) W^T   or   x W^T         operands rounded to the dtype of W, fp32 sums
        out = y                                              fp32
        out = silu(gate) up, with [gate | up] = y            in the dtype of W
        out = residual + y                                   in the dtype of the residual

    Args:
        x: bf16 or fp32.
        weights: of ``pack``, or of ``pack_gate_up`` for ``swiglu``; bf16 or fp32.
        norm: scale and eps of a root-mean-square norm of x.
        residual: bf16 or fp32; not with ``swiglu``.
        swiglu: the weights are those of a gate and of what it lets through.
        features: M; None for as many as there are rows of weights (half of them for ``swiglu``), filled-up ones
            included.
        implementation: "mosaic_gpu" (bf16 weights on Hopper, N at most 64, K a multiple of 64, M of 8), "reference", or
            None for the reference: the kernel has not been timed yet.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    check_rank("x", x, "N K")
    check_rank("weights", weights, "P K")
    tokens, depth = x.shape
    rows = weights.shape[0]
    if tokens < 1:
        raise ValueError("x must hold 1 token or more, got 0")
    if rows < BLOCK or rows % BLOCK:
        raise ValueError(f"weights must be packed, with a multiple of {BLOCK} rows, got {rows}")
    check_shape("weights", weights, "P K", (rows, depth))
    most = rows // 2 if swiglu else rows
    features = most if features is None else features
    if not 0 < features <= most:
        raise ValueError(f"features must be 1 to {most}, got {features}")
    if norm is not None:
        check_shape("norm[0]", norm[0], "K", (depth,))
    if residual is not None:
        if swiglu:
            raise ValueError("residual must be None with swiglu")
        check_shape("residual", residual, "N M", (tokens, features))
    for name, array in (("x", x), ("weights", weights), ("norm[0]", norm and norm[0]), ("residual", residual)):
        if array is not None and array.dtype not in _DTYPES:
            raise ValueError(f"{name} must be bfloat16 or float32, got {array.dtype}")
    run = choose(
        *("stream_matmul", implementation),
        {"reference": reference.stream_matmul, "mosaic_gpu": mosaic_gpu.stream_matmul},
        {"mosaic_gpu": mosaic_gpu.why_not(weights.dtype, tokens, depth, features)},
    )
    return run(x, weights, norm, residual, swiglu, features)
