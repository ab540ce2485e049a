"""Products of activations with weights whose gradients stay as narrow as the activations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: Float[Array, "*n i"], kernel: Float[Array, "i j"], out: Any) -> Float[Array, "*n j"]:
    """``x @ kernel`` for ``x`` in bf16, in the dtype ``out``; the products of its gradient are of bf16 too.

    Left to itself, JAX multiplies the float32 gradient of a float32 result by the other operand widened to float32,
    which on a GPU costs two to three times as much. The gradient of the kernel is summed in float32.
    """
    return jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=out)


def _forward(x: Array, kernel: Array, out: Any):
    return project(x, kernel, out), (x, kernel)


def _backward(out: Any, residuals: tuple[Array, Array], gradient: Array):
    x, kernel = residuals
    gradient = gradient.astype(x.dtype)
    dx = jnp.dot(gradient, kernel.astype(x.dtype).T)
    rows = (y.reshape(-1, y.shape[-1]) for y in (x, gradient))
    dkernel = jnp.einsum("td,tf->df", *rows, preferred_element_type=jnp.float32)
    return dx, dkernel.astype(kernel.dtype)


project.defvjp(_forward, _backward)
