"""The gated norm in plain jnp: the truth for the kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.norm import rms_norm
from kernels_pallas.stream_matmul.reference import fill_up


def gate_heads(
    o: Float[Array, "*n HV dv"], gate: Float[Array, "*n value_dim"] | None, dtype: jax.typing.DTypeLike
) -> Float[Array, "*n value_dim"]:
    """``o`` times silu of the gate, rounded to ``dtype`` before, if there is one; the heads side by side."""
    if gate is not None:
        o = o * jax.nn.silu(gate.astype(dtype).astype(jnp.float32)).reshape(o.shape)
    return o.reshape(*o.shape[:-2], -1)


def gated_norm(o: jax.Array, y: jax.Array | None, scale: jax.Array, *, start: int, eps: float) -> jax.Array:
    """See ``api.gated_norm``; the arguments are already checked."""
    gate = None if y is None else y[:, start : start + o.shape[1] * o.shape[2]]
    return fill_up(gate_heads(rms_norm(o, scale, eps), gate, o.dtype).astype(o.dtype))
