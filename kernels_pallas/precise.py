"""fp32 in products: the precision of the plain implementations, and the parts that a kernel cuts numbers into.

Left alone a GPU multiplies fp32 matrices in TF32, which costs the recurrent state three decimal digits a token.
"""

import jax
import jax.numpy as jnp
from jax import lax


def einsum(formula: str, *operands: jax.Array) -> jax.Array:
    """``jnp.einsum`` at ``Precision.HIGHEST`` with an fp32 result."""
    return jnp.einsum(formula, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def bf16_parts(x: jax.Array, parts: int) -> list[jax.Array]:
    """bf16 numbers whose sum is ``x`` (fp32), the largest first; two miss at most 2^-16 of it, three nothing.

    By cutting bits rather than rounding: a compiler may drop the rounding as excess precision, never a mask.
    """
    found = []
    for _ in range(parts - 1):
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -(2**16), jnp.float32)
        found.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*found, x.astype(jnp.bfloat16)]
