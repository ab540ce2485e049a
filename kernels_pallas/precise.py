"""Products in full fp32: the one place where the precision of the plain implementations is chosen.

Without it a GPU multiplies fp32 matrices in TF32, which costs the recurrent state three decimal digits a token.
"""

import jax
import jax.numpy as jnp
from jax import lax


def einsum(formula: str, *operands: jax.Array) -> jax.Array:
    """``jnp.einsum`` at ``Precision.HIGHEST`` with an fp32 result."""
    return jnp.einsum(formula, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
