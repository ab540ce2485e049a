"""Prompt look-up: drafts what followed the last tokens when they stood earlier in the same row (no weights)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specla_jax.config import DraftConfig
from specla_jax.drafters.base import Accepted, Context
from specla_jax.errors import UserError
from specla_jax.tree import DraftTree, merge_duplicates, root_only, select_nodes

# A tree looks at this many matches for each one it keeps, so that equal continuations leave room for others.
_SPARE_MATCHES = 4


@dataclass(frozen=True, kw_only=True)
class NgramDrafter:
    """Looks the last tokens of a row up among its earlier tokens.

    A match is an earlier place whose last n tokens equal the row's last n; n is counted up to ``max_ngram``. Longer
    matches come first, then more recent ones. A match at distance d drafts ``tokens[length + i - d]``, reading its
    own drafts once it passes the end of the row, so that a loop of any period is drafted to full depth. A chain
    takes the best match, a tree of branch K the K best with different continuations.

    The log-probability of a node is a guess that only ranks: n / (n + 1) a level, and a tenth off for each better
    match.

    Attributes:
      max_ngram: longest match that counts.
      min_ngram: shortest match that is used. 1 by default: a round costs the same with or without drafts.
    """

    draft: DraftConfig
    max_ngram: int = 4
    min_ngram: int = 1
    needs_features: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UserError(f"min_ngram must be 1 to max_ngram={self.max_ngram}, got {self.min_ngram}")

    def init(self, params: Any, context: Context, features: Float[Array, "B T features"] | None) -> tuple[()]:
        return ()

    def observe(self, params: Any, carry: tuple[()], accepted: Accepted) -> tuple[()]:
        return carry

    def propose(self, params: Any, carry: tuple[()], context: Context) -> tuple[DraftTree, tuple[()]]:
        depth, branch = self.draft.depth, self.draft.branch
        if depth == 0 or self.draft.nodes == 1:
            return root_only(context.root, self.draft.nodes), carry
        rows, capacity = context.tokens.shape
        length = context.length[:, None]

        wanted = min(capacity, branch if branch == 1 else _SPARE_MATCHES * branch)
        matched = self._match_lengths(context)  # [B, capacity]
        score, end = jax.lax.top_k(jnp.where(matched > 0, matched * capacity + jnp.arange(capacity), -1), wanted)
        found = score >= 0  # [B, matches], best first
        matched = jnp.take_along_axis(matched, end, axis=1)

        level = jnp.arange(depth)
        distance = jnp.where(found, length - 1 - end, 1)
        source = end[:, :, None] + 1 + level % distance[:, :, None]  # [B, matches, depth]
        source = jnp.minimum(source, length[:, :, None] - 1)
        drafts = jnp.take_along_axis(context.tokens, source.reshape(rows, -1), axis=1).reshape(source.shape)

        # The `branch` best matches with different continuations, moved to the front.
        equal = jnp.all(drafts[:, :, None] == drafts[:, None, :], axis=3)  # [B, matches, matches]
        better = jnp.tril(jnp.ones((wanted, wanted), bool), -1)
        fresh = found & ~jnp.any(equal & better, axis=2)
        kept = min(branch, wanted)
        order = jnp.argsort(~fresh, axis=1, stable=True)[:, :kept]
        count = jnp.minimum(jnp.sum(fresh, axis=1, dtype=jnp.int32), kept)
        drafts = jnp.take_along_axis(drafts, order[:, :, None], axis=1)  # [B, kept, depth]
        matched = jnp.maximum(jnp.take_along_axis(matched, order, axis=1), 1).astype(jnp.float32)

        step = jnp.log(matched / (matched + 1))[:, :, None]
        rank = jnp.log(0.9) * jnp.arange(kept)[:, None]
        log_prob = step * (level + 1) + rank  # [B, kept, depth]
        parents = jnp.where(level == 0, 0, level + depth * jnp.arange(kept)[:, None])  # [kept, depth]
        pool = DraftTree(
            tokens=jnp.concatenate([context.root[:, None], drafts.reshape(rows, -1)], axis=1),
            parents=jnp.pad(jnp.tile(parents.reshape(1, -1), (rows, 1)), ((0, 0), (1, 0)), constant_values=-1),
            num_nodes=1 + count * depth,
            log_prob=jnp.pad(log_prob.reshape(rows, -1), ((0, 0), (1, 0))),
        )
        if branch > 1:
            pool = merge_duplicates(pool, depth)
        return select_nodes(pool, self.draft.nodes, self.draft.prune_tau), carry

    def _match_lengths(self, context: Context) -> Int[Array, "B capacity"]:
        """Tokens that agree, counted backwards from each place and from the end of the row; 0 if too few."""
        tokens, length = context.tokens, context.length[:, None]
        place = jnp.arange(tokens.shape[1])
        matched = jnp.zeros(tokens.shape, jnp.int32)
        agrees = jnp.broadcast_to(place < length - 1, tokens.shape)
        for back in range(min(self.max_ngram, tokens.shape[1])):
            tail = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0), axis=1)
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]  # tokens[place - back]
            agrees = agrees & (place >= back) & (shifted == tail)
            matched = matched + agrees
        return jnp.where(matched >= self.min_ngram, matched, 0)
