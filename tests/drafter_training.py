"""What the tests of drafter training share."""

import json
from pathlib import Path

import numpy as np

from specla_jax.config import DraftConfig
from train_drafter.documents import Documents

VOCAB = 96  # of the small checkpoints
# In place of the drafts that evaluations decode with: less to compile.
DRAFTS = {"chain": DraftConfig(depth=4, nodes=5), "tree": DraftConfig(depth=2, branch=2, nodes=5)}


def documents(count: int, seed: int = 0, size: int = 11) -> Documents:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    return Documents.of((rng.integers(0, VOCAB, size), [True] * size) for _ in range(count))


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
