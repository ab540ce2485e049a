"""``gdn_recover``: see api.py for what it computes, reference.py for the plain version, triton.py for a GPU's."""

from kernels_pallas.gdn_recover.api import gdn_recover

__all__ = ["gdn_recover"]
