"""``draft_attention``: see api.py for what it computes, reference.py for the plain version, triton.py for a GPU's."""

from kernels_pallas.draft_attention.api import draft_attention

__all__ = ["draft_attention"]
