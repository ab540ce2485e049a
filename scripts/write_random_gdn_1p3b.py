"""Writes random weights in the shapes, names and dtype of m-a-p/1.3B-100B-GatedDeltaNet-pure (5.9 GB, 5 GB of RAM).

For measuring conversion and speed where the real checkpoint cannot be had: python scripts/write_random_gdn_1p3b.py DST
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from specla_jax.checkpoint.folders import CONFIG, new_folder, write_json
from specla_jax.checkpoint.layout import parameter_pieces
from specla_jax.checkpoint.tensor_files import write_tensors
from specla_jax.config import TargetConfig

TENSOR_BYTES = 5_865_376_000
RAW_CONFIG = {
    "architectures": ["GatedDeltaNetForCausalLM"],
    "model_type": "gated_deltanet",
    "attn": None,
    "attn_mode": "chunk",
    "bos_token_id": 1,
    "conv_size": 4,
    "eos_token_id": 2,
    "expand_v": 1,
    "head_dim": 256,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 2048,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-06,
    "num_heads": 8,
    "num_hidden_layers": 24,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_gate": True,
    "use_short_conv": True,
    "vocab_size": 32000,
}


def tensors(config: TargetConfig, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the checkpoint, drawn as fla draws them; ``attn.D`` is all zero as in the published file."""
    rng = np.random.default_rng(seed)
    for pieces in parameter_pieces(config).values():
        for piece in pieces:
            if piece.key.endswith("norm.weight"):
                yield piece.key, np.ones(piece.shape, np.float32)
            elif piece.key.endswith("A_log"):
                yield piece.key, np.log(rng.uniform(0.01, 16, piece.shape)).astype(np.float32)
                yield piece.key.replace("A_log", "D"), np.zeros(piece.shape, np.float32)
            elif piece.key.endswith("dt_bias"):
                dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), piece.shape))
                yield piece.key, np.log(np.expm1(dt)).astype(np.float32)
            else:
                width = 0.3 if piece.kind == "conv" else 0.02
                yield piece.key, np.float32(width) * rng.standard_normal(piece.shape, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dst", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total = 0

    def counted() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal total
        for name, tensor in tensors(TargetConfig.from_fla(RAW_CONFIG), args.seed):
            total += tensor.nbytes
            yield name, tensor

    with new_folder(args.dst, overwrite=False) as work:
        write_tensors(work, counted())
        if total != TENSOR_BYTES:
            raise AssertionError(f"wrote {total:,} bytes of tensors, the published checkpoint has {TENSOR_BYTES:,}")
        write_json(work / CONFIG, RAW_CONFIG)
    print(f"wrote {total:,} bytes of tensors to {args.dst}")


if __name__ == "__main__":
    main()
