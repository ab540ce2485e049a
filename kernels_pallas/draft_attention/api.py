"""The attention of one level of drafting, from the projections of its nodes to what the output projection reads.

A drafter that grows a tree level by level runs a level's few nodes through one layer. Each node attends to a ring of
keys of the committed text, to its ancestors among the drafts, and to itself. In XLA the rotation, the updates of the
draft keys and values, the scores, the softmax and the sums are a dozen launches, each shorter than the gap before it.

Bytes moved: the slots of the ring that hold anything, keys and values, once; all else is small beside them. At one row
of 512 slots of 8 key heads of 128 in bf16 they are 2 MB.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.draft_attention import reference, triton
from kernels_pallas.implementations import Implementation, choose
from kernels_pallas.shapes import check_int32, check_rank, check_rows, check_shape

MAX_LEVEL_NODES = 8

_DTYPES = (jnp.float32, jnp.bfloat16)


def draft_attention(
    qkv: Float[Array, "B T (H+2*K)*dh"],
    ring_key: Float[Array, "B W K dh"],
    ring_value: Float[Array, "B W K dh"],
    draft_key: Float[Array, "B S K dh"],
    draft_value: Float[Array, "B S K dh"],
    ancestors: Bool[Array, "B T S"],
    length: Int[Array, " B"],
    level: Int[Array, ""] | int,
    *,
    num_heads: int,
    theta: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H*dh"], Float[Array, "B S K dh"], Float[Array, "B S K dh"]]:
    """The attention of the T nodes that lie ``level`` edges below the root, and the draft keys and values with theirs.

    With q, k, v the columns of ``qkv`` rounded to the dtype of the ring, p = length - 1 + level the position of the
    level, and R_p the rotation of a head by p theta^(-i / (dh / 2)) in its two halves (arXiv 2104.09864), in fp32:

        k_t    = R_p k_t, rounded to that dtype: row (level - 1) T + t of the draft keys, as v_t of the draft values
        w_ts   = softmax over s of R_p q_t . k_s / sqrt(dh)      s: t itself, and what it sees of ring and drafts
        o_t    = sum_s w_ts v_s                                  w rounded to that dtype, fp32 sums

    A node sees its ancestors and the whole ring, but for slots that hold nothing and positions up to p - W. Query head
    j uses key head j // (H / K).

    Args:
        qkv: fp32 or bf16, columns q | k | v, of each the heads in order; T is 1 to 8, the same for every level.
        ring_key, ring_value: fp32 or bf16. Slot s holds position (length - 1) - (length - 1 - s) mod W, keys rotated;
            nothing if that is negative.
        draft_key, draft_value: slot s is that of node s mod T of level s // T + 1. Updated in place if donated.
        ancestors: the slots of each node's proper ancestors; slots from (level - 1) T on are not looked at.
        length: int32, tokens of the committed text, the root included; 1 or more.
        level: int32, 1 or more; level T is at most S.
        num_heads: H, a multiple of K.
        theta: base of the rotary frequencies.
        implementation: "triton" (dh of 64 or 128, W a multiple of 64, at most 64 queries a key head), "reference", or
            None for the reference: the kernel has not been timed yet.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation cannot run.
    """
    check_rank("qkv", qkv, "B T (H+2K)dh")
    check_rank("ring_key", ring_key, "B W K dh")
    check_rank("draft_key", draft_key, "B S K dh")
    rows, nodes, _ = qkv.shape
    window, key_heads, size = ring_key.shape[1:]
    slots = draft_key.shape[1]
    if not 1 <= nodes <= MAX_LEVEL_NODES:
        raise ValueError(f"qkv must hold 1 to {MAX_LEVEL_NODES} nodes a row, got {nodes}")
    if window < 1:
        raise ValueError("ring_key must have 1 slot or more, got 0")
    if size < 2 or size % 2:
        raise ValueError(f"ring_key must have heads of even size, got {size}")
    if num_heads < 1 or key_heads < 1 or num_heads % key_heads:
        raise ValueError(f"num_heads must be a multiple of ring_key's {key_heads} heads, got {num_heads}")
    if not theta > 0:
        raise ValueError(f"theta must be positive, got {theta}")
    check_shape("qkv", qkv, "B T (H+2K)dh", (rows, nodes, (num_heads + 2 * key_heads) * size))
    for name, array in (("ring_key", ring_key), ("ring_value", ring_value)):
        check_shape(name, array, "B W K dh", (rows, window, key_heads, size))
    for name, array in (("draft_key", draft_key), ("draft_value", draft_value)):
        check_shape(name, array, "B S K dh", (rows, slots, key_heads, size))
    check_shape("ancestors", ancestors, "B T S", (rows, nodes, slots))
    check_rows("length", length, rows)
    if isinstance(level, int):
        if not 1 <= level <= slots // nodes:
            raise ValueError(f"level must be 1 to {slots // nodes}, as draft_key has {slots} slots, got {level}")
        level = jnp.int32(level)
    check_shape("level", level, "", ())
    check_int32("level", level)
    for name, array in (("qkv", qkv), ("ring_key", ring_key)):
        if array.dtype not in _DTYPES:
            raise ValueError(f"{name} must be bfloat16 or float32, got {array.dtype}")
    for name, array in (("ring_value", ring_value), ("draft_key", draft_key), ("draft_value", draft_value)):
        if array.dtype != ring_key.dtype:
            raise ValueError(f"{name} must have the dtype of ring_key, {ring_key.dtype}, got {array.dtype}")
    if ancestors.dtype != jnp.bool_:
        raise ValueError(f"ancestors must be bool, got {ancestors.dtype}")
    run = choose(
        *("draft_attention", implementation),
        {"reference": reference.draft_attention, "triton": triton.draft_attention},
        {"triton": triton.why_not(size, window, nodes * num_heads // key_heads)},
    )
    arrays = qkv, ring_key, ring_value, draft_key, draft_value, ancestors, length, level
    return run(*arrays, num_heads=num_heads, theta=float(theta))
