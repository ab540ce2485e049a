"""The drafter that proposes what it is told, so that a test can force any accepted length."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specla_jax.config import DraftConfig
from specla_jax.drafters.base import Accepted, Context
from specla_jax.errors import UserError
from specla_jax.tree import DraftTree, merge_duplicates, root_only


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Script:
    """The trees to propose: for each row, one for each number of tokens produced so far (``S`` of them).

    Attributes:
      tokens: [B, S, N - 1] int32. Tokens of the nodes below the root.
      parents: [B, S, N - 1] int32. Their parents, in topological order; 0 is the root, 1 the first node of ``tokens``.
      num_nodes: [B, S] int32. Nodes of the tree, root included.
    """

    tokens: Int[Array, "B S nodes"]
    parents: Int[Array, "B S nodes"]
    num_nodes: Int[Array, "B S"]


@dataclass(frozen=True, kw_only=True)
class ScriptedDrafter:
    """Proposes the tree of its :class:`Script` (the params) at ``length - prompt_length``, and nothing outside it.

    Duplicate nodes are merged. Every node has log-probability 0.
    """

    draft: DraftConfig
    needs_features: bool = False

    def init(self, params: Script, context: Context, features: Float[Array, "B T features"] | None) -> tuple[()]:
        width, nodes = params.tokens.shape[2], self.draft.nodes
        if width > nodes - 1:
            raise UserError(f"the script has trees of {width + 1} nodes, but nodes={nodes}")
        if params.tokens.shape[0] != context.length.shape[0]:
            raise UserError(f"the script has {params.tokens.shape[0]} rows, the batch {context.length.shape[0]}")
        return ()

    def propose(self, params: Script, carry: tuple[()], context: Context) -> tuple[DraftTree, tuple[()]]:
        rows, steps, width = params.tokens.shape
        produced = context.length - context.prompt_length
        inside = (produced >= 0) & (produced < steps)
        at = (jnp.arange(rows), jnp.clip(produced, 0, steps - 1))
        num_nodes = jnp.where(inside, params.num_nodes[at], 1)
        real = jnp.arange(1, width + 1) < num_nodes[:, None]  # [B, N - 1]
        tree = root_only(context.root, self.draft.nodes)
        tree = DraftTree(
            tokens=tree.tokens.at[:, 1 : width + 1].set(jnp.where(real, params.tokens[at], 0)),
            parents=tree.parents.at[:, 1 : width + 1].set(jnp.where(real, params.parents[at], -1)),
            num_nodes=num_nodes.astype(jnp.int32),
            log_prob=tree.log_prob.at[:, 1 : width + 1].set(jnp.where(real, 0.0, -jnp.inf)),
        )
        return merge_duplicates(tree, self.draft.depth), carry

    def observe(self, params: Script, carry: tuple[()], accepted: Accepted) -> tuple[()]:
        return carry


def script_trees(trees: Sequence[Sequence[Sequence[tuple[int, int]]]], width: int = 0) -> Script:
    """Builds a script from lists: ``trees[row][produced]`` is a list of (token, parent) below the root.

    Args:
      trees: the lists.
      width: least number of nodes below the root to make room for. Scripts of one size share a compiled program.

    Raises:
      UserError: a parent that does not come before its child.
    """
    steps = max((len(row) for row in trees), default=0) or 1
    width = max([width, *(len(tree) for row in trees for tree in row)])
    tokens = np.zeros((len(trees), steps, width), np.int32)
    parents = np.full((len(trees), steps, width), -1, np.int32)
    num_nodes = np.ones((len(trees), steps), np.int32)
    for row, scripted in enumerate(trees):
        for step, tree in enumerate(scripted):
            num_nodes[row, step] = len(tree) + 1
            for node, (token, parent) in enumerate(tree):
                if not 0 <= parent <= node:
                    raise UserError(f"parent of node {node + 1} must be 0 to {node}, got {parent}")
                tokens[row, step, node], parents[row, step, node] = token, parent
    return Script(jnp.asarray(tokens), jnp.asarray(parents), jnp.asarray(num_nodes))


def script_chain(
    true_tokens: Sequence[Sequence[int]], depth: int, wrong_at: int | Sequence[int] | None = None
) -> Script:
    """Builds a script of chains that follow a known output up to a chosen place.

    Args:
      true_tokens: the output of each row, first output token first.
      depth: drafts a round; fewer where the output ends.
      wrong_at: drafts to get right before a wrong one, so that ``wrong_at + 1`` tokens are committed; one number, or
        one for each number of tokens produced (the last one goes on). ``depth`` or None: all are right.

    Returns:
      A script with one chain for each number of tokens produced, 0 to ``len(true_tokens[row])``.
    """
    wrong = [depth] if wrong_at is None else [wrong_at] if isinstance(wrong_at, int) else list(wrong_at)

    def chain(output: Sequence[int], step: int) -> list[tuple[int, int]]:
        drafts = list(output[step : step + depth])
        bad = wrong[min(step, len(wrong) - 1)]
        if 0 <= bad < len(drafts):
            drafts[bad] += 1 if drafts[bad] == 0 else -1  # another token, inside any vocabulary of two or more
        return [(token, node) for node, token in enumerate(drafts)]

    return script_trees([[chain(output, step) for step in range(len(output) + 1)] for output in true_tokens])
