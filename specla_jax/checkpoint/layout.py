"""The one table of the parameter tree, and how flash-linear-attention (fla) names and turns the same tensors.

A path such as ``layers_0/attn/in_proj/kernel`` names a leaf of the tree. Each leaf is made of one or more fla tensors
laid side by side along its last axis.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from specla_jax.config import TargetConfig
from specla_jax.errors import UserError

# The gate is computed in float32, and rounding its parameters moves every decay: these leaves never change dtype.
FLOAT32_LEAVES = ("A_log", "dt_bias")


@dataclass(frozen=True)
class Piece:
    """One fla tensor. ``linear`` is stored [out, in] and used [in, out]; ``conv`` [C, 1, W] is used [W, C]."""

    key: str
    shape: tuple[int, ...]
    kind: Literal["plain", "linear", "conv"] = "plain"

    @property
    def our_shape(self) -> tuple[int, ...]:
        return self.shape if self.kind == "plain" else (self.shape[-1], self.shape[0])


def parameter_pieces(config: TargetConfig) -> dict[str, tuple[Piece, ...]]:
    """Every leaf of the parameter tree with the fla tensors that make it, in order."""
    D, inner = config.hidden_size, config.intermediate_size
    key_dim, value_dim, HV = config.key_dim, config.value_dim, config.num_v_heads

    def vector(path: str, key: str, size: int) -> None:
        table[path] = (Piece(key, (size,)),)

    def linear(path: str, rows: Mapping[str, int], columns: int) -> None:
        table[path] = tuple(Piece(f"{key}.weight", (out, columns), "linear") for key, out in rows.items())

    table: dict[str, tuple[Piece, ...]] = {
        "embeddings/embedding": (Piece("model.embeddings.weight", (config.vocab_size, D)),)
    }
    for layer in range(config.num_hidden_layers):
        ours, fla = f"layers_{layer}", f"model.layers.{layer}"
        heads = {f"{fla}.attn.q": key_dim, f"{fla}.attn.k": key_dim, f"{fla}.attn.v": value_dim}
        projections = {f"{name}_proj": size for name, size in heads.items()}
        if config.use_gate:
            projections[f"{fla}.attn.g_proj"] = value_dim
        projections |= {f"{fla}.attn.a_proj": HV, f"{fla}.attn.b_proj": HV}

        vector(f"{ours}/attn_norm/scale", f"{fla}.attn_norm.weight", D)
        linear(f"{ours}/attn/in_proj/kernel", projections, D)
        if config.use_short_conv:
            table[f"{ours}/attn/conv/kernel"] = tuple(
                Piece(f"{name}_conv1d.weight", (size, 1, config.conv_size), "conv") for name, size in heads.items()
            )
        vector(f"{ours}/attn/A_log", f"{fla}.attn.A_log", HV)
        vector(f"{ours}/attn/dt_bias", f"{fla}.attn.dt_bias", HV)
        vector(f"{ours}/attn/o_norm/scale", f"{fla}.attn.o_norm.weight", config.head_v_dim)
        linear(f"{ours}/attn/o_proj/kernel", {f"{fla}.attn.o_proj": D}, value_dim)
        vector(f"{ours}/mlp_norm/scale", f"{fla}.mlp_norm.weight", D)
        gate_up = {f"{fla}.mlp.gate_proj": inner, f"{fla}.mlp.up_proj": inner}
        linear(f"{ours}/mlp/gate_up_proj/kernel", gate_up, D)
        linear(f"{ours}/mlp/down_proj/kernel", {f"{fla}.mlp.down_proj": D}, inner)
    vector("norm/scale", "model.norm.weight", D)
    if not config.tie_word_embeddings:
        linear("lm_head/kernel", {"lm_head": config.vocab_size}, D)
    return table


def parameter_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Path to shape for every leaf of the parameter tree, e.g. ``{"embeddings/embedding": (V, D), ...}``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, pieces in parameter_pieces(config).items():
        width = sum(piece.our_shape[-1] for piece in pieces)
        shapes[path] = (*pieces[0].our_shape[:-1], width)
    return shapes


def join_pieces(arrays: Sequence[np.ndarray], pieces: Sequence[Piece]) -> np.ndarray:
    """Joins fla tensors to one leaf of the tree, C-contiguous."""
    width = sum(piece.our_shape[-1] for piece in pieces)
    # Filled in place: concatenating transposed views would give Fortran order, and a second copy later.
    out = np.empty((*pieces[0].our_shape[:-1], width), np.result_type(*(array.dtype for array in arrays)))
    start = 0
    for array, piece in zip(arrays, pieces, strict=True):
        stop = start + piece.our_shape[-1]
        out[..., start:stop] = array if piece.kind == "plain" else array.reshape(array.shape[0], -1).T
        start = stop
    return out


def split_leaf(leaf: np.ndarray, pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
    """Splits one leaf of the tree into its fla tensors, C-contiguous: the inverse of :func:`join_pieces`."""
    tensors, start = {}, 0
    for piece in pieces:
        stop = start + piece.our_shape[-1]
        part = leaf[..., start:stop]
        tensors[piece.key] = np.ascontiguousarray(part if piece.kind == "plain" else part.T).reshape(piece.shape)
        start = stop
    return tensors


def cast_leaf(path: str, leaf: np.ndarray, dtype: str | None) -> np.ndarray:
    """``leaf`` in ``dtype`` (None keeps its own); the gate parameters in float32 whatever is asked."""
    if path.endswith(FLOAT32_LEAVES):
        dtype = "float32"
    return leaf if dtype is None else leaf.astype(jnp.dtype(dtype), copy=False)


def check_dtype(dtype: str | None) -> None:
    """Raises UserError unless ``dtype`` is one that parameters are kept in, or None."""
    if dtype not in (None, "float32", "bfloat16"):
        raise UserError(f"dtype must be 'float32' or 'bfloat16', got {dtype!r}")


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionary to ``{path: leaf}``."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def unflatten(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Pairs of path and leaf to a nested dictionary."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def describe(problems: Mapping[str, Sequence[str]], most: int = 8) -> str:
    """``missing: a, b; wrong shape: c is [1], must be [2]`` with at most ``most`` names of each sort."""
    parts = []
    for sort, names in problems.items():
        if names:
            more = f" and {len(names) - most} more" if len(names) > most else ""
            parts.append(f"{sort}: {', '.join(names[:most])}{more}")
    return "; ".join(parts)
