"""Products of activations with weights: a single row as fast as several, gradients as narrow as the activations."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_ROWS = 8  # the fewest that tensor cores take


def dot(x: Float[Array, "*n i"], kernel: Float[Array, "i j"], out: Any, precision: Any = None) -> Float[Array, "*n j"]:
    """``x @ kernel`` summed and returned in the dtype ``out``.

    On a GPU a single row is multiplied as one of eight, the others zero: of a vector and a matrix XLA makes a sum of
    products, all of which it writes to memory first.
    """
    product = partial(jnp.dot, precision=precision, preferred_element_type=out)
    if math.prod(x.shape[:-1]) != 1 or jax.default_backend() != "gpu":
        return product(x, kernel)
    rows = jnp.pad(x.reshape(1, -1), [(0, _ROWS - 1), (0, 0)])
    return product(rows, kernel)[0].reshape(*x.shape[:-1], -1)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: Float[Array, "*n i"], kernel: Float[Array, "i j"], out: Any) -> Float[Array, "*n j"]:
    """``x @ kernel`` for ``x`` in bf16, in the dtype ``out``; the products of its gradient are of bf16 too.

    Left to itself, JAX multiplies the float32 gradient of a float32 result by the other operand widened to float32,
    which on a GPU costs two to three times as much. The gradient of the kernel is summed in float32.
    """
    return dot(x, kernel.astype(x.dtype), out)


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
