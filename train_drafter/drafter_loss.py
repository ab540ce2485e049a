"""Losses of the drafter against the target's distribution, in float32, without holding all logits at once.

With p the target's distribution over the draft vocabulary, renormalised, m the probability that it gives to that
vocabulary (1 for a full one), and q the drafter's:

    kl   m KL(p || q)
    lk   -m log sum_v min(p(v), q(v))     the negative logarithm of the acceptance rate (arXiv 2602.23881)

A position counts by m because no drafter of this vocabulary can gain more there. The logarithms are of renormalised
distributions, so that both losses are zero where q = p.

The logits of a piece of all rows, [steps, B, piece, V], exist only while their losses and the gradients of these are
computed, which is at once: the loss is a sum, so its gradient needs no more than a factor afterwards.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specla_jax.drafters.eagle_layer import EagleConfig, Params, draft_logits
from train_drafter.target import head_logits

LossKind = Literal["kl", "lk"]

_BYTES = 2**28  # of a piece's draft logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetView:
    """What the target says of the rows.

    Attributes:
      hidden: [B, T, Dt]. Normed hidden states, from which the head makes logits.
      head: [Dt, V].
      draft_to_target: [Vd] int32, or None for a full vocabulary.
      draft_head: [D, V], the head that the drafter shares; None if it has its own.
    """

    hidden: Float[Array, "B T Dt"]
    head: Float[Array, "Dt V"]
    draft_to_target: Int[Array, " Vd"] | None
    draft_head: Float[Array, "D V"] | None

    def draft_kernel(self, params: Params) -> Float[Array, "D Vd"]:
        """The head that makes the drafter's logits."""
        return params["lm_head"]["kernel"] if self.draft_head is None else self.draft_head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepStats:
    """What the losses of all steps were computed from, unweighted.

    Attributes:
      loss: [steps, B, T] float32.
      match: [steps, B, T] bool. The likeliest draft is the target's likeliest token.
      overlap: [steps, B, T] float32. sum_v min(p(v), q(v)), p not renormalised.
    """

    loss: Float[Array, "steps B T"]
    match: Bool[Array, "steps B T"]
    overlap: Float[Array, "steps B T"]


@dataclass(frozen=True)
class DraftLoss:
    """The loss as a function of hidden states and the drafter's own head. ``dtype``: that the target computes in."""

    config: EagleConfig
    kind: LossKind
    dtype: str

    def __call__(
        self,
        params: Params,
        hidden: Float[Array, "steps B T D"],
        view: TargetView,
        weights: Float[Array, "steps B T"],
    ) -> tuple[Float[Array, ""], StepStats]:
        """The weighted sum of losses, and the unweighted ones. Weights of zero count nothing; they are constants."""
        head = {name: params[name] for name in ("norm", "lm_head") if name in params}

        @jax.custom_vjp
        def total(head: Params, hidden: Array) -> tuple[Array, StepStats]:
            summed, stats, _ = self._scan(head, hidden, view, weights, gradients=False)
            return summed, stats

        def forward(head: Params, hidden: Array):
            summed, stats, gradients = self._scan(head, hidden, view, weights, gradients=True)
            return (summed, stats), gradients

        def backward(gradients: Any, cotangents: tuple[Array, StepStats]):
            return jax.tree.map(lambda g: (g * cotangents[0]).astype(g.dtype), gradients)

        total.defvjp(forward, backward)
        return total(head, hidden)

    def _scan(
        self, head: Params, hidden: Array, view: TargetView, weights: Array, gradients: bool
    ) -> tuple[Array, StepStats, Any]:
        """The sum, the parts, and the gradient of the sum by ``head`` and ``hidden`` (None without ``gradients``)."""
        steps, batch, length, _ = hidden.shape
        piece = _piece(length, 4 * steps * batch * self.config.vocab_size)

        def body(carry: tuple[Array, Params], start: Array):
            def cut(x: Array, axis: int) -> Array:
                return lax.dynamic_slice_in_dim(x, start, piece, axis)

            args = (head, cut(hidden, 2)), cut(view.hidden, 1), cut(weights, 2)
            if not gradients:
                summed, stats = self._losses(args[0], view, *args[1:])
                return (carry[0] + summed, carry[1]), (stats, None)
            (summed, stats), (by_head, by_hidden) = jax.value_and_grad(self._losses, has_aux=True)(
                args[0], view, *args[1:]
            )
            return (carry[0] + summed, jax.tree.map(jnp.add, carry[1], by_head)), (stats, by_hidden)

        zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, head)
        (summed, by_head), (stats, by_hidden) = lax.scan(body, zero, jnp.arange(0, length, piece))

        def join(x: Array) -> Array:  # [pieces, steps, B, piece, ...] -> [steps, B, T, ...]
            return jnp.moveaxis(x, 0, 2).reshape(steps, batch, length, *x.shape[4:])

        return summed, jax.tree.map(join, stats), (by_head, join(by_hidden)) if gradients else None

    def _losses(
        self, given: tuple[Params, Array], view: TargetView, target_hidden: Array, weights: Array
    ) -> tuple[Array, StepStats]:
        head, hidden = given
        logits = draft_logits(head, self.config, hidden, view.draft_kernel(head))
        target_logits = head_logits(target_hidden, view.head, self.dtype)  # [B, piece, V]
        log_q = jax.nn.log_softmax(logits, axis=-1)  # [steps, B, piece, Vd]
        log_p, log_mass, best = target_distribution(target_logits, view.draft_to_target)
        mass, p = jnp.exp(log_mass), jnp.exp(log_p)
        if self.kind == "kl":
            loss = jnp.sum(jnp.where(p == 0, 0, p * (log_p - log_q)), axis=-1)
        else:
            loss = -jnp.log(jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1))
        loss = mass * loss
        overlap = jnp.sum(jnp.minimum(mass[..., None] * p, jnp.exp(log_q)), axis=-1)
        stats = StepStats(loss, jnp.argmax(logits, axis=-1) == best, overlap)
        return jnp.sum(jnp.where(weights > 0, weights * loss, 0)), lax.stop_gradient(stats)


def target_distribution(
    logits: Float[Array, "*n V"], draft_to_target: Int[Array, " Vd"] | None
) -> tuple[Float[Array, "*n Vd"], Float[Array, "*n"], Int[Array, "*n"]]:
    """Log-probabilities over the draft vocabulary, renormalised; the logarithm of the probability that the target gives
    to that vocabulary; and the place in it of the target's likeliest token, -1 if it is not there.
    """  # noqa: D205
    best = jnp.argmax(logits, axis=-1)
    if draft_to_target is None:
        return jax.nn.log_softmax(logits, axis=-1), jnp.zeros(logits.shape[:-1], jnp.float32), best
    kept = logits[..., draft_to_target]
    log_mass = jax.nn.logsumexp(kept, axis=-1) - jax.nn.logsumexp(logits, axis=-1)
    place = jnp.full(logits.shape[-1], -1, jnp.int32).at[draft_to_target].set(jnp.arange(draft_to_target.shape[0]))
    return jax.nn.log_softmax(kept, axis=-1), log_mass, place[best]


def _piece(length: int, bytes_a_position: int) -> int:
    """The largest divisor of ``length`` whose logits stay within the limit."""
    most = max(1, _BYTES // bytes_a_position)
    return max(size for size in range(1, min(length, most) + 1) if length % size == 0)


def reached(match: Bool[Array, "steps B T"], valid: Bool[Array, "steps B T"]) -> Bool[Array, "steps B T"]:
    """Whether all drafts above step d on the way to a place were matches: True in step 1 wherever it is valid."""
    before = [valid[0]]
    for right, ok in zip((match & valid)[:-1], valid[1:]):
        right = jnp.pad(right & before[-1], ((0, 0), (1, 0)))[:, :-1]
        before.append(right & ok)
    return jnp.stack(before)
