"""Speculative decoding of stateful linear-attention language models in JAX.

    model = specla_jax.load_target("path/to/checkpoint", dtype="bfloat16")
    result = specla_jax.generate(model, [[1, 5, 9]], method="tree", max_new_tokens=64)

Dimension letters used throughout: B rows, T prompt tokens, N nodes, L layers, D hidden, V vocabulary, H key heads,
HV value heads, dk and dv head sizes, W conv taps, C conv channels, I MLP width.
"""

from specla_jax.checkpoint import convert, export, load_target
from specla_jax.config import DraftConfig, SamplingConfig, TargetConfig
from specla_jax.errors import UserError
from specla_jax.generate import Delta, GenerationResult, Stream, generate, stream
from specla_jax.target import Target
from specla_jax.text import StreamDecoder, load_tokenizer

__all__ = [
    "Delta",
    "DraftConfig",
    "GenerationResult",
    "SamplingConfig",
    "Stream",
    "StreamDecoder",
    "Target",
    "TargetConfig",
    "UserError",
    "convert",
    "export",
    "generate",
    "load_target",
    "load_tokenizer",
    "stream",
]
