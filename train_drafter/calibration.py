"""Calibration of the drafter's confidence on held-out rows, and the temperature that fits it.

A tree keeps the nodes of the largest cumulative log-probability, so the drafter's probabilities should say how often a
child is accepted: at temperature 0 whether it is the target's likeliest token, at temperature 1 the target's
probability for it. Children of one node keep their order whatever the temperature; nodes of different paths do not.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from specla_jax.drafters.eagle_layer import Params, draft_logits
from train_drafter.drafter_loss import reached, target_distribution
from train_drafter.objective import Frozen, Objective
from train_drafter.packing import Batch, Rows
from train_drafter.target import head_logits

TEMPERATURES = np.geomspace(0.5, 2.0, 33)
_BINS = 15
_CHILDREN = 4


@dataclass(frozen=True)
class Calibration:
    """The temperature of the largest held-out likelihood of the target's likeliest tokens, and what it changes.

    Attributes:
      temperature: among :data:`TEMPERATURES`.
      nll, nll_fitted: negative log-likelihood in nats at temperature 1 and at the fitted one.
      ece_greedy, ece_greedy_fitted: expected calibration error of the probabilities of the best children, against
        whether they are the target's likeliest token.
      ece_sampled, ece_sampled_fitted: the same against the target's probability of them.
    """

    temperature: float
    nll: float
    nll_fitted: float
    ece_greedy: float
    ece_greedy_fitted: float
    ece_sampled: float
    ece_sampled_fitted: float

    def report(self) -> dict[str, Any]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def calibrate(objective: Objective, params: Params, frozen: Frozen, rows: Rows, limit: int = 64) -> Calibration:
    """Measures on up to ``limit`` rows, one at a time, at the places that a greedy draft reaches."""
    measure = jax.jit(partial(_measure, objective))
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(limit, len(rows))).round().astype(int))
    parts = [jax.device_get(measure(params, frozen, rows.batch(np.array([row])))) for row in chosen]
    nll, count, bins = (np.sum([np.asarray(part[i], np.float64) for part in parts], axis=0) for i in range(3))
    fitted, plain = int(np.argmin(nll)), int(np.argmin(np.abs(np.log(TEMPERATURES))))
    count = max(float(count), 1.0)

    def error(temperature: int, event: int) -> float:
        per_bin = bins[temperature]  # [bins, (confidence, likeliest, probability, children)]
        return float(np.abs(per_bin[:, 0] - per_bin[:, event]).sum() / max(per_bin[:, 3].sum(), 1))

    return Calibration(
        temperature=float(TEMPERATURES[fitted]),
        nll=float(nll[plain]) / count,
        nll_fitted=float(nll[fitted]) / count,
        ece_greedy=error(plain, 1),
        ece_greedy_fitted=error(fitted, 1),
        ece_sampled=error(plain, 2),
        ece_sampled_fitted=error(fitted, 2),
    )


def _measure(
    objective: Objective, params: Params, frozen: Frozen, batch: Batch
) -> tuple[Float[Array, " temperatures"], Float[Array, ""], Float[Array, "temperatures bins 4"]]:
    """Sums: negative log-likelihoods by temperature, their number, and bins of the children by confidence."""
    hidden, view, valid, _ = objective.unrolled(params, frozen, batch)
    logits = draft_logits(params, objective.config, hidden, view.draft_kernel(params))  # [steps, B, T, Vd]
    target_logits = head_logits(view.hidden, view.head, objective.model.dtype)
    log_p, log_mass, best = target_distribution(target_logits, view.draft_to_target)
    known = reached(jnp.argmax(logits, axis=-1) == best, valid)
    in_vocabulary = known & (best >= 0)

    values, children = lax.top_k(logits, min(_CHILDREN, logits.shape[-1]))  # [steps, B, T, children]
    likeliest = (children == best[..., None]).astype(jnp.float32)
    wide = jnp.broadcast_to(log_p, logits.shape)
    probability = jnp.exp(jnp.take_along_axis(wide, children, axis=-1) + log_mass[..., None])
    at_best = jnp.take_along_axis(logits, jnp.maximum(jnp.broadcast_to(best, known.shape), 0)[..., None], axis=-1)

    def at(temperature: Array) -> tuple[Array, Array]:
        total = jax.nn.logsumexp(logits / temperature, axis=-1)
        nll = jnp.sum(jnp.where(in_vocabulary, total - at_best[..., 0] / temperature, 0))
        confidence = jnp.exp(values / temperature - total[..., None])
        place = jnp.clip((confidence * _BINS).astype(jnp.int32), 0, _BINS - 1)
        events = jnp.stack([confidence, likeliest, probability, jnp.ones_like(confidence)], axis=-1)
        events = jnp.where(known[..., None, None], events, 0)
        return nll, jnp.zeros((_BINS, 4)).at[place].add(events)

    nll, bins = lax.map(at, jnp.asarray(TEMPERATURES, jnp.float32))
    return nll, jnp.sum(in_vocabulary), bins
