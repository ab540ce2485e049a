"""Drawing tokens from the target: filters, and coins that belong to (seed, position).

A token is the argmax of a score. Greedy decoding scores by the logits. Sampling adds to the filtered logits a Gumbel
noise that depends on the request's seed, the token's position in the text and the vocabulary entry alone
(Gumbel-max: the argmax is then an exact draw from the filtered distribution). So one seed gives one text whatever
drafts, batches or order it is decoded in, and a rounding error can change a token only where two scores nearly tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specla_jax.config import SamplingConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler:
    """A :class:`SamplingConfig` as arrays, so that new values of it compile nothing, and each row's seed.

    Attributes:
      seeds: seed of each row.
      temperature, top_k, top_p, min_p: scalars.
      greedy: temperature is 0; static.
      filtered: some filter is on; static, because a filter costs a sort of the vocabulary.
    """

    seeds: UInt32[Array, " B"]
    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]
    greedy: bool = field(metadata={"static": True})
    filtered: bool = field(metadata={"static": True})

    @classmethod
    def create(cls, config: SamplingConfig, seeds: Sequence[int]) -> "Sampler":
        return cls(
            seeds=jnp.asarray(np.asarray(seeds, np.uint32)),
            temperature=jnp.float32(config.temperature),
            top_k=jnp.int32(config.top_k),
            top_p=jnp.float32(config.top_p),
            min_p=jnp.float32(config.min_p),
            greedy=config.temperature == 0,
            filtered=config.temperature > 0 and (config.top_k > 0 or config.top_p < 1 or config.min_p > 0),
        )


def filter_logits(logits: Float[Array, "... V"], sampler: Sampler) -> Float[Array, "... V"]:
    """Tempered logits with every token that a filter removes set to -inf.

    top_k keeps the k largest logits, then top_p the smallest set of largest ones whose mass reaches top_p, then min_p
    those at least min_p times as probable as the likeliest. Ties at a cut are kept, so the set does not depend on the
    order of the vocabulary.
    """
    logits = logits / sampler.temperature
    if not sampler.filtered:
        return logits
    ranked = -jnp.sort(-logits, axis=-1)  # [..., V], largest first
    rank = jnp.arange(ranked.shape[-1])
    in_top_k = (sampler.top_k == 0) | (rank < sampler.top_k)
    mass = jax.nn.softmax(jnp.where(in_top_k, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    in_top_p = (sampler.top_p >= 1) | (before < sampler.top_p)
    likely = ranked >= ranked[..., :1] + jnp.log(sampler.min_p)
    kept = in_top_k & in_top_p & likely
    cut = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= cut, logits, -jnp.inf)


def coins(seeds: UInt32[Array, " B"], positions: Int[Array, "B P"], vocab_size: int) -> Float[Array, "B P V"]:
    """Gumbel noise for the tokens at ``positions`` (0-based index in prompt + output)."""

    def row(seed: Array, positions: Array) -> Array:
        key = jax.random.key(seed)
        return jax.vmap(lambda p: jax.random.gumbel(jax.random.fold_in(key, p), (vocab_size,)))(positions)

    return jax.vmap(row)(seeds, positions)


def scores(
    logits: Float[Array, "B N V"], start: Int[Array, " B"], depth: Int[Array, "B N"], levels: int, sampler: Sampler
) -> Float[Array, "B N V"]:
    """Scores whose argmax is the target's token after each node.

    Args:
      logits: after each node.
      start: position of the token that follows the root.
      depth: of each node, the root being 0.
      levels: number of distinct depths, a static bound on ``depth + 1``. Nodes of one depth share a coin, because at
        most one of them lies on the accepted path.
      sampler: values and seeds.
    """
    if sampler.greedy:
        return logits
    noise = coins(sampler.seeds, start[:, None] + jnp.arange(levels), logits.shape[-1])
    return filter_logits(logits, sampler) + jnp.take_along_axis(noise, depth[:, :, None], axis=1)
