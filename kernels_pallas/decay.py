"""Sums of log decays along paths, with their digits kept.

``exp(G_t - G_i)`` needs the difference to about 1e-7 *absolute*. G itself is a sum from the root; under strong decay it
reaches hundreds, where fp32 steps by 3e-5. So inside verification the difference is never taken: ``between`` adds up
only the decays that lie between two nodes. Recovery sees nothing but G, hence ``path_sum`` returns G in two parts.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels_pallas.precise import einsum

# Decays are cut at this step: sums of the coarse parts are exact in fp32 while they stay under 2^24 steps = 65,536.
STEP = 2.0**-8


def between(log_decay: Float[Array, "*X N"], reach: Bool[Array, "*#X N N"]) -> Float[Array, "*X N N"]:
    """``out[t, i]``: the sum of the log decays below i down to t, -inf where i is neither t nor an ancestor of t.

    ``reach[t, i]`` says that i is t or an ancestor of t. Masked here, before anybody takes the exponential.
    """
    nodes = log_decay.shape[-1]
    below = reach & ~jnp.eye(nodes, dtype=bool)
    on_path = jnp.where(reach, log_decay[..., None, :], 0.0)  # [*X, N, N]
    total = einsum("...tj,...ji->...ti", on_path, below.astype(jnp.float32))
    return jnp.where(reach, total, -jnp.inf)


def path_sum(
    log_decay: Float[Array, "*X N"], reach: Bool[Array, "*#X N N"]
) -> tuple[Float[Array, "*X N"], Float[Array, "*X N"]]:
    """``G[t]``, the sum of the log decays from the root down to t, and what rounding it to fp32 left over.

    The coarse parts of the decays (multiples of 2^-8) add up without any error, the fine parts with an error near
    1e-8; so the two results together carry G to that error whatever its size.
    """
    coarse = jnp.round(log_decay / STEP) * STEP
    parts = jnp.stack([coarse, log_decay - coarse], axis=-1)  # [*X, N, 2]
    sums = einsum("...ti,...ic->...tc", reach.astype(jnp.float32), parts)
    coarse, fine = sums[..., 0], sums[..., 1]
    total = coarse + fine
    return total, (coarse - total) + fine
