"""Drafters of the benchmarks: a chain that costs nothing to draft, and drafts that are right with a given probability.

The oracle is SpecLA's control study (arXiv 2607.16673): what speculation would gain from a drafter of any quality, its
cost being that of the drafter at hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import ancestor_mask
from specla_jax.config import DraftConfig
from specla_jax.drafters import Accepted, Context, Drafter
from specla_jax.errors import UserError
from specla_jax.tree import DraftTree, node_depth


@dataclass(frozen=True, kw_only=True)
class FillerDrafter:
    """Proposes a chain of token 0, so that every node of a verification is a real one and none is drafted."""

    draft: DraftConfig
    needs_features: bool = False

    def init(self, params: Any, context: Context, features: Float[Array, "B T features"] | None) -> tuple[()]:
        return ()

    def propose(self, params: Any, carry: tuple[()], context: Context) -> tuple[DraftTree, tuple[()]]:
        rows, nodes = context.length.shape[0], self.draft.nodes
        index = jnp.arange(nodes, dtype=jnp.int32)
        tree = DraftTree(
            tokens=jnp.where(index == 0, context.root[:, None], 0),
            parents=jnp.broadcast_to(index - 1, (rows, nodes)),
            num_nodes=jnp.full(rows, nodes, jnp.int32),
            log_prob=jnp.zeros((rows, nodes), jnp.float32),
        )
        return tree, carry

    def observe(self, params: Any, carry: tuple[()], accepted: Accepted) -> tuple[()]:
        return carry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OracleParams:
    """What an :class:`OracleDrafter` reads; all of it is data, so that one program serves every probability.

    Attributes:
      drafter: params of the real drafter.
      truth: [B, S] int32. The target's own output, its first token first.
      right: [B, S, depth] bool. Whether the draft of a level (0: a child of the root) is right in the round that
        begins after so many output tokens.
      follow: scalar bool. True proposes the real drafter's tokens instead. Nothing but this tells the program that it
        will not need them, so no compiler can leave out the work that makes them.
    """

    drafter: Any
    truth: Int[Array, "B S"]
    right: Bool[Array, "B S depth"]
    follow: Bool[Array, ""]


@dataclass(frozen=True, kw_only=True)
class OracleDrafter:
    """Gives the tokens of a real drafter's trees the acceptance that :class:`OracleParams` asks for; greedy only.

    The path from the root to the first child, its first child and so on is right or wrong level by level, a chain in
    all of its nodes. Nodes beside that path are wrong. A tree keeps its shape, so its path may end before ``depth``.
    """

    drafter: Drafter
    vocab_size: int

    @property
    def draft(self) -> DraftConfig:
        return self.drafter.draft

    @property
    def needs_features(self) -> bool:
        return self.drafter.needs_features

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        return getattr(self.drafter, "feature_layers", None)

    def init(self, params: OracleParams, context: Context, features: Float[Array, "B T features"] | None) -> Any:
        if params.truth.shape[0] != context.length.shape[0]:
            raise UserError(f"the truth has {params.truth.shape[0]} rows, the batch {context.length.shape[0]}")
        return self.drafter.init(params.drafter, context, features)

    def propose(self, params: OracleParams, carry: Any, context: Context) -> tuple[DraftTree, Any]:
        tree, carry = self.drafter.propose(params.drafter, carry, context)
        depth, on_path = self._path(tree)
        produced = (context.length - context.prompt_length)[:, None]  # [B, 1]
        rows, last = jnp.arange(produced.shape[0])[:, None], params.truth.shape[1] - 1
        # The root stands for the token before the first level; what lies beyond the output is never committed.
        truth = params.truth[rows, jnp.clip(produced + depth - 1, 0, last)]  # [B, N]
        right = params.right[rows, jnp.minimum(produced, last), jnp.maximum(depth - 1, 0)]
        # Wrong tokens of siblings may be equal: none of them is what the target draws.
        wrong = (truth + 1) % self.vocab_size
        beside = jnp.where(tree.tokens == truth, wrong, tree.tokens)
        told = jnp.where(on_path, jnp.where(right, truth, wrong), beside)
        index = jnp.arange(self.draft.nodes)
        drafted = (index > 0) & (index < tree.num_nodes[:, None])
        tokens = jnp.where(drafted & ~params.follow, told, tree.tokens)
        return DraftTree(tokens, tree.parents, tree.num_nodes, tree.log_prob), carry

    def observe(self, params: OracleParams, carry: Any, accepted: Accepted) -> Any:
        return self.drafter.observe(params.drafter, carry, accepted)

    def _path(self, tree: DraftTree) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
        """Depth of each node, and whether it is on the path of first children; what padding nodes get is not used."""
        nodes = self.draft.nodes
        if self.draft.branch == 1:  # known without work, which would count as the round's
            depth = jnp.broadcast_to(jnp.arange(nodes), tree.tokens.shape)
            return depth, jnp.ones(tree.tokens.shape, bool)
        earlier = jnp.tril(jnp.ones((nodes, nodes), bool), -1)
        later = jnp.any((tree.parents[:, :, None] == tree.parents[:, None, :]) & earlier, axis=-1)  # [B, N]
        reaches = ancestor_mask(tree.parents, tree.num_nodes)  # [B, N, N]
        return node_depth(tree.parents, tree.num_nodes), ~jnp.any(reaches & later[:, None, :], axis=-1)


def oracle_params(
    drafter_params: Any, outputs: Sequence[Sequence[int]], depth: int, probability: float, *, seed: int = 0
) -> OracleParams:
    """Params of an oracle whose drafts are right with ``probability``, each level and round by itself.

    Args:
      drafter_params: of the real drafter.
      outputs: the target's own output tokens, as many in every row.
      depth: of the drafts.
      probability: 0 to 1.
      seed: of a counter-based generator. The draws do not depend on ``probability``: what is right at one is right at
        every higher one.
    """
    truth = np.asarray(outputs, np.int32)
    draws = np.random.Generator(np.random.Philox(seed)).random((*truth.shape, depth))  # below 1
    return OracleParams(drafter_params, jnp.asarray(truth), jnp.asarray(draws < probability), jnp.asarray(False))


def expected_length(probability: float, depth: int) -> float:
    """Mean accepted length of chains whose drafts are right with ``probability`` each: 1 + p + ... + p^depth."""
    return sum(probability**level for level in range(depth + 1))


def crossing(points: Sequence[tuple[float, float]], level: float = 1.0) -> float | None:
    """Where the line through (x, y) points first rises to ``level``; None if it does not.

    The first x if it starts there or above.
    """
    points = sorted(points)
    if points and points[0][1] >= level:
        return points[0][0]
    for (x, y), (next_x, next_y) in pairwise(points):
        if y < level <= next_y:
            return x + (next_x - x) * (level - y) / (next_y - y)
    return None
