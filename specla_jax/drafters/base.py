"""What a drafter is: three pure functions over an explicit carry."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specla_jax.config import DraftConfig
from specla_jax.tree import DraftTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What is known of each row.

    Attributes:
      tokens: [B, capacity] int32. Prompt and output; places at and beyond ``length`` hold anything.
      length: [B] int32, at least 1. Known tokens. The root is ``tokens[length - 1]``; the target's state covers the
        tokens before it.
      prompt_length: [B] int32.
      active: [B] bool. False for rows that have finished.
    """

    tokens: Int[Array, "B capacity"]
    length: Int[Array, " B"]
    prompt_length: Int[Array, " B"]
    active: Bool[Array, " B"]

    @property
    def root(self) -> Int[Array, " B"]:
        """[B] int32. The newest committed token, which the state does not cover yet."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accepted:
    """The outcome of a round; ``depth`` is the draft's depth.

    Attributes:
      path: [B, depth + 1] int32. Accepted nodes, root first, padded with -1.
      count: [B] int32. Nodes folded into the state, which is the number of committed tokens; 0 for finished rows.
      tokens: [B, depth + 1] int32. Committed tokens: ``tokens[j]`` follows ``path[j]``; only ``count`` are real.
      features: [B, N, layers * D]. The target's hidden states at the nodes.
      context: the context after the commit.
    """

    path: Int[Array, "B path"]
    count: Int[Array, " B"]
    tokens: Int[Array, "B path"]
    features: Float[Array, "B N features"]
    context: Context


class Drafter(Protocol):
    """Proposes draft trees. Implementations are frozen dataclasses, so that they are static under ``jit``.

    Weights and tables are the separate pytree ``params``. The carry keeps its shapes and dtypes, and the rows of
    finished requests keep their values. There is no random key: a tree may not depend on the coin, or acceptance
    would not be exact.

    Attributes:
      draft: the size of the trees; every tree has ``draft.nodes`` nodes.
      needs_features: whether ``init`` and ``observe`` read the target's hidden states.
      feature_layers (optional): which layers' states; None, or no such attribute, for those that the target names.
    """

    @property
    def draft(self) -> DraftConfig: ...

    @property
    def needs_features(self) -> bool: ...

    def init(self, params: Any, context: Context, features: Float[Array, "B T features"] | None) -> Any:
        """The carry after prefill. ``features`` are those of positions 0 to ``length - 2``, padded on the right."""
        ...

    def propose(self, params: Any, carry: Any, context: Context) -> tuple[DraftTree, Any]:
        """A tree for each row below ``context.root``."""
        ...

    def observe(self, params: Any, carry: Any, accepted: Accepted) -> Any:
        """The carry after a round; rows with ``accepted.count == 0`` keep theirs."""
        ...
