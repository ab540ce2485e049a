"""``gated_norm``: see api.py for what it computes, reference.py for the plain version, triton.py for a GPU's."""

from kernels_pallas.gated_norm.api import gated_norm

__all__ = ["gated_norm"]
