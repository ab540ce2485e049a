"""The EAGLE-3 style drafter: a bounded ring of keys and values, and trees grown level by level."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.draft_attention.reference import held_position
from kernels_pallas.draft_expand import MAX_BRANCH
from kernels_pallas.draft_expand.reference import best_children, take
from kernels_pallas.stream_matmul import no_arrivals
from specla_jax.config import DraftConfig, Dtype
from specla_jax.drafters.base import Accepted, Context
from specla_jax.drafters.eagle_layer import (
    EagleConfig,
    Params,
    draft_logits,
    eagle_layer,
    fuse_features,
    pair_input,
    pair_keys_values,
)
from specla_jax.drafters.eagle_step import EagleStep, eagle_weights, no_drafts
from specla_jax.errors import UserError
from specla_jax.tree import DraftTree, root_only, select_nodes

# Up to this depth the levels are unrolled; deeper drafts use a loop, to keep compilation short.
_UNROLLED_LEVELS = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleCarry:
    """Keys and values of the last ``window`` pairs and the hidden state of the last one.

    The pair at position p lies in slot ``p % window``, so the context's length says what each slot holds.

    Attributes:
      key: [B, window, K, dh], rotated.
      value: [B, window, K, dh].
      hidden: [B, D]. Hidden state of the root's pair, before the final norm.
    """

    key: Float[Array, "B window K dh"]
    value: Float[Array, "B window K dh"]
    hidden: Float[Array, "B D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Frontier:
    """The ``branch`` nodes that the next level grows from, and what earlier levels left.

    Draft slots number the nodes that went through the layer: ``(level - 1) * branch + place in the frontier``.
    """

    tokens: Int[Array, "B branch"]
    feature: Float[Array, "B branch D"]  # hidden state of the parent's pair
    log_prob: Float[Array, "B branch"]
    pool_index: Int[Array, "B branch"]
    ancestors: Bool[Array, "B branch slots"]  # draft slots of proper ancestors
    key: Float[Array, "B slots K dh"]
    value: Float[Array, "B slots K dh"]
    pair: Any = None  # with a step: [B, branch, Dt+D], what ``pair_input`` makes of tokens and feature


@dataclass(frozen=True, kw_only=True)
class EagleDrafter:
    """Drafts with the network of :mod:`specla_jax.drafters.eagle_layer`.

    Params (see :meth:`bind`): ``{"eagle": ..., "embedding": [V, D], "head": [D, V], "temperature": scalar}``. ``head``
    is absent for a reduced draft vocabulary, and when the target's head is its embedding.

    A tree is grown by cumulative log-probability: the ``branch`` best children of the root, then for each further
    level the ``branch`` best nodes of the level before, each with its ``branch`` best children; the best ``nodes`` of
    all of them are proposed (arXiv 2406.16858). Branch 1 makes a chain.

    With a ``step`` the layer runs over packed weights, which ``bind`` makes: params["packed"].
    """

    draft: DraftConfig
    config: EagleConfig
    dtype: Dtype = "float32"
    step: EagleStep | None = None
    needs_features: bool = True

    def __post_init__(self) -> None:
        if self.draft.branch > self.config.vocab_size:
            raise UserError(f"branch must be at most the draft vocabulary, {self.config.vocab_size}")
        if self.step is not None and self.draft.branch > MAX_BRANCH:
            raise UserError(f"branch must be at most {MAX_BRANCH} over packed weights, got {self.draft.branch}")

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        return self.config.feature_layers

    def bind(self, eagle_params: Params, target_params: dict[str, Any]) -> Params:
        """The drafter's params with the embedding and, where needed, the head of its target, which are not copied."""
        params: Params = {"eagle": eagle_params, "embedding": target_params["embeddings"]["embedding"]}
        params["temperature"] = jnp.float32(self.config.temperature)
        if self.config.draft_vocab_size is None and "lm_head" in target_params:
            params["head"] = target_params["lm_head"]["kernel"]
        if self.step is not None:
            params["packed"] = eagle_weights(params, self.dtype)
        return params

    def init(self, params: Params, context: Context, features: Float[Array, "B T features"] | None) -> EagleCarry:
        if features is None:
            raise ValueError("the eagle drafter needs the target's features")
        eagle, config = params["eagle"], self.config
        positions = _slot_positions(context.length, config.window)  # [B, window]
        held = positions >= 0
        at = jnp.maximum(positions, 0)
        if features.shape[1] == 0:
            features = jnp.zeros((features.shape[0], 1, features.shape[2]), features.dtype)
        states = jnp.take_along_axis(features, jnp.maximum(at - 1, 0)[:, :, None], axis=1)
        feature = fuse_features(eagle, config, jnp.where((at > 0)[:, :, None], states, 0), self.dtype)
        pair = pair_input(eagle, config, self._embed(params, jnp.take_along_axis(context.tokens, at, axis=1)), feature)
        key, value = pair_keys_values(eagle, config, pair, at)
        key = jnp.where(held[:, :, None, None], key, 0)
        value = jnp.where(held[:, :, None, None], value, 0)

        last = context.length[:, None] - 1  # [B, 1]
        slot = (last % config.window)[:, :, None]
        pair, feature = (jnp.take_along_axis(x, slot, axis=1) for x in (pair, feature))
        hidden = eagle_layer(eagle, config, pair, feature, last, [(key, value, held[:, None])])
        return EagleCarry(key=key, value=value, hidden=hidden[:, 0])

    def observe(self, params: Params, carry: EagleCarry, accepted: Accepted) -> EagleCarry:
        eagle, config = params["eagle"], self.config
        length, count = accepted.context.length[:, None], accepted.count[:, None]
        step = jnp.arange(accepted.tokens.shape[1])
        positions = jnp.maximum(length - count + step, 0)  # [B, depth + 1]
        states = jnp.take_along_axis(accepted.features, jnp.maximum(accepted.path, 0)[:, :, None], axis=1)
        feature = fuse_features(eagle, config, states, self.dtype)
        tokens = jnp.where(step < count, accepted.tokens, 0)
        pair = pair_input(eagle, config, self._embed(params, tokens), feature)
        if self.step is None:
            key, value = pair_keys_values(eagle, config, pair, positions)
        else:
            pair = self.step.projections(params["packed"], pair)
            key, value = self.step.keys_values(pair, positions, self.dtype)

        # Slots of pairs that are not committed, or would be overwritten at once, are out of range and dropped.
        written = (step < count) & (step >= count - config.window)
        slot = jnp.where(written, positions % config.window, config.window)
        row = jnp.arange(slot.shape[0])[:, None]
        ring_key = carry.key.at[row, slot].set(key, mode="drop")
        ring_value = carry.value.at[row, slot].set(value, mode="drop")

        last = jnp.maximum(count - 1, 0)[:, :, None]
        pair, feature = (jnp.take_along_axis(x, last, axis=1) for x in (pair, feature))
        if self.step is None:
            held = _slot_positions(accepted.context.length, config.window) >= 0
            segments = [(ring_key, ring_value, held[:, None])]
            hidden = eagle_layer(eagle, config, pair, feature, length - 1, segments)[:, 0]
        else:  # as a draft below the text before it, whose slot in the ring is then out of the window
            drafts, ancestors = no_drafts(len(pair), config, self.dtype)
            ring, before = (ring_key, ring_value), accepted.context.length - 1
            hidden, *_ = self.step.layer(
                *(params["packed"], pair, feature, ring, drafts, ancestors, before, 1),
                arrivals=(no_arrivals(1), 0),
                children=False,
            )
            hidden = hidden[:, 0]
        return EagleCarry(key=ring_key, value=ring_value, hidden=jnp.where(count > 0, hidden, carry.hidden))

    def propose(self, params: Params, carry: EagleCarry, context: Context) -> tuple[DraftTree, EagleCarry]:
        depth, branch = self.draft.depth, self.draft.branch
        if depth == 0 or self.draft.nodes == 1:
            return root_only(context.root, self.draft.nodes), carry
        rows = context.length.shape[0]
        children = self._root_children(params, carry)
        levels = [(context.root[:, None], jnp.zeros((rows, 1)), jnp.full((rows, 1), -1))]
        levels.append((children.tokens, children.log_prob, jnp.zeros_like(children.tokens)))
        if depth > 1:
            levels.append(self._lower_levels(params, carry, context.length, children))
        pool = DraftTree(
            tokens=jnp.concatenate([level[0] for level in levels], axis=1),
            log_prob=jnp.concatenate([level[1] for level in levels], axis=1),
            parents=jnp.concatenate([level[2] for level in levels], axis=1),
            num_nodes=jnp.full(rows, 1 + branch + (depth - 1) * branch**2, jnp.int32),
        )
        if self.config.max_positions is not None:
            beyond = context.length + depth > self.config.max_positions
            pool = DraftTree(pool.tokens, pool.parents, jnp.where(beyond, 1, pool.num_nodes), pool.log_prob)
        return select_nodes(pool, self.draft.nodes, self.draft.prune_tau), carry

    def _root_children(self, params: Params, carry: EagleCarry) -> _Frontier:
        """The ``branch`` best children of the root, best first, as the frontier of level 1."""
        rows, branch, hidden = carry.hidden.shape[0], self.draft.branch, carry.hidden[:, None]
        slots = max(self.draft.depth - 1, 1) * branch
        heads = (rows, slots, self.config.num_kv_heads, self.config.head_dim)
        logits = self._logits(params, hidden)
        if self.step is None:
            tokens, log_prob = (x[:, 0] for x in self._best_children(params, logits))
            feature = jnp.broadcast_to(hidden, (rows, branch, hidden.shape[2]))
            ancestors, pair = jnp.zeros((rows, branch, slots), bool), None
        else:
            nothing = jnp.zeros((rows, 1)), jnp.zeros((rows, 1, slots), bool)
            tokens, log_prob, feature, ancestors, pair = self.step.children(
                *(params, branch, hidden, logits, *nothing, 0),
            ).frontier
        return _Frontier(
            tokens=tokens,
            feature=feature,
            log_prob=log_prob,
            pool_index=jnp.broadcast_to(jnp.arange(1, branch + 1), (rows, branch)),
            ancestors=ancestors,
            key=jnp.zeros(heads, self.dtype),
            value=jnp.zeros(heads, self.dtype),
            pair=pair,
        )

    def _lower_levels(
        self, params: Params, carry: EagleCarry, length: Array, frontier: _Frontier
    ) -> tuple[Array, Array, Array]:
        """Tokens, log-probabilities and pool parents of levels 2 to depth, below the given children of the root."""
        rows, depth = length.shape[0], self.draft.depth
        arrivals = None if self.step is None else no_arrivals(depth)

        def grow(frontier: _Frontier, level: Array | int) -> tuple[_Frontier, tuple[Array, Array, Array]]:
            return self._grow(params, carry, length, frontier, level, arrivals)

        if depth <= _UNROLLED_LEVELS:
            levels = []
            for level in range(1, depth):
                frontier, grown = grow(frontier, level)
                levels.append(grown)
            below = [jnp.concatenate(parts, axis=1) for parts in zip(*levels)]
        else:
            _, grown = jax.lax.scan(grow, frontier, jnp.arange(1, depth))
            below = [jnp.moveaxis(x, 0, 1).reshape(rows, -1) for x in grown]
        return below[0], below[1], below[2]

    def _grow(
        self,
        params: Params,
        carry: EagleCarry,
        length: Array,
        frontier: _Frontier,
        level: Array | int,
        arrivals: Any = None,
    ) -> tuple[_Frontier, tuple[Array, Array, Array]]:
        """Runs the frontier, ``level`` edges below the root, through the layer; returns its children too."""
        if self.step is not None:
            return self._grow_packed(self.step, params, carry, length, frontier, level, arrivals)
        eagle, config, branch = params["eagle"], self.config, self.draft.branch
        rows, first = length.shape[0], (level - 1) * branch
        position = (length - 1 + level)[:, None]  # [B, 1]
        positions = jnp.broadcast_to(position, (rows, branch))
        pair = pair_input(eagle, config, self._embed(params, frontier.tokens), frontier.feature)
        own = jnp.arange(frontier.ancestors.shape[2]) == (first + jnp.arange(branch))[:, None]  # [branch, slots]
        path = frontier.ancestors | own
        key, value = pair_keys_values(eagle, config, pair, positions)
        draft_key = jax.lax.dynamic_update_slice_in_dim(frontier.key, key, first, axis=1)
        draft_value = jax.lax.dynamic_update_slice_in_dim(frontier.value, value, first, axis=1)
        # Draft slots are one level apart, so slot // branch + 1 is a node's level; old positions leave the window.
        near = jnp.arange(path.shape[2]) // branch + 1 > level - config.window
        held = _slot_positions(length, config.window)
        ring = (held >= 0) & (held > position - config.window)
        segments = [
            (carry.key, carry.value, jnp.broadcast_to(ring[:, None], (rows, branch, config.window))),
            (draft_key, draft_value, path & near),
        ]
        hidden = eagle_layer(eagle, config, pair, frontier.feature, positions, segments)  # [B, branch, D]

        tokens, step = self._best_children(params, self._logits(params, hidden))  # [B, branch, branch]
        tokens = tokens.reshape(rows, -1)
        log_prob = (frontier.log_prob[:, :, None] + step).reshape(rows, -1)
        best, chosen = jax.lax.top_k(log_prob, branch)
        parent = chosen // branch
        grown = _Frontier(
            tokens=take(tokens, chosen),
            feature=take(hidden, parent[:, :, None]),
            log_prob=best,
            pool_index=self._pool_index(level, chosen),
            ancestors=take(path, parent[:, :, None]),
            key=draft_key,
            value=draft_value,
        )
        return grown, (tokens, log_prob, self._pool_parents(frontier))

    def _grow_packed(
        self,
        step: EagleStep,
        params: Params,
        carry: EagleCarry,
        length: Array,
        frontier: _Frontier,
        level: Array | int,
        arrivals: Any,
    ) -> tuple[_Frontier, tuple[Array, Array, Array]]:
        """:meth:`_grow` over packed weights."""
        packed, ancestors = params["packed"], frontier.ancestors
        ring, drafts = (carry.key, carry.value), (frontier.key, frontier.value)
        hidden, logits, key, value = step.layer(
            *(packed, step.projections(packed, frontier.pair), frontier.feature, ring, drafts),
            *(ancestors, length, level),
            arrivals=(arrivals, level),
            children=True,
        )
        children = step.children(params, self.draft.branch, hidden, logits, frontier.log_prob, ancestors, level)
        pool_index = self._pool_index(level, children.chosen)
        grown = _Frontier(**children.frontier._asdict(), pool_index=pool_index, key=key, value=value)
        return grown, (children.tokens, children.log_prob, self._pool_parents(frontier))

    def _pool_parents(self, frontier: _Frontier) -> Int[Array, "B children"]:
        """Pool index of the parent of each child of the frontier."""
        return jnp.repeat(frontier.pool_index, self.draft.branch, axis=1)

    def _pool_index(self, level: Array | int, chosen: Int[Array, "B branch"]) -> Int[Array, "B branch"]:
        """Where the pool holds children of ``level``, by their place among these."""
        return 1 + self.draft.branch + (level - 1) * self.draft.branch**2 + chosen

    def _embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T Dt"]:
        return params["embedding"][tokens].astype(self.dtype)

    def _logits(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits over the draft vocabulary."""
        eagle = params["eagle"]
        if self.step is not None:
            return self.step.logits(params["packed"], hidden)
        if self.config.draft_vocab_size is not None:
            return draft_logits(eagle, self.config, hidden, eagle["lm_head"]["kernel"])
        return draft_logits(eagle, self.config, hidden, params["head"] if "head" in params else params["embedding"].T)

    def _best_children(
        self, params: Params, logits: Float[Array, "B T V"]
    ) -> tuple[Int[Array, "B T branch"], Float[Array, "B T branch"]]:
        """Tokens of the target's vocabulary and their log-probabilities, best first."""
        to_target = None if self.config.draft_vocab_size is None else params["eagle"]["draft_to_target"]
        return best_children(logits, params["temperature"], self.draft.branch, to_target)


def _slot_positions(length: Int[Array, " B"], window: int) -> Int[Array, "B window"]:
    """Position of the pair in each ring slot; negative for a slot that holds none."""
    return held_position(length[:, None], jnp.arange(window), window)
