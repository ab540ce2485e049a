"""The cut of an op into programs: what every table of tiles is made of, and the check that a tile fits the card.

Tables are data, one ``tiles.py`` beside each kernel: a card's name, then rules from the narrowest to the widest. They
were measured with ``scripts/bench_kernels.py --tune``; a card without a table of its own gets the one of the H200.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

TUNED_ON = "NVIDIA H200"

# Shared memory that one program may use, in bytes, by the start of the card's name. Source: CUDA C++ Programming Guide,
# technical specifications by compute capability (9.0 and 8.0).
_SHARED_MEMORY = {"NVIDIA A100": 163 * 1024, "NVIDIA": 227 * 1024}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One cut: ``columns`` of dv a program, the warps that share it, and how many loads the compiler pipelines.

    rows: of dk that a program holds at a time; 0 for all of them.
    """

    columns: int
    rows: int = 0
    warps: int = 4
    stages: int = 1

    def within(self, dk: int, dv: int) -> "Tile":
        """This tile, no larger than a state of dk x dv."""
        return replace(self, columns=min(self.columns, dv), rows=min(self.rows or dk, dk))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A tile (a ``Tile``, or what an op has in its place) and the largest shape it is for; -1 stands for any."""

    tile: Any
    nodes: int = -1
    heads: int = -1  # rows times value heads


def card() -> str:
    """The name of the first device, such as "NVIDIA H200"."""
    return jax.devices()[0].device_kind


def first(table: Mapping[str, Sequence[Rule]], *, nodes: int, heads: int = 1, on: str | None = None) -> Any:
    """The tile of the first rule that ``nodes`` and ``heads`` do not exceed; ``on`` names another card."""
    rules = table.get(card() if on is None else on, table[TUNED_ON])
    for rule in rules:
        if nodes <= _bound(rule.nodes) and heads <= _bound(rule.heads):
            return rule.tile
    raise ValueError(f"no tile for {nodes} nodes and {heads} heads")


def _bound(limit: int) -> float:
    return math.inf if limit == -1 else limit


def check_shared_memory(op: str, tile: Any, needed: int, on: str | None = None, remedy: str = "fewer columns") -> None:
    """Raise ``ValueError`` if a program needs more shared memory than the card has, before anything is compiled."""
    name = card() if on is None else on
    limit = next((size for start, size in _SHARED_MEMORY.items() if name.startswith(start)), 227 * 1024)
    if needed > limit:
        raise ValueError(
            f"tile of {op} must fit {limit} bytes of shared memory on {name}, {tile} needs {needed}: use {remedy}"
        )
