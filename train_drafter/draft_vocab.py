"""The choice of a reduced draft vocabulary: the tokens that the target itself gives most probability to on the data."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int
from numpy import ndarray

from specla_jax.errors import UserError
from specla_jax.model import GatedDeltaNetLM
from specla_jax.target import Target
from train_drafter.packing import Batch, RowSampler
from train_drafter.target import head_kernel, head_logits, hidden_states

_PIECE = 64  # positions whose probabilities are held at once


def frequent_tokens(target: Target, sampler: RowSampler, size: int, batches: int = 32) -> Int[ndarray, " size"]:
    """The ``size`` tokens with the largest sum of the target's next-token probabilities, in the order of their ids.

    The sum is over the learned places of up to ``batches`` batches, an epoch at most.

    Raises:
      UserError: ``size`` is not 1 to the target's vocabulary.
    """
    vocab = target.config.vocab_size
    if not 1 <= size <= vocab:
        raise UserError(f"--draft-vocab-size must be 1 to {vocab}, got {size}")
    model = GatedDeltaNetLM(target.config, target.dtype)

    @jax.jit
    def mass(params: dict, batch: Batch) -> Array:
        hidden, _ = hidden_states(model, params, batch.tokens, starts=batch.starts)
        kernel = head_kernel(params, model.config)
        flat = hidden.reshape(-1, hidden.shape[-1])
        pad = -len(flat) % _PIECE
        pieces = jnp.pad(flat, ((0, pad), (0, 0))).reshape(-1, _PIECE, flat.shape[-1])
        counted = jnp.pad(batch.counted.reshape(-1), (0, pad)).reshape(-1, _PIECE, 1)

        def add(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
            share = jax.nn.softmax(head_logits(piece[0], kernel, model.dtype), axis=-1)
            return total + jnp.where(piece[1] & jnp.isfinite(share), share, 0).sum(axis=0), None

        return lax.scan(add, jnp.zeros(vocab, jnp.float32), (pieces, counted))[0]

    count = min(batches, -(-len(sampler.rows) // sampler.batch))
    total = sum(np.asarray(mass(target.params, sampler(step)), np.float64) for step in range(count))
    best = np.argsort(-np.asarray(total), kind="stable")[:size]
    return np.sort(best).astype(np.int32)
