"""The committed recurrent state of a target, and the factors that carry it forward along an accepted path."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import Factors, gdn_recover
from specla_jax.config import TargetConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """What a GDN target remembers of the tokens it has read, for all layers and rows.

    It holds committed tokens only: a draft token never reaches it before it is accepted.

    Attributes:
      S: delta-rule state, key dimension before value dimension (flash-linear-attention since 0.5.1 stores the
        transpose).
      conv: the last ``W - 1`` inputs of the short convolution, oldest first; None for a target without one.
    """

    S: Float[Array, "L B HV dk dv"]
    conv: Float[Array, "L B W-1 C"] | None

    @classmethod
    def zeros(cls, config: TargetConfig, batch: int, dtype: str) -> "RecurrentState":
        """The state before any token. ``S`` is float32, the window has the compute dtype."""
        layers = config.num_hidden_layers
        S = jnp.zeros((layers, batch, config.num_v_heads, config.head_dim, config.head_v_dim), jnp.float32)
        conv = None
        if config.use_short_conv:
            conv = jnp.zeros((layers, batch, config.conv_size - 1, config.conv_dim), dtype)
        return cls(S, conv)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeFactors:
    """What a verification leaves behind for every node and layer: enough to recover the state at any node.

    Attributes:
      delta: factors (k, u, G) with a leading layer axis.
      conv: inputs of the short convolution; None for a target without one.
    """

    delta: Factors
    conv: Float[Array, "L B N C"] | None


def recover(
    state: RecurrentState, factors: TreeFactors, parents: Int[Array, "B N"], last: Int[Array, " B"]
) -> RecurrentState:
    """The state after the path from the root to node ``last``, for all layers at once (design 3, S_a).

    Args:
      state: committed state before the round.
      factors: what :meth:`GatedDeltaNetLM.verify` returned for the round's tree.
      parents: parent of each node, -1 for the root.
      last: deepest accepted node of each row; -1 leaves that row untouched, bit for bit.
    """
    if state.conv is None:
        return RecurrentState(gdn_recover(state.S, factors.delta, parents, last), None)
    assert factors.conv is not None
    return RecurrentState(*gdn_recover(state.S, factors.delta, parents, last, state.conv, factors.conv))
