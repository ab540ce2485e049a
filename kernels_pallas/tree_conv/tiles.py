"""How ``tree_conv`` is cut: a program takes one head of q, k or v and a few nodes of one row.

Few nodes a program make many programs, which is what hides latency when there is one row; with many rows there are
enough of them, and more nodes a program read the taps of the convolution less often.
"""

from dataclasses import dataclass

from kernels_pallas.tiles import TUNED_ON, card


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One cut: ``nodes`` a program, a power of two, and the warps that share the channels of each."""

    nodes: int
    warps: int = 2


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A tile and the largest number of nodes in all rows together that it is chosen for; -1 stands for any."""

    tile: Tile
    nodes: int = -1


TABLE = {
    TUNED_ON: (
        Rule(nodes=64, tile=Tile(nodes=1, warps=2)),
        Rule(tile=Tile(nodes=2, warps=2)),
    ),
}


def pick(rows: int, nodes: int, on: str | None = None) -> Tile:
    """The tile for ``rows`` trees of ``nodes`` nodes, no larger than a tree needs; ``on`` names another card."""
    rules = TABLE.get(card() if on is None else on, TABLE[TUNED_ON])
    tile = next(rule.tile for rule in rules if rule.nodes == -1 or rows * nodes <= rule.nodes)
    return Tile(nodes=min(tile.nodes, 1 << (nodes - 1).bit_length()), warps=tile.warps)
