"""The round of decoding, and the loop over it.

``spec_round`` is the whole of speculative decoding: propose, verify, accept, recover, commit. It is a pure function of
the parameters and a carry, so it can run under ``lax.while_loop`` (:meth:`Engine.generate`) or be called from Python
to stream text. Autoregressive decoding is the same round with a tree of one node.

Between rounds this always holds: the state covers every token of a row but the newest, which is the root of the next
tree. Where the state is kept does not depend on what a round accepts.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import named_scope  # what a profile goes by
from jaxtyping import Array, Bool, Float, Int

from specla_jax.acceptance import Commit, accept
from specla_jax.decode_step import DecodeStep, DecodeWeights
from specla_jax.drafters import Accepted, Context, Drafter
from specla_jax.model import GatedDeltaNetLM, call
from specla_jax.sampling import Sampler, scores
from specla_jax.state import RecurrentState, TreeFactors, recover
from specla_jax.tree import node_depth


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """Weights of a generation: the target's nested dict, what the drafter takes, and what a ``DecodeStep`` reads."""

    target: Any
    drafter: Any
    decode: DecodeWeights | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Request:
    """What the caller asked for; the same in every round.

    Attributes:
      sampler: how tokens are drawn.
      stop_tokens: ids that end a text, padded with -1.
      limit: prompt length + max_new_tokens of each row.
    """

    sampler: Sampler
    stop_tokens: Int[Array, " S"]
    limit: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counters:
    """Sums over the rounds in which a row was active; only committed tokens count as accepted.

    Attributes:
      rounds: verifications.
      drafted: tokens proposed, the root not among them.
      accepted: drafted tokens committed.
      accepted_at_depth: the same by depth in the tree, 1 first.
    """

    rounds: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    accepted_at_depth: Int[Array, "B depth"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """All that a generation knows between two rounds.

    Attributes:
      state: covers the tokens before the root.
      drafter: the drafter's own carry.
      context: tokens, lengths and which rows are active.
      request: constant.
      logprobs: log-probability of each output token under the target before temperature and filters, float32, at the
        token's place.
      stopped: the row ended with a stop token.
      counters: for the summary.
    """

    state: RecurrentState
    drafter: Any
    context: Context
    request: Request
    logprobs: Float[Array, "B capacity"]
    stopped: Bool[Array, " B"]
    counters: Counters


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The static half of a generation; its methods are pure and meant to be jitted with the carry donated.

    Attributes:
      model: the target.
      drafter: proposes the trees.
      prefill_length: static length of the prefill; no prompt is longer than this plus one.
      step: verifies over ``Params.decode``; None to verify by the model over its parameters.
    """

    model: GatedDeltaNetLM
    drafter: Drafter
    prefill_length: int
    step: DecodeStep | None = None

    def init(self, tokens: Int[Array, "B capacity"], prompt_length: Int[Array, " B"], request: Request) -> Carry:
        """The carry before prefill. ``capacity`` must reach ``request.limit`` and ``prefill_length``."""
        batch, depth = tokens.shape[0], self.drafter.draft.depth

        def count(*shape: int) -> Array:
            return jnp.zeros((batch, *shape), jnp.int32)

        # The carry will be donated, so no array may occur in it twice or belong to the caller.
        return Carry(
            state=RecurrentState.zeros(self.model.config, batch, self.model.dtype),
            drafter=(),
            context=Context(tokens, prompt_length.copy(), prompt_length.copy(), request.limit > prompt_length),
            request=jax.tree.map(jnp.copy, request),
            logprobs=jnp.zeros(tokens.shape, jnp.float32),
            stopped=jnp.zeros(batch, bool),
            counters=Counters(count(), count(), count(), count(depth)),
        )

    def prefill(self, params: Params, carry: Carry) -> Carry:
        """Reads each prompt up to its last token, which becomes the first root."""
        context = carry.context
        _, features, state = call(
            self.model,
            params.target,
            "prefill",
            context.tokens[:, : self.prefill_length],
            context.length - 1,
            carry.state,
        )
        drafter = self.drafter.init(params.drafter, context, features if self.drafter.needs_features else None)
        return replace(carry, state=state, drafter=drafter)

    def spec_round(self, params: Params, carry: Carry) -> Carry:
        """One round: between 1 and ``depth + 1`` tokens more for every active row, nothing for the others."""
        context, request = carry.context, carry.request
        levels = self.drafter.draft.depth + 1

        with named_scope("draft"):
            tree, drafter = self.drafter.propose(params.drafter, carry.drafter, context)
        with named_scope("verify"):
            logits, features, factors = self.verify(params, tree.tokens, tree.parents, tree.num_nodes, carry.state)
        with named_scope("accept"):
            depth = node_depth(tree.parents, tree.num_nodes)
            score = scores(logits, context.length, depth, levels, request.sampler)
            drawn = jnp.argmax(score, axis=-1).astype(jnp.int32)
            room = jnp.where(context.active, request.limit - context.length, 0)
            commit = accept(tree, depth, drawn, levels, room, request.stop_tokens)
        with named_scope("recover"):
            state = recover(carry.state, factors, tree.parents, commit.last)
        with named_scope("commit"):
            after = _append(context, commit, request.limit)
            logprobs = _write(carry.logprobs, context.length, _logprobs(logits, commit), commit.count)
            counters = _count(carry.counters, commit, tree.num_nodes - 1, context.active)
        with named_scope("draft"):
            accepted = Accepted(commit.path, commit.count, commit.tokens, features, after)
            drafter = self.drafter.observe(params.drafter, drafter, accepted)
        return Carry(state, drafter, after, request, logprobs, carry.stopped | commit.stopped, counters)

    def verify(self, params: Params, *tree_and_state: Any) -> tuple[Array, Array, TreeFactors]:
        """See :meth:`GatedDeltaNetLM.verify`."""
        if self.step is None or params.decode is None:
            return call(self.model, params.target, "verify", *tree_and_state)
        return self.step.verify(params.decode, *tree_and_state)

    def generate(self, params: Params, carry: Carry) -> Carry:
        """Prefill and rounds until no row is active, in one program."""
        return jax.lax.while_loop(
            lambda carry: carry.context.active.any(),
            lambda carry: self.spec_round(params, carry),
            self.prefill(params, carry),
        )


def _append(context: Context, commit: Commit, limit: Int[Array, " B"]) -> Context:
    length = context.length + commit.count
    return Context(
        tokens=_write(context.tokens, context.length, commit.tokens, commit.count),
        length=length,
        prompt_length=context.prompt_length,
        active=context.active & ~commit.stopped & (length < limit),
    )


def _write(buffer: Array, start: Int[Array, " B"], values: Array, count: Int[Array, " B"]) -> Array:
    """Writes the first ``count`` of a row's values from place ``start`` on; the rest of the buffer stays."""
    offset = jnp.arange(values.shape[1])
    place = jnp.where(offset < count[:, None], start[:, None] + offset, buffer.shape[1])
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, place].set(values, mode="drop")


def _logprobs(logits: Float[Array, "B N V"], commit: Commit) -> Float[Array, "B depth+1"]:
    at_path = jnp.take_along_axis(logits, jnp.maximum(commit.path, 0)[:, :, None], axis=1)  # [B, levels, V]
    chosen = jnp.take_along_axis(at_path, commit.tokens[:, :, None], axis=2)[:, :, 0]
    return chosen - jax.nn.logsumexp(at_path, axis=-1)


def _count(counters: Counters, commit: Commit, drafted: Int[Array, " B"], active: Bool[Array, " B"]) -> Counters:
    depth = jnp.arange(1, counters.accepted_at_depth.shape[1] + 1)
    return Counters(
        rounds=counters.rounds + active,
        drafted=counters.drafted + jnp.where(active, drafted, 0),
        accepted=counters.accepted + commit.accepted,
        accepted_at_depth=counters.accepted_at_depth + (depth <= commit.accepted[:, None]),
    )
