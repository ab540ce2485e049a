"""``stream_matmul``: see api.py for what it computes, reference.py for the plain implementation and the packing."""

from kernels_pallas.stream_matmul.api import stream_matmul
from kernels_pallas.stream_matmul.reference import pack, pack_gate_up, pack_rows

__all__ = ["pack", "pack_gate_up", "pack_rows", "stream_matmul"]
