"""The drafter that proposes nothing: each round is one autoregressive step."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

from specla_jax.config import DraftConfig
from specla_jax.drafters.base import Accepted, Context
from specla_jax.tree import DraftTree, root_only


@dataclass(frozen=True, kw_only=True)
class NoneDrafter:
    """Proposes only the root; has no parameters and an empty carry."""

    draft: DraftConfig
    needs_features: bool = False

    def init(self, params: Any, context: Context, features: Float[Array, "B T features"] | None) -> tuple[()]:
        return ()

    def propose(self, params: Any, carry: tuple[()], context: Context) -> tuple[DraftTree, tuple[()]]:
        return root_only(context.root, self.draft.nodes), carry

    def observe(self, params: Any, carry: tuple[()], accepted: Accepted) -> tuple[()]:
        return carry
