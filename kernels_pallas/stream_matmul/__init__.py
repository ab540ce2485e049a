"""Products of a few tokens with large matrices, one after another in one launch."""

from kernels_pallas.stream_matmul.api import stream_matmul
from kernels_pallas.stream_matmul.mosaic_gpu import no_arrivals
from kernels_pallas.stream_matmul.reference import Product, fill_up, pack, pack_gate_up, pack_rows

__all__ = ["Product", "fill_up", "no_arrivals", "pack", "pack_gate_up", "pack_rows", "stream_matmul"]
