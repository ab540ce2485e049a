"""The root-mean-square norm, as every part of the runtime computes it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "..."], scale: Float[Array, "..."], eps: float, size: int = 0) -> Float[Array, "..."]:
    """Root-mean-square norm over the last axis, in float32.

    Args:
        x: of any float dtype.
        scale: of the last axis.
        eps: added to the mean square.
        size: numbers of the last axis, where what lies behind them are zeros; 0 for all.
    """
    x = x.astype(jnp.float32)
    mean = jnp.sum(x * x, axis=-1, keepdims=True) / (size or x.shape[-1])
    return x * jax.lax.rsqrt(mean + eps) * scale.astype(jnp.float32)
