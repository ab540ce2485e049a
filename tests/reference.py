"""The small checkpoints whose outputs flash-linear-attention computed, as the tests use them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from specla_jax.checkpoint import load_target
from specla_jax.drafters import Script, script_trees
from specla_jax.target import Target

GDN = Path(__file__).parent / "data" / "gdn"


@dataclass(frozen=True)
class Reference:
    """A checkpoint and what the reference implementation computed for it, in float32.

    Attributes:
      name: folder name.
      model: the target in float32; the same object for all tests, so that programs compile once.
      expected: logits, states and greedy tokens.
    """

    name: str
    model: Target
    expected: dict[str, np.ndarray]

    @property
    def prompts(self) -> list[list[int]]:
        length = int(self.expected["greedy_prompt_len"][0])
        return self.expected["input_ids"][:, :length].tolist()

    @property
    def greedy(self) -> list[list[int]]:
        return self.expected["greedy_tokens"].tolist()


def load_reference(name: str) -> Reference:
    return Reference(name, load_target(GDN / name, dtype="float32"), load_file(GDN / name / "expected.safetensors"))


def names() -> list[str]:
    names = sorted(folder.name for folder in GDN.iterdir())
    try:
        import torch  # noqa: F401
    except ImportError:
        names.remove("torch-bin")  # its weights are a pickle, which only torch reads; test_checkpoint says so
    return names


def scripted_trees(outputs: list[list[int]], depth: int, right: int, vocab_size: int) -> Script:
    """Trees of up to 3 * depth + 1 nodes that hold ``right`` levels of the true output among wrong siblings.

    Every true node has a wrong sibling before it and another behind it, so the accepted path is never a prefix of the
    nodes. All scripts of one depth have one size.
    """

    def tree(output: list[int], step: int) -> list[tuple[int, int]]:
        nodes: list[tuple[int, int]] = []
        parent = 0
        for level, token in enumerate(output[step : step + depth]):
            wrong = [(token + 1) % vocab_size, (token + 2) % vocab_size]
            if level >= right:
                nodes += [(w, parent) for w in wrong]
                break
            nodes += [(wrong[0], parent), (token, parent), (wrong[1], parent)]
            parent = len(nodes) - 1
        return nodes

    trees = [[tree(output, step) for step in range(len(output))] for output in outputs]
    return script_trees(trees, width=3 * depth)
