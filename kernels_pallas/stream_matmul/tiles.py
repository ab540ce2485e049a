"""How ``stream_matmul`` is cut, by blocks of 64 features and tokens; see ``kernels_pallas/tiles.py``.

What must be on its way is the bandwidth times the latency, about 64 KB a multiprocessor, in one program of it or in
several. Fewer blocks than multiprocessors: the programs of a cluster share the depth of a block. More: two programs of
a multiprocessor, as whole rounds of one would leave most of the card idle in the last.

The depth of a step and the stages change no sum; the split does, so it must be the same for every number of tokens.
"""

from dataclasses import dataclass, replace

from kernels_pallas.stream_matmul.reference import BLOCK
from kernels_pallas.tiles import TUNED_ON, Rule, first

MIN_DEPTH = 64  # columns of bf16 that a swizzle of 128 bytes spans


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One cut.

    Attributes:
        depth: columns of the weights a step.
        stages: the most steps in shared memory; as many as fit.
        split: programs of a cluster, which share the depth of a block.
        programs: that a multiprocessor is to hold, each with its part of the shared memory.
        overlap: begin while the launch before still runs (programmatic dependent launch): the first weights, which no
            launch writes, are asked for then, and all that it wrote only after its end.
    """

    depth: int = 128
    stages: int = 8
    split: int = 1
    programs: int = 1
    overlap: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("depth", (64, 128, 256)), ("split", (1, 2, 4, 8)), ("programs", (1, 2, 3, 4))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)}")
        if not 1 <= self.stages <= 32:
            raise ValueError(f"stages must be 1 to 32, got {self.stages}")


# ``heads`` of a rule: blocks of 64 features; ``nodes``: tokens
TABLE = {
    TUNED_ON: (
        Rule(heads=33, tile=Tile(split=4)),
        Rule(heads=66, tile=Tile(split=2)),
        Rule(heads=132, tile=Tile()),
        Rule(nodes=32, tile=Tile(programs=2)),
        Rule(tile=Tile(depth=64, programs=2)),
    ),
}


def pick(tokens: int, features: int, depth: int, norm: bool, on: str | None = None) -> Tile:
    """The tile for weights of ``features`` x ``depth``; ``on`` names another card."""
    return within(first(TABLE, nodes=tokens, heads=features // BLOCK, on=on), depth, norm)


def within(tile: Tile, depth: int, norm: bool) -> Tile:
    """This tile, cut to what divides ``depth``. A norm sums over all of a token, so one program reads all of it."""
    split = 1 if norm else tile.split
    while depth % (split * MIN_DEPTH):
        split //= 2
    step = tile.depth
    while depth % (split * step):
        step //= 2
    return replace(tile, depth=step, split=split)
