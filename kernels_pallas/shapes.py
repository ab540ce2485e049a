"""Checks of shapes and dtypes at the door of an op. Every message names the argument and what would be right."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

MAX_NODES = 64


def padded_nodes(nodes: int) -> int:
    """The nodes a kernel computes: the next of 16, 32, 64, since no side of a tensor-core product may be under 16."""
    return max(16, 1 << (nodes - 1).bit_length())


def check_shape(name: str, array: jax.Array, letters: str, shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless ``array`` has ``shape``, which ``letters`` (as "B N H dk") spell."""
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{name} must be [{letters.replace(' ', ', ')}] = {list(shape)}, got {list(array.shape)}")


def check_rank(name: str, array: jax.Array, letters: str) -> None:
    """Raise ``ValueError`` unless ``array`` has as many axes as ``letters`` (as "B N H dk")."""
    if array.ndim != len(letters.split()):
        raise ValueError(f"{name} must be [{letters.replace(' ', ', ')}], got {list(array.shape)}")


def check_int32(name: str, array: jax.Array) -> None:
    """Raise ``ValueError`` unless ``array`` holds int32."""
    if array.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, got {array.dtype}")


def check_float32(name: str, array: jax.Array) -> None:
    """Raise ``ValueError`` unless ``array`` holds fp32: states and gates lose too much in a narrower type."""
    if array.dtype != jnp.float32:
        raise ValueError(f"{name} must be float32, got {array.dtype}")


def check_tree(parents: jax.Array, num_nodes: jax.Array | None) -> None:
    """Check ``parents`` [B, N] with N of 1 to 64, and ``num_nodes`` [B] if there is one."""
    check_rank("parents", parents, "B N")
    check_int32("parents", parents)
    if not 1 <= parents.shape[1] <= MAX_NODES:
        raise ValueError(f"parents must hold 1 to {MAX_NODES} nodes a row, got {parents.shape[1]}")
    check_rows("num_nodes", num_nodes, parents.shape[0])


def check_rows(name: str, array: jax.Array | None, rows: int) -> None:
    """Check an optional int32 array with one number a row."""
    if array is not None:
        check_shape(name, array, "B", (rows,))
        check_int32(name, array)


def check_gdn_inputs(
    token_letter: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> None:
    """Check the inputs that verification and prefill share; ``token_letter`` is the name of the token axis."""
    t = token_letter
    check_rank("q", q, f"B {t} H dk")
    check_rank("v", v, f"B {t} HV dv")
    rows, tokens, heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    if tokens < 1:
        raise ValueError(f"q must hold at least one token, got {list(q.shape)}")
    if heads < 1 or value_heads % heads:
        raise ValueError(f"v must have a multiple of q's {heads} heads, got {value_heads}")
    check_shape("k", k, f"B {t} H dk", q.shape)
    check_shape("v", v, f"B {t} HV dv", (rows, tokens, value_heads, dv))
    check_shape("log_decay", log_decay, f"B {t} HV", (rows, tokens, value_heads))
    check_shape("beta", beta, f"B {t} HV", (rows, tokens, value_heads))
    check_shape("state", state, "B HV dk dv", (rows, value_heads, dk, dv))
    for name, array in (("log_decay", log_decay), ("beta", beta), ("state", state)):
        check_float32(name, array)
    if q.dtype != k.dtype:
        raise ValueError(f"k must have the dtype of q, {q.dtype}, got {k.dtype}")
