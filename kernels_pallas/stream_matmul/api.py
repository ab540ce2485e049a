"""Products of a few tokens with large matrices, one after another, with what stands before and after each.

A decoding step or the verification of a draft tree multiplies 1 to 64 tokens with every matrix of the model. The time
is that of reading the matrices once. So the norm before a product, SwiGLU and the residual after it, are computed
beside the stream, and a layer's products share a launch: while one ends, the weights of the next are on their way.

Bytes moved: the weights once; x, the residual and the outputs are small beside them.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_rank, check_shape
from kernels_pallas.stream_matmul import mosaic_gpu, reference
from kernels_pallas.stream_matmul.mosaic_gpu import COUNTERS
from kernels_pallas.stream_matmul.reference import BLOCK, Product

__all__ = ["Product", "stream_matmul"]

_DTYPES = (jnp.float32, jnp.bfloat16)


def stream_matmul(
    x: Float[Array, "T K"],
    products: Sequence[Product],
    *,
    tokens: int | None = None,
    residual: Float[Array, "T D"] | None = None,
    eps: float | None = None,
    arrivals: tuple[Any, int] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array, ...]:
    """``x`` times the first weights, what comes out times the second, and so on: all outputs.

        y = x W^T, or of a normed product (x W^T) / sqrt(mean(x^2) + eps)     operands in the dtype of W, fp32 sums

    An output's rows do not depend on how many tokens there are. See :class:`Product` for what becomes of y. An output
    is fp32 for a plain product, in the dtype of the residual or of the weights for the others.

    Args:
        x: bf16 or fp32. T is a multiple of 8 for the kernel; rows from ``tokens`` on may hold any numbers.
        products: one or more; only the last may be plain.
        tokens: N, 1 to T; the rows of a plain output. The other outputs have T rows. None for T.
        residual: of the first product that ends with one; None where none does.
        eps: of the norms.
        arrivals: for the kernel, what ``no_arrivals`` gives, and a row of it that no other launch takes. None: the
            launch makes its own, which takes a launch more.
        implementation: "mosaic_gpu" (bf16 on Hopper, at most 64 tokens; see there), "reference", or None for the first
            that can run.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    check_rank("x", x, "T K")
    rows, depth = x.shape
    tokens = rows if tokens is None else tokens
    if not 1 <= tokens <= rows:
        raise ValueError(f"tokens must be 1 to the {rows} rows, got {tokens}")
    if not products:
        raise ValueError("products must hold one or more, got none")
    for i, product in enumerate(products):
        name = f"products[{i}]"
        _check(name, product, depth, last=i == len(products) - 1, residual=residual, eps=eps)
        if product.ends == "residual" and residual is not None:
            check_shape("residual", residual, "T D", (rows, product.width))
        depth = product.width
    for name, array in (("x", x), ("residual", residual), *((f"products[{i}]", p[0]) for i, p in enumerate(products))):
        if array is not None and array.dtype not in _DTYPES:
            raise ValueError(f"{name} must be bfloat16 or float32, got {array.dtype}")
    if residual is not None and all(product.ends != "residual" for product in products):
        raise ValueError("residual must be None where no product ends with one")
    if arrivals is not None:
        _check_arrivals(*arrivals)
    run = choose(
        *("stream_matmul", implementation),
        {"mosaic_gpu": mosaic_gpu.stream_matmul, "reference": reference.stream_matmul},
        {"mosaic_gpu": mosaic_gpu.why_not(rows, x, products, residual)},
    )
    if run is mosaic_gpu.stream_matmul:
        return mosaic_gpu.stream_matmul(x, products, residual, tokens, eps, arrivals)
    return reference.stream_matmul(x, products, residual, tokens, eps)


def _check_arrivals(counters: Any, row: Any) -> None:
    """Raises ValueError unless they are what ``no_arrivals`` gives, and a row of it."""
    if counters.ndim != 2 or counters.shape[1] != COUNTERS or counters.dtype != jnp.int32:
        raise ValueError(f"arrivals must be those of no_arrivals, int32 [n, {COUNTERS}], got {counters}")
    if isinstance(row, int) and not 0 <= row < counters.shape[0]:
        raise ValueError(f"arrivals must name a row of 0 to {counters.shape[0] - 1}, got {row}")


def _check(name: str, product: Product, depth: int, *, last: bool, residual: Any, eps: float | None) -> None:
    """Raises ValueError unless the product fits ``depth`` features before it."""
    check_rank(f"{name}.weights", product.weights, "P K")
    packed = product.weights.shape[0]
    if packed < BLOCK or packed % BLOCK:
        raise ValueError(f"{name}.weights must be packed, with a multiple of {BLOCK} rows, got {packed}")
    check_shape(f"{name}.weights", product.weights, "P K", (packed, depth))
    most = packed // (2 if product.ends == "swiglu" else 1)
    if not 0 < product.width <= most:
        raise ValueError(f"{name}.features must be 1 to {most}, got {product.width}")
    if product.ends not in ("plain", "residual", "swiglu"):
        raise ValueError(f"{name}.ends must be 'plain', 'residual' or 'swiglu', got {product.ends!r}")
    if product.ends == "plain" and not last:
        raise ValueError(f"{name}.ends must be 'residual' or 'swiglu', as it is not the last, got 'plain'")
    if product.ends == "residual" and residual is None:
        raise ValueError(f"residual must be given for {name}")
    if product.normed and eps is None:
        raise ValueError(f"eps must be given for {name}")
