"""The product of a few tokens with a matrix in plain jnp, and how the matrix is packed: the truth for the kernel.

Packed weights have a feature a row, so that a block of 64 rows is what tensor cores take as their left operand, and the
tokens are the right one. Rows are filled up to whole blocks with zeros.

Numerics: operands are rounded to the dtype of the weights, products summed in fp32; fp32 weights at full precision.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

BLOCK = 64  # rows of packed weights that go together
GROUP = 32  # rows of a block that are of the gate; the others are of up


def pack(kernel: Float[Array, "K M"], dtype: jax.typing.DTypeLike = jnp.bfloat16) -> Float[Array, "P K"]:
    """The weights of ``x @ kernel`` as ``stream_matmul`` takes them; P is M, filled up to a multiple of 64."""
    return pack_rows(kernel.T, dtype)


def pack_rows(rows: Float[Array, "M K"], dtype: jax.typing.DTypeLike = jnp.bfloat16) -> Float[Array, "P K"]:
    """The same of weights that have a feature a row already, as a table of embeddings has."""
    return jnp.pad(rows.astype(dtype), ((0, -rows.shape[0] % BLOCK), (0, 0)))


def pack_gate_up(
    gate: Float[Array, "K I"], up: Float[Array, "K I"], dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> Float[Array, "P K"]:
    """Both matrices of a SwiGLU: 32 rows of the gate, the same 32 of up, and so on; P is 2 I, filled up."""
    if gate.shape != up.shape:
        raise ValueError(f"up must have the shape of gate, {list(gate.shape)}, got {list(up.shape)}")
    depth, width = gate.shape
    rows = jnp.stack([gate.astype(dtype).T, up.astype(dtype).T])
    rows = jnp.pad(rows, ((0, 0), (0, -width % GROUP), (0, 0))).reshape(2, -1, GROUP, depth)
    return rows.swapaxes(0, 1).reshape(-1, depth)


def rms_norm(x: Float[Array, "N K"], scale: Float[Array, " K"], eps: float) -> Float[Array, "N K"]:
    """Root-mean-square norm of every token, in fp32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale.astype(jnp.float32)


def stream_matmul(
    x: jax.Array,
    weights: jax.Array,
    norm: tuple[jax.Array, float] | None,
    residual: jax.Array | None,
    swiglu: bool,
    features: int,
) -> jax.Array:
    """See ``api.stream_matmul``; the arguments are already checked."""
    if norm is not None:
        x = rms_norm(x, *norm)
    precision = lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None
    y = lax.dot_general(
        *(x.astype(weights.dtype), weights, (((1,), (1,)), ((), ()))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    if swiglu:
        gate, up = jnp.moveaxis(y.reshape(y.shape[0], -1, 2, GROUP), 2, 0)
        y = (jax.nn.silu(gate) * up).reshape(y.shape[0], -1).astype(weights.dtype)
    y = y[:, :features]
    return y if residual is None else (residual + y).astype(residual.dtype)
