"""How ``draft_attention`` is cut: a program takes one key head of one row, and the ring ``slots`` at a time.

Not measured yet. One row is a program a key head, so the time is that of one multiprocessor reading 256 KB (512 slots
of 128 in bf16): as much as possible must be on its way, which is what the stages are for, and more warps hide what lies
before and between the loads. With more programs than multiprocessors several are to share one: fewer stages leave them
the shared memory. fp32 products take registers for the parts of their operands, so their steps are shorter.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from kernels_pallas.tiles import TUNED_ON, Rule, first

SLOTS = 64  # the most a program takes at a time


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One cut: slots of the ring a step, the warps that share them, and the steps that the compiler has in flight."""

    slots: int = SLOTS
    warps: int = 4
    stages: int = 4

    def __post_init__(self) -> None:
        for name, allowed in (("slots", (16, 32, SLOTS)), ("warps", (1, 2, 4, 8)), ("stages", range(1, 9))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {tuple(allowed)}, got {getattr(self, name)}")


# ``heads`` of a rule: rows times key heads
TABLE = {
    TUNED_ON: (
        Rule(heads=132, tile=Tile(warps=8)),
        Rule(tile=Tile(stages=3)),
    ),
}


def pick(heads: int, dtype: jnp.dtype, on: str | None = None) -> Tile:
    """The tile for ``heads`` programs, of fewer slots where they are fp32; ``on`` names another card."""
    tile = first(TABLE, nodes=1, heads=heads, on=on)
    return tile if dtype == jnp.bfloat16 else replace(tile, slots=tile.slots // 4)
