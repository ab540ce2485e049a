"""From a layer's projection to what the delta rule reads: see api.py, and reference.py for the plain version."""

from kernels_pallas.tree_conv.api import MixerInputs, prefill_conv, tree_conv

__all__ = ["MixerInputs", "prefill_conv", "tree_conv"]
