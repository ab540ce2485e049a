"""Shapes of targets that several scripts measure."""

from specla_jax.config import TargetConfig


def shape(layers: int, hidden: int, heads: int, head: int, mlp: int, vocab: int, tied: bool) -> TargetConfig:
    """A target with as many value heads as key heads, both of size ``head``."""
    return TargetConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_heads=heads,
        num_v_heads=heads,
        head_dim=head,
        head_v_dim=head,
        intermediate_size=mlp,
        tie_word_embeddings=tied,
    )


GDN_1P3B = shape(24, 2048, 8, 256, 5632, 32000, False)  # m-a-p/1.3B-100B-GatedDeltaNet-pure
TINY = shape(2, 32, 1, 16, 48, 64, False)  # runs anywhere
