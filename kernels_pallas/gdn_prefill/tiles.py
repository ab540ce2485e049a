"""Tiles of prefill by card and heads (rows times value heads); see ``kernels_pallas/tiles.py``.

Few heads: little of dv a program, or most of the card is idle. Many heads: more of it, as every program of a head reads
the same q, k and 64 x 64 matrices; but with 4 warps and 32 columns of a state of dk = 256, two programs of 255
registers and 80 KB fit a multiprocessor, and one computes while the other loads.
"""

from kernels_pallas.tiles import TUNED_ON, Rule, Tile

PREPARE = {TUNED_ON: (Rule(tile=Tile(columns=64, warps=4)),)}  # takes whole chunks: columns say nothing

SCAN = {  # holds all of dk, as REVERSE does
    TUNED_ON: (
        Rule(heads=8, tile=Tile(columns=16, warps=4)),
        Rule(tile=Tile(columns=32, warps=4, stages=2)),
    ),
}

MOSAIC = {  # the same walk, 64 columns a warpgroup
    TUNED_ON: (
        Rule(heads=32, tile=Tile(columns=64)),
        Rule(tile=Tile(columns=128)),
    ),
}

REVERSE = {
    TUNED_ON: (
        Rule(heads=8, tile=Tile(columns=16, warps=4)),
        Rule(tile=Tile(columns=32, warps=4)),
    ),
}
