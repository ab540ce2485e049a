"""The loaded target: parameters, configuration and where its tokenizer lies."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specla_jax.config import Dtype, TargetConfig
from specla_jax.decode_step import DecodeWeights, decode_weights
from specla_jax.programs import Programs


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """What a drafter must agree on with its target. Compare with ``==``; a hash of None means no tokenizer is known."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    vocabulary_hash: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A model ready to run.

    Attributes:
      config: its shape.
      params: nested dictionary of arrays, as :func:`specla_jax.checkpoint.parameter_shapes` lists them, in ``dtype``
        except ``A_log`` and ``dt_bias``, which are always float32.
      dtype: compute dtype.
      path: the folder it came from.
      tokenizer_path: the folder that holds ``tokenizer.json`` or ``tokenizer.model``; None when there is neither.
      vocabulary_hash: SHA-256 of that file, or None.
      programs: what has been compiled for it.
    """

    config: TargetConfig
    params: dict[str, Any]
    dtype: Dtype
    path: Path
    tokenizer_path: Path | None = None
    vocabulary_hash: str | None = None
    programs: Programs = field(default_factory=Programs, repr=False)

    @cached_property
    def decode_weights(self) -> DecodeWeights:
        """The parameters packed for decoding, beside them in memory; made when first asked for."""
        return decode_weights(self.params, self.config, self.dtype)

    @property
    def identity(self) -> TargetIdentity:
        return TargetIdentity(
            hidden_size=self.config.hidden_size,
            num_hidden_layers=self.config.num_hidden_layers,
            vocab_size=self.config.vocab_size,
            vocabulary_hash=self.vocabulary_hash,
        )
