"""What the kernels are measured against: other ways to verify a tree and to recover, as Pallas-Triton kernels.

They are written to be fast, so that a ratio to them means something, and cut to what a benchmark needs: every node is
real, shapes are not checked. Nothing outside the benchmarks and the tests calls them.
"""

from kernels_pallas.baselines.replay import paths, replay_recover, replay_verify
from kernels_pallas.baselines.walk import MOST_ELEMENTS, walk_verify

__all__ = ["MOST_ELEMENTS", "paths", "replay_recover", "replay_verify", "walk_verify"]
