"""``draft_expand``: see api.py for what it computes, reference.py for the plain version, triton.py for a GPU's."""

from kernels_pallas.draft_expand.api import MAX_BRANCH, Expansion, Frontier, draft_expand

__all__ = ["MAX_BRANCH", "Expansion", "Frontier", "draft_expand"]
