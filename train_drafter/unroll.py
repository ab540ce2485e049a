"""The drafter unrolled over a text: what drafting ``steps`` levels deep sees, at all positions at once.

Step 1 is the pair at the root: the target's feature of the position before, and the token. Below the root a pair takes
the hidden state of the pair before it in place of the feature, and the tokens are those of the text: the training-time
test of EAGLE-3 (arXiv 2503.01840, section 3.2). The pair at position p in step d belongs to the draft with its root at
p - d + 1. It attends, within its window, to the keys of step 1 up to that root, and to one key each of steps 2 to d on
the way from the root to itself. So a step needs the T x T scores of step 1's keys and d - 1 diagonals.

Every step is one call of the functions that decoding uses.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specla_jax.drafters.eagle_layer import EagleConfig, Params, eagle_layer, pair_input, pair_keys_values


def unroll(
    params: Params,
    config: EagleConfig,
    embedded: Float[Array, "B T Dt"],
    fused: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    steps: int,
) -> Float[Array, "steps B T D"]:
    """Hidden states, before the final norm, of all pairs in each step; step d means something from position d - 1 on.

    Args:
      embedded: embeddings of the tokens.
      fused: the target's features of the same positions, fused; a pair takes that of the position before.
      positions: place of each token in its document; documents do not see each other.
      steps: levels of the draft, 1 or more. Each is computed again for the gradient.
    """
    step = jax.checkpoint(partial(_step, config), prevent_cse=True)
    hidden, first_key, first_value = step(params, embedded, _shift(fused, positions, 1), positions, None, ())
    outputs = [hidden]
    own: tuple[tuple[Array, Array], ...] = ()
    for depth in range(2, steps + 1):
        feature = _shift(hidden, positions, depth - 1)
        hidden, key, value = step(params, embedded, feature, positions, (first_key, first_value), own)
        own = (*own, (key, value))
        outputs.append(hidden)
    return jnp.stack(outputs)


def _step(
    config: EagleConfig,
    params: Params,
    embedded: Array,
    feature: Array,
    positions: Array,
    first: tuple[Array, Array] | None,
    own: tuple[tuple[Array, Array], ...],
) -> tuple[Array, Array, Array]:
    """Hidden states, keys and values of one step; ``first`` and ``own`` are the keys and values of the steps before."""
    pair = pair_input(params, config, embedded, feature)
    key, value = pair_keys_values(params, config, pair, positions)
    place = jnp.arange(positions.shape[1])
    ago = place[:, None] - place  # [T, T]
    reach = jnp.minimum(positions, config.window - 1)[:, :, None]  # how far back a pair sees: its window, its document
    if first is None:
        return eagle_layer(params, config, pair, feature, positions, [(key, value, _within(ago, 0, reach))]), key, value

    drafted = (*own, (key, value))  # of steps 2 on; on a pair's path, the latest is its own and each lies one before
    back = range(len(own), -1, -1)
    keys, values = (
        jnp.stack([_back(pairs[side], count) for pairs, count in zip(drafted, back)], axis=2) for side in (0, 1)
    )  # [B, T, len(drafted), K, dh]
    segments = [
        (*first, _within(ago, len(drafted), reach)),
        (keys, values, _within(jnp.array(back), 0, reach)),
    ]
    return eagle_layer(params, config, pair, feature, positions, segments), key, value


def _within(ago: Array, least: int, most: Array) -> Array:
    return (ago >= least) & (ago <= most)


def _back(x: Array, count: int) -> Array:
    """``x`` [B, T, ...] of ``count`` positions before; zeros before the row."""
    return jnp.pad(x, ((0, 0), (count, 0)) + ((0, 0),) * (x.ndim - 2))[:, : x.shape[1]]


def _shift(x: Float[Array, "B T D"], positions: Int[Array, "B T"], least: int) -> Float[Array, "B T D"]:
    """``x`` of the position before; zero at positions below ``least``, which have none."""
    return jnp.where((positions >= least)[..., None], _back(x, 1), 0)
