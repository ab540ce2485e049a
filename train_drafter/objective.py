"""The training objective: the frozen target reads the rows, the drafter is unrolled over them and scored."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from specla_jax.drafters.eagle_layer import EagleConfig, Params, fuse_features
from specla_jax.model import GatedDeltaNetLM
from train_drafter.drafter_loss import DraftLoss, LossKind, StepStats, TargetView, reached
from train_drafter.packing import Batch
from train_drafter.target import head_kernel, hidden_states
from train_drafter.unroll import unroll


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """What is not trained.

    Attributes:
      target: parameters of the target.
      draft_to_target: [Vd] int32, the map of a reduced draft vocabulary; None without one.
    """

    target: Params
    draft_to_target: Array | None = None

    @property
    def fixed(self) -> Params:
        """Entries of the drafter's parameters that are not trained."""
        return {} if self.draft_to_target is None else {"draft_to_target": self.draft_to_target}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over the places that count, by step; two of them add up.

    Attributes:
      count: places.
      loss, match, overlap: of the statistics of the same names.
      reached: places whose drafts above were all matches.
      right: matches among these.
      masked_rows: rows left out because the target's numbers for them are not finite.
    """

    count: Float[Array, " steps"]
    loss: Float[Array, " steps"]
    match: Float[Array, " steps"]
    overlap: Float[Array, " steps"]
    reached: Float[Array, " steps"]
    right: Float[Array, " steps"]
    masked_rows: Float[Array, ""]

    def summary(self) -> dict[str, Any]:
        """Means by depth. ``acceptance_by_depth`` is that of depth d where all depths above were right."""

        def ratio(part: Array, whole: Array) -> list[float]:
            return [round(float(a / max(b, 1)), 5) for a, b in zip(part, whole)]

        acceptance = ratio(self.right, self.reached)
        length, path = 1.0, 1.0
        for rate in acceptance:
            path *= rate
            length += path
        return {
            "loss_by_depth": ratio(self.loss, self.count),
            "match_by_depth": ratio(self.match, self.count),
            "overlap_by_depth": ratio(self.overlap, self.count),
            "acceptance_by_depth": acceptance,
            "predicted_accepted_length": round(length, 4),
            "masked_rows": int(self.masked_rows),
        }


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Loss of a drafter on rows of documents.

    Attributes:
      model: the target.
      config: the drafter.
      kind: see :mod:`train_drafter.drafter_loss`.
      steps: levels that the drafter is unrolled to.
      step_weight: weight of a step relative to the one before; the weights sum to 1.
      axis: mesh axis that the rows are sharded over, inside ``shard_map``.
    """

    model: GatedDeltaNetLM
    config: EagleConfig
    kind: LossKind = "kl"
    steps: int = 1
    step_weight: float = 1.0
    axis: str | None = None

    def unrolled(
        self, params: Params, frozen: Frozen, batch: Batch
    ) -> tuple[Float[Array, "steps B T D"], TargetView, Bool[Array, "steps B T"], Float[Array, ""]]:
        """Hidden states of all steps, what the target says, which places count in each step, and rows masked out.

        A row for which the target gives a number that is not finite counts nowhere, and no gradient comes from it.
        """
        model, target = self.model, frozen.target
        layers = self.config.feature_layers or model.config.feature_layers
        hidden, outputs = hidden_states(model, target, batch.tokens, starts=batch.starts, outputs_of=layers)
        features = jnp.concatenate(outputs, axis=-1)
        embedded = target["embeddings"]["embedding"][batch.tokens].astype(model.dtype)
        finite = jnp.stack([jnp.isfinite(x).all(axis=(1, 2)) for x in (hidden, features, embedded)]).all(axis=0)  # [B]
        hidden, features, embedded = (
            lax.stop_gradient(jnp.where(finite[:, None, None], x, 0)) for x in (hidden, features, embedded)
        )
        drafter = params | frozen.fixed
        fused = fuse_features(drafter, self.config, features, model.dtype)
        drafted = unroll(drafter, self.config, embedded, fused, batch.positions, self.steps)
        head = head_kernel(target, model.config)
        own = self.config.draft_vocab_size is not None
        view = TargetView(hidden.astype(model.dtype), head, frozen.draft_to_target, None if own else head)
        deep = batch.positions >= jnp.arange(self.steps)[:, None, None]  # [steps, B, T]
        return drafted, view, deep & batch.counted & finite[:, None], jnp.sum(~finite, dtype=jnp.float32)

    def loss(self, params: Params, frozen: Frozen, batch: Batch) -> tuple[Float[Array, ""], Sums]:
        """This device's part of the mean loss, weighted by step, and its sums; zero where nothing counts."""
        drafted, view, valid, masked = self.unrolled(params, frozen, batch)
        count = self._over_devices(jnp.sum(valid, axis=(1, 2), dtype=jnp.float32))
        share = self.step_weight ** jnp.arange(self.steps, dtype=jnp.float32)
        each = share / share.sum() / jnp.maximum(count, 1)
        loss, stats = DraftLoss(self.config, self.kind, self.model.dtype)(
            params, drafted, view, valid * each[:, None, None]
        )
        return loss, _sums(stats, valid, masked)

    def statistics(self, params: Params, frozen: Frozen, batch: Batch) -> tuple[StepStats, Bool[Array, "steps B T"]]:
        """The parts of the loss place by place, and which places count."""
        drafted, view, valid, _ = self.unrolled(params, frozen, batch)
        weights = jnp.zeros(valid.shape, jnp.float32)
        return DraftLoss(self.config, self.kind, self.model.dtype)(params, drafted, view, weights)[1], valid

    def _over_devices(self, x: Array) -> Array:
        return x if self.axis is None else lax.psum(x, self.axis)


def _sums(stats: StepStats, valid: Array, masked: Array) -> Sums:
    before = reached(stats.match, valid)

    def total(x: Array, where: Array) -> Array:
        return jnp.sum(jnp.where(where, x, 0), axis=(1, 2), dtype=jnp.float32)

    return Sums(
        count=total(valid, valid),
        loss=total(stats.loss, valid),
        match=total(stats.match, valid),
        overlap=total(stats.overlap, valid),
        reached=total(before, before),
        right=total(stats.match, before),
        masked_rows=masked,
    )
