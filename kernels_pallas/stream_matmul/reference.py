"""Products of a few tokens with matrices in plain jnp, and how a matrix is packed: the truth for the kernel.

Packed weights have a feature a row, so that a block of 64 rows is what tensor cores take as their left operand, and the
tokens are the right one. Rows are filled up to whole blocks with zeros. The scale of a norm before the product goes
into the weights, which are rounded once, with it.

Numerics: operands are rounded to the dtype of the weights, products summed in fp32; fp32 weights at full precision.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

BLOCK = 64  # rows of packed weights that go together
GROUP = 32  # rows of a block that are of the gate; the others are of up

Ends = Literal["plain", "residual", "swiglu"]


class Product(NamedTuple):
    """One product: its packed weights [P, K], and what stands before and after it.

    Attributes:
        weights: of ``pack``, or of ``pack_gate_up`` for SwiGLU; bf16 or fp32.
        ends: "plain": y, fp32; "residual": the residual + y, which is the residual from there on; "swiglu": silu(gate)
            up, where y holds both.
        normed: whether x is divided by its root mean square first.
        features: M; None for as many as there are rows of weights (half of them for SwiGLU).
    """

    weights: Float[Array, "P K"]
    ends: Ends = "plain"
    normed: bool = False
    features: int | None = None

    @property
    def width(self) -> int:
        """M."""
        most = self.weights.shape[0] // (2 if self.ends == "swiglu" else 1)
        return most if self.features is None else self.features


def pack(
    kernel: Float[Array, "K M"], dtype: jax.typing.DTypeLike = jnp.bfloat16, scale: Float[Array, " K"] | None = None
) -> Float[Array, "P K"]:
    """The weights of ``x @ kernel`` as ``stream_matmul`` takes them; P is M, filled up to a multiple of 64.

    ``scale``: of the norm before the product.
    """
    return pack_rows(kernel.T, dtype, scale)


def pack_rows(
    rows: Float[Array, "M K"], dtype: jax.typing.DTypeLike = jnp.bfloat16, scale: Float[Array, " K"] | None = None
) -> Float[Array, "P K"]:
    """The same of weights that have a feature a row already, as a table of embeddings has."""
    if scale is not None:
        rows = rows.astype(jnp.float32) * scale.astype(jnp.float32)
    return jnp.pad(rows.astype(dtype), ((0, -rows.shape[0] % BLOCK), (0, 0)))


def pack_gate_up(
    gate: Float[Array, "K I"],
    up: Float[Array, "K I"],
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    scale: Float[Array, " K"] | None = None,
) -> Float[Array, "P K"]:
    """Both matrices of a SwiGLU: 32 rows of the gate, the same 32 of up, and so on; P is 2 I, filled up."""
    if gate.shape != up.shape:
        raise ValueError(f"up must have the shape of gate, {list(gate.shape)}, got {list(up.shape)}")
    depth, width = gate.shape
    rows = jnp.stack([gate.T, up.T])
    if scale is not None:
        rows = rows.astype(jnp.float32) * scale.astype(jnp.float32)
    rows = jnp.pad(rows.astype(dtype), ((0, 0), (0, -width % GROUP), (0, 0))).reshape(2, -1, GROUP, depth)
    return rows.swapaxes(0, 1).reshape(-1, depth)


def fill_up(x: Float[Array, "N ..."]) -> Float[Array, "T ..."]:
    """``x`` with rows of zeros behind it, up to the multiple of 8 that a kernel takes."""
    return jnp.pad(x, [(0, -x.shape[0] % 8), *((0, 0) for _ in x.shape[1:])])


def stream_matmul(
    x: jax.Array,
    products: Sequence[Product],
    residual: jax.Array | None,
    tokens: int,
    eps: float | None,
) -> tuple[jax.Array, ...]:
    """See ``api.stream_matmul``; the arguments are already checked."""
    outs = []
    for product in products:
        y = _product(x, product, eps)
        if product.ends == "swiglu":
            gate, up = jnp.moveaxis(y.reshape(y.shape[0], -1, 2, GROUP), 2, 0)
            y = (jax.nn.silu(gate) * up).reshape(y.shape[0], -1).astype(product.weights.dtype)
        y = y[:, : product.width]
        if product.ends == "residual" and residual is not None:
            y = residual = (residual + y).astype(residual.dtype)
        x = y
        outs.append(y[:tokens] if product.ends == "plain" else y)
    return tuple(outs)


def _product(x: jax.Array, product: Product, eps: float | None) -> jax.Array:
    weights = product.weights
    y = lax.dot_general(
        *(x.astype(weights.dtype), weights, (((1,), (1,)), ((), ()))),
        precision=lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if product.normed and eps is not None:
        wide = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return y
