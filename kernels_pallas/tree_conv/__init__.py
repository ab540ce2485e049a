"""The short convolution along a draft tree: see api.py for what it computes, reference.py for the plain version."""

from kernels_pallas.tree_conv.api import prefill_conv, recover_window, tree_conv

__all__ = ["prefill_conv", "recover_window", "tree_conv"]
