"""Random weights of a drafter, for the tests."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from specla_jax.drafters import EagleConfig, init_eagle


@cache
def weights(config: EagleConfig) -> dict:
    """Random weights, norms too."""
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: x * jnp.asarray(rng.uniform(0.5, 2, x.shape), x.dtype) if x.dtype == jnp.float32 else x,
        init_eagle(jax.random.key(1), config),
    )
