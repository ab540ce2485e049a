"""``gdn_prefill``: see api.py for what it computes, reference.py for the plain implementation."""

from kernels_pallas.gdn_prefill.api import gdn_prefill

__all__ = ["gdn_prefill"]
