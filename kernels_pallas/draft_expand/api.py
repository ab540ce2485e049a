"""From the logits of one level of drafting to what the next level reads: the children, the best of them, their inputs.

A drafter that grows a tree level by level gives each node of a level its best children, and the best of all of these
are the next level's nodes. In XLA the two choices, the softmax, the gathers, the embedding and the norms are a dozen
launches, each shorter than the gap before it.

Bytes moved: the logits, once; all else is small beside them. Four nodes of 32,000 logits are 512 KB.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.draft_expand import reference, triton
from kernels_pallas.draft_expand.reference import Expansion, Frontier
from kernels_pallas.implementations import Implementation, choose, no_gpu
from kernels_pallas.shapes import check_float32, check_int32, check_rank, check_shape

__all__ = ["MAX_BRANCH", "Expansion", "Frontier", "draft_expand"]

MAX_BRANCH = 8

_DTYPES = (jnp.float32, jnp.bfloat16)


def draft_expand(
    logits: Float[Array, "B T V"],
    hidden: Float[Array, "B T D"],
    log_prob: Float[Array, "B T"],
    ancestors: Bool[Array, "B T S"],
    level: Int[Array, ""] | int,
    temperature: Float[Array, ""],
    embedding: Float[Array, "Vt Dt"],
    embedding_scale: Float[Array, " Dt"],
    hidden_scale: Float[Array, " D"],
    draft_to_target: Int[Array, " V"] | None = None,
    *,
    branch: int,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
) -> Expansion:
    """The ``branch`` best children of each of the T nodes ``level`` edges below the root, and the best of all of them.

    With z the logits of a node over the temperature and l its log-probability, in fp32:

        l_i    = l + (z_i - max z) - log sum_j exp(z_j - max z)      for the ``branch`` largest z_i, of each node
        pair   = [E_i / rms(E_i) * embedding_scale, h / rms(h) * hidden_scale]     rms(x)^2 = mean x^2 + eps

    for the ``branch`` largest l_i of all nodes (arXiv 2406.16858), with E_i the embedding of the child's token, rounded
    to the dtype of ``hidden``, and h the hidden state of its parent. Equal values: the lower index first.

    Args:
        logits: fp32 and finite. T is ``branch``, or 1 for the root.
        hidden: fp32 or bf16. Each node's hidden state, which is the feature of its children.
        log_prob: fp32, of the path from the root to each node.
        ancestors: draft slots of each node's proper ancestors. Node t of level 1 or more has slot (level - 1) T + t.
        level: int32; 0 for the root, which has no slot.
        temperature: fp32.
        embedding: fp32 or bf16, of the target's vocabulary.
        embedding_scale, hidden_scale: of the two norms.
        draft_to_target: int32. The tokens of a reduced draft vocabulary in the target's; None for the same vocabulary.
        branch: 1 to 8, at most V.
        eps: of the two norms.
        implementation: "triton", "reference", or None for the reference: the kernel has not been timed yet.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    check_rank("logits", logits, "B T V")
    check_rank("hidden", hidden, "B T D")
    check_rank("ancestors", ancestors, "B T S")
    check_rank("embedding", embedding, "Vt Dt")
    rows, nodes, vocabulary = logits.shape
    width, slots = hidden.shape[2], ancestors.shape[2]
    if not 1 <= branch <= min(MAX_BRANCH, vocabulary):
        raise ValueError(f"branch must be 1 to {min(MAX_BRANCH, vocabulary)}, got {branch}")
    if nodes not in (1, branch):
        raise ValueError(f"logits must hold 1 node or branch={branch} nodes a row, got {nodes}")
    if slots < 1:
        raise ValueError("ancestors must have 1 slot or more, got 0")
    if isinstance(level, int):
        if not 0 <= level <= slots // branch:
            raise ValueError(f"level must be 0 to {slots // branch}, as ancestors has {slots} slots, got {level}")
        if nodes != (branch if level else 1):
            raise ValueError(f"logits must hold the root alone at level 0, and branch={branch} nodes below it")
        level = jnp.int32(level)
    if draft_to_target is None and vocabulary > embedding.shape[0]:
        raise ValueError(f"logits must have at most embedding's {embedding.shape[0]} tokens, got {vocabulary}")
    check_shape("hidden", hidden, "B T D", (rows, nodes, width))
    check_shape("log_prob", log_prob, "B T", (rows, nodes))
    check_shape("ancestors", ancestors, "B T S", (rows, nodes, slots))
    check_shape("level", level, "", ())
    check_shape("temperature", temperature, "", ())
    check_shape("embedding_scale", embedding_scale, "Dt", embedding.shape[1:])
    check_shape("hidden_scale", hidden_scale, "D", (width,))
    check_int32("level", level)
    for name, array in (("logits", logits), ("log_prob", log_prob), ("temperature", temperature)):
        check_float32(name, array)
    for name, array in (("hidden", hidden), ("embedding", embedding)):
        if array.dtype not in _DTYPES:
            raise ValueError(f"{name} must be bfloat16 or float32, got {array.dtype}")
    if ancestors.dtype != jnp.bool_:
        raise ValueError(f"ancestors must be bool, got {ancestors.dtype}")
    if draft_to_target is not None:
        check_shape("draft_to_target", draft_to_target, "V", (vocabulary,))
        check_int32("draft_to_target", draft_to_target)
    run = choose(
        *("draft_expand", implementation),
        {"reference": reference.draft_expand, "triton": triton.draft_expand},
        {"triton": no_gpu()},
    )
    norms = embedding, embedding_scale, hidden_scale
    arrays = logits, hidden, log_prob, ancestors, level, temperature, *norms, draft_to_target
    return run(*arrays, eps=float(eps), branch=branch)
