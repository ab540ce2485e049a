"""specla_jax/projection.py: products of activations with weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specla_jax.projection import dot, project


def _rows(monkeypatch: pytest.MonkeyPatch, backend: str, *shape: int) -> int:
    """Rows of the product that is made of activations of this shape."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x, kernel = jnp.zeros((*shape, 64), jnp.bfloat16), jnp.zeros((64, 32), jnp.bfloat16)
    (product,) = (e for e in jax.make_jaxpr(lambda x: dot(x, kernel, jnp.float32))(x).eqns if "dot" in str(e.primitive))
    return int(np.prod(product.outvars[0].aval.shape[:-1]))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_row_is_one_of_eight_on_a_gpu(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    assert _rows(monkeypatch, "gpu", *shape) == 8
    assert _rows(monkeypatch, "cpu", *shape) == 1


def test_other_rows_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _rows(monkeypatch, "gpu", 3, 5) == 15


@pytest.mark.parametrize("shape", [(), (1, 1), (2, 3)])
def test_the_product_is_the_same(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(0))
    x, kernel = jax.random.normal(keys[0], (*shape, 64)), jax.random.normal(keys[1], (64, 32))
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for got in (dot(x, kernel, jnp.float32, jax.lax.Precision.HIGHEST), project(x, kernel, jnp.float32)):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
