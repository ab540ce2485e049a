"""Tiles of recovery by card, nodes and heads (layers times rows times value heads); see ``kernels_pallas/tiles.py``.

A tile is ``rows`` of dk by ``columns`` of dv, and a thread holds rows * columns / (32 warps) numbers of it. The kernel
waits for memory only: programs must be small enough that several share a multiprocessor, so that some load while others
compute or store. Factors of fewer elements than threads need no exchange between the threads.
"""

from kernels_pallas.tiles import TUNED_ON, Rule, Tile

# Trees of up to this many nodes are folded by rank-1 updates along the path, larger ones by a product. An update costs
# a program of 64 x 64 about 100 instructions a warp and node of the path, a product about 450, whatever the path.
RANK_ONE = 8

# Nodes of the path whose factors are loaded together for rank-1 updates.
STEP = 4

# Channels of the window that a program moves: 16 bytes a thread in bf16 at 4 warps.
CHANNELS = 1024

TABLE = {TUNED_ON: (Rule(tile=Tile(columns=64, rows=64, warps=4)),)}
