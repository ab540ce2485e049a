"""``gdn_verify``: see api.py for what it computes, reference.py for the plain implementation."""

from kernels_pallas.gdn_verify.api import gdn_verify

__all__ = ["gdn_verify"]
