"""What stands between the delta rule and the projection of its outputs: a norm by heads and a gate.

In XLA they are one launch, and filling up the rows that the products of a decoding step take is another.

Bytes moved: o, the gate and the output once; they are small.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import pallas_triton
from kernels_pallas.gated_norm import reference, triton
from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_rank, check_shape

_DTYPES = (jnp.float32, jnp.bfloat16)


def gated_norm(
    o: Float[Array, "N HV dv"],
    y: Float[Array, "N width"] | None,
    scale: Float[Array, " dv"],
    *,
    start: int = 0,
    eps: float,
    implementation: Implementation | None = None,
) -> Float[Array, "T HV*dv"]:
    """``o`` over its root mean square by heads, times the scale and silu of the gate, as ``stream_matmul`` takes it.

        out = o / sqrt(mean(o^2) + eps) * scale * silu(gate)              in fp32, the gate rounded to the dtype of o

    Args:
        o: fp32 or bf16, of N tokens, 1 or more.
        y: fp32 or bf16, has the gate in the HV dv columns from ``start`` on; None: there is none.
        scale: of the norm, fp32 or bf16.
        implementation: "triton" (dv of 16, 32, 64, 128 or 256), "reference", or None for the first that can run.

    Returns:
        The dtype of ``o``; T is N filled up to a multiple of 8, with rows of zeros.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    check_rank("o", o, "N HV dv")
    tokens, heads, size = o.shape
    if not tokens:
        raise ValueError("o must have 1 token or more, got 0")
    check_shape("scale", scale, "dv", (size,))
    if y is not None:
        check_rank("y", y, "N width")
        least = start + heads * size
        if start < 0 or y.shape[0] != tokens or y.shape[1] < least:
            raise ValueError(f"y must be [{tokens}, {least} or more] for start {start}, got {list(y.shape)}")
    for name, array in (("o", o), ("y", y), ("scale", scale)):
        if array is not None and array.dtype not in _DTYPES:
            raise ValueError(f"{name} must be bfloat16 or float32, got {array.dtype}")
    run = choose(
        *("gated_norm", implementation),
        {"triton": triton.gated_norm, "reference": reference.gated_norm},
        {"triton": pallas_triton.why_not(size)},
    )
    return run(o, y, scale, start=start, eps=eps)
