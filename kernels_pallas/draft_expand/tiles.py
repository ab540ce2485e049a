"""How ``draft_expand`` is cut: first programs of a node and a chunk of its logits, then programs of a child and a row.

Not measured yet. Four nodes in chunks of 1,024 of 32,000 logits are 128 programs, one a multiprocessor, with 8 logits a
thread. The second launch reads the best of all chunks in every program, so there must not be many.
"""

from dataclasses import dataclass, replace

from kernels_pallas.tiles import TUNED_ON, Rule, first

MAX_CHUNKS = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One cut: the logits that a program of the first launch takes, its warps, and those of a child in the second."""

    chunk: int = 1024
    warps: int = 4
    child_warps: int = 4

    def __post_init__(self) -> None:
        if self.chunk < 128 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk must be a power of two of 128 or more, got {self.chunk}")
        for name in ("warps", "child_warps"):
            if getattr(self, name) not in (1, 2, 4, 8):
                raise ValueError(f"{name} must be one of (1, 2, 4, 8), got {getattr(self, name)}")


# ``nodes`` of a rule: of all rows together
TABLE = {
    TUNED_ON: (
        Rule(nodes=8, tile=Tile()),
        Rule(tile=Tile(chunk=2048)),
    ),
}


def pick(nodes: int, vocabulary: int, on: str | None = None) -> Tile:
    """The tile for ``nodes`` nodes of all rows, its chunks larger for a large vocabulary; ``on`` names another card."""
    tile = first(TABLE, nodes=nodes, on=on)
    while tile.chunk * MAX_CHUNKS < vocabulary:
        tile = replace(tile, chunk=2 * tile.chunk)
    return tile
