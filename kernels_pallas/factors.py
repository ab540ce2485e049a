"""The factors of a draft tree: all that recovery needs to fold an accepted path into the state."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Factors:
    """What verification leaves behind of each node, in place of the node's state.

    dk + dv + 2 numbers a node and head, where the state has dk dv. A leading layer axis is allowed on every field.

    key: the normalised key, in the dtype of q and k. Zero at padding nodes, as all fields are.
    value: u of the delta rule, fp32; a bf16 u costs 2e-3 of the state over 1,600 tokens.
    log_decay: G, the sum of the log decays from the root to the node, fp32.
    log_decay_low: what fp32 rounded off G. Where one strong decay stands above weak ones, G is large while the
        differences of G that recovery takes the exponential of are small; without this term they keep fewer digits
        than the state (1e-5 at G = -100). May be absent: recovery then uses G alone.
    """

    key: Float[Array, "*L B N H dk"]
    value: Float[Array, "*L B N HV dv"]
    log_decay: Float[Array, "*L B N HV"]
    log_decay_low: Float[Array, "*L B N HV"] | None = None
