"""Tiles of verification by card, nodes and heads (rows times value heads); see ``kernels_pallas/tiles.py``.

Few heads: the time is the length of one program, so it takes few columns, and loads all of dk ahead: ``stages`` of a
Triton program is one more than the cuts of dk. Many heads: a program must use what it reads, so it takes more columns,
of a Triton program with fewer warps, and several programs share a multiprocessor.
"""

from kernels_pallas.tiles import TUNED_ON, Rule, Tile

# A Mosaic GPU program has one warpgroup; its stages are those of narrow.py (16 and 32 columns) or wide.py.
MOSAIC = {
    TUNED_ON: (
        Rule(heads=16, tile=Tile(columns=16, stages=2)),
        Rule(nodes=16, heads=64, tile=Tile(columns=64, stages=8)),
        Rule(nodes=16, heads=128, tile=Tile(columns=128, stages=5)),
        Rule(nodes=16, tile=Tile(columns=256, stages=2)),
        Rule(nodes=32, heads=64, tile=Tile(columns=64, stages=8)),
        Rule(nodes=32, tile=Tile(columns=128, stages=3)),
        Rule(tile=Tile(columns=64, stages=8)),
    ),
}

TABLE = {
    TUNED_ON: (
        Rule(nodes=1, heads=64, tile=Tile(columns=16, warps=4)),
        Rule(nodes=1, tile=Tile(columns=64, warps=4)),
        Rule(nodes=16, heads=64, tile=Tile(columns=16, rows=64, warps=4, stages=5)),
        Rule(nodes=32, heads=64, tile=Tile(columns=16, rows=64, warps=8, stages=5)),
        Rule(nodes=16, tile=Tile(columns=32, rows=32, warps=1, stages=4)),
        Rule(nodes=32, tile=Tile(columns=32, rows=32, warps=2, stages=4)),
        Rule(heads=64, tile=Tile(columns=16, rows=64, warps=8, stages=5)),
        Rule(tile=Tile(columns=64, rows=32, warps=4, stages=4)),
    ),
}
