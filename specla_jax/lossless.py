"""Comparing two decodings of one prompt, and judging the first place where they part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specla_jax.config import SamplingConfig
from specla_jax.generate import bucket
from specla_jax.model import GatedDeltaNetLM, call
from specla_jax.sampling import Sampler, scores
from specla_jax.state import RecurrentState
from specla_jax.target import Target

# Two programs of one model differ by rounding: by this much in the scores, and in the mass at which top_p cuts.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
_CUT_SLACK = {"float32": 1e-4, "bfloat16": 0.02}


@dataclass(frozen=True)
class Difference:
    """Where two outputs part.

    Attributes:
      index: first differing output token.
      expected, got: the tokens there; None where a text has ended.
      margin: the top-2 margin there: how far the score of ``got`` lies below the best one in plain decoding.
      near_tie: the margin is within what rounding explains.
    """

    index: int
    expected: int | None
    got: int | None
    margin: float
    near_tie: bool


def first_difference(
    model: Target,
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    sampling: SamplingConfig,
    seed: int,
) -> Difference | None:
    """Compares an output with plain decoding's; None if they are equal.

    Args:
      model: the target that produced both.
      prompt: token ids.
      expected: output tokens of plain decoding.
      got: output tokens to judge.
      sampling, seed: as both were decoded.
    """
    pairs = zip([*expected, None], [*got, None], strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return None
    want = expected[index] if index < len(expected) else None
    have = got[index] if index < len(got) else None
    if want is None or have is None:  # one text is a prefix of the other: no rounding explains that
        return Difference(index, want, have, float("inf"), False)
    margin = _margin(model, [*prompt, *expected[:index]], have, sampling, seed)
    return Difference(index, want, have, margin, margin <= NEAR_TIE[model.dtype])


def _margin(model: Target, text: Sequence[int], token: int, sampling: SamplingConfig, seed: int) -> float:
    """How far ``token`` is from being the target's choice after ``text``, with the filters' cuts as given or moved."""
    tokens = np.zeros((1, bucket(len(text))), np.int32)
    tokens[0, : len(text)] = text
    length = jnp.asarray([len(text)], jnp.int32)
    logits = _last_logits(GatedDeltaNetLM(model.config, model.dtype), model.params, jnp.asarray(tokens), length)
    slack = _CUT_SLACK[model.dtype]
    margins = []
    for move in (0.0, -slack, slack):
        moved = replace(
            sampling, top_p=min(1.0, max(1e-6, sampling.top_p + move)), min_p=max(0.0, sampling.min_p * (1 - move))
        )
        sampler = Sampler.create(moved, [seed])
        score = np.asarray(scores(logits, length, jnp.zeros((1, 1), jnp.int32), 1, sampler))[0, 0]
        margins.append(float(score.max() - score[token]))
    return min(margins)


@partial(jax.jit, static_argnums=0)
def _last_logits(network: GatedDeltaNetLM, params: Any, tokens: Array, length: Array) -> Float[Array, "1 1 V"]:
    state = RecurrentState.zeros(network.config, 1, network.dtype)
    hidden, _, _ = call(network, params, "prefill", tokens, length, state)
    at_end = jnp.take_along_axis(hidden, length[:, None, None] - 1, axis=1)
    return call(network, params, "head", at_end)
