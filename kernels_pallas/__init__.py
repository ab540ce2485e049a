"""Kernels of a speculative-decoding runtime for Gated DeltaNet, each beside a plain jnp reference.

Letters of the dimensions, here and in every annotation:

    B rows   N nodes of a draft tree   T prompt tokens   L layers
    H key heads   HV value heads, a multiple of H; value head j uses key head j // (HV / H)   dk, dv head sizes
    C conv channels   W conv taps
    K columns of a matrix of weights   M features it makes of them   P rows it is packed in   I features of a SwiGLU
    in draft_attention: T nodes of a level   H query heads   K key heads   dh head size   W slots of the ring
                        S slots of the drafts
    in draft_expand: T nodes of a level   V draft vocabulary   Vt the target's   D, Dt widths of drafter and target

The state of a value head is S [dk, dv], key first. Log decays, betas, states and factors are fp32; all fp32 products
run at full precision. This package imports nothing of the runtime above it.
"""

from kernels_pallas.ancestors import ancestor_mask
from kernels_pallas.draft_attention.api import draft_attention
from kernels_pallas.draft_expand.api import draft_expand
from kernels_pallas.factors import Factors
from kernels_pallas.gated_norm.api import gated_norm
from kernels_pallas.gdn_prefill.api import gdn_prefill
from kernels_pallas.gdn_recover.api import gdn_recover
from kernels_pallas.gdn_verify.api import gdn_verify
from kernels_pallas.stream_matmul.api import stream_matmul
from kernels_pallas.tree_conv.api import MixerInputs, prefill_conv, tree_conv
from kernels_pallas.tree_conv.reference import gates, l2_norm

__all__ = [
    "Factors",
    "MixerInputs",
    "ancestor_mask",
    "draft_attention",
    "draft_expand",
    "gated_norm",
    "gates",
    "gdn_prefill",
    "gdn_recover",
    "gdn_verify",
    "l2_norm",
    "prefill_conv",
    "stream_matmul",
    "tree_conv",
]
