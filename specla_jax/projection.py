"""Products of activations with weights: of a single row, and with gradients as narrow as the activations."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ROWS = 8  # in place of one


def dot(x: Float[Array, "*n i"], kernel: Float[Array, "i j"], **options: Any) -> Float[Array, "*n j"]:
    """``jnp.dot(x, kernel, **options)``; on a GPU a single row goes as the first of 8.

    Alone, XLA may multiply it element by element and write all i x j products as float32 before it adds them up: 16 MB
    for a 2048 x 2048 layer, twice the weights.
    """
    if math.prod(x.shape[:-1]) != 1 or jax.default_backend() != "gpu":
        return jnp.dot(x, kernel, **options)
    rows = jnp.pad(x.reshape(1, x.shape[-1]), ((0, ROWS - 1), (0, 0)))
    return jnp.dot(rows, kernel, **options)[:1].reshape(*x.shape[:-1], kernel.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: Float[Array, "*n i"], kernel: Float[Array, "i j"], out: Any) -> Float[Array, "*n j"]:
    """``x @ kernel`` for ``x`` in bf16, in the dtype ``out``; the products of its gradient are of bf16 too.

    Left to itself, JAX multiplies the float32 gradient of a float32 result by the other operand widened to float32,
    which on a GPU costs two to three times as much. The gradient of the kernel is summed in float32.
    """
    return dot(x, kernel.astype(x.dtype), preferred_element_type=out)


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
