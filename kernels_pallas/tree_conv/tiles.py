"""How ``tree_conv`` is cut: a program takes one head of q, k or v and a few nodes of one row.

Few nodes a program make many programs, which is what hides latency when there is one row; with many rows there are
enough of them, and more nodes a program read the taps of the convolution less often.
"""

from dataclasses import dataclass, replace

from kernels_pallas.tiles import TUNED_ON, Rule, first


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One cut: ``nodes`` a program, a power of two, and the warps that share the channels of each."""

    nodes: int
    warps: int = 2


# ``nodes`` of a rule: of all rows together
TABLE = {
    TUNED_ON: (
        Rule(nodes=64, tile=Tile(nodes=1, warps=2)),
        Rule(tile=Tile(nodes=2, warps=2)),
    ),
}


def pick(rows: int, nodes: int, on: str | None = None) -> Tile:
    """The tile for ``rows`` trees of ``nodes`` nodes, no larger than a tree needs; ``on`` names another card."""
    tile = first(TABLE, nodes=rows * nodes, on=on)
    return replace(tile, nodes=min(tile.nodes, 1 << (nodes - 1).bit_length()))
