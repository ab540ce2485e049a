"""Products of a single row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specla_jax.projection import ROWS, dot, project


@pytest.mark.parametrize("shape", [(16,), (1, 16), (1, 1, 16)])
def test_a_single_row_is_one_of_many_on_a_gpu_and_the_same(shape, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    x, kernel = jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.normal(size=(16, 5)), jnp.float32)
    assert "pad" not in str(jax.make_jaxpr(dot)(x, kernel))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    text = str(jax.make_jaxpr(lambda *args: dot(*args))(x, kernel))
    assert "pad" in text
    assert f"f32[{ROWS},5]" in text
    found = dot(x, kernel)
    assert found.shape == (*shape[:-1], 5)
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(kernel), rtol=1e-5, atol=1e-5)
    narrow = project(x.astype(jnp.bfloat16), kernel, jnp.float32)
    np.testing.assert_allclose(narrow, np.asarray(x) @ np.asarray(kernel), rtol=0.05, atol=0.1)


def test_more_rows_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "pad" not in str(jax.make_jaxpr(dot)(jnp.zeros((2, 1, 16)), jnp.zeros((16, 5))))
