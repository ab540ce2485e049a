"""``gdn_recover``: see api.py for what it computes, reference.py for the plain implementation."""

from kernels_pallas.gdn_recover.api import gdn_recover

__all__ = ["gdn_recover"]
