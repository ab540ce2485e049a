"""Folders in the format of flash-linear-attention: checked and read leaf by leaf, and written back.

Generations read: split ``mlp.gate_proj`` and ``up_proj``, or the older single ``gate_proj`` with the gate in its first
half; the ``attn.D`` that files of early 2025 still carry.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specla_jax.checkpoint import layout
from specla_jax.checkpoint.folders import CONFIG, copy_files, new_folder, write_json
from specla_jax.checkpoint.layout import Piece
from specla_jax.checkpoint.tensor_files import MAX_SHARD_BYTES, StoredTensor, open_tensors, write_tensors
from specla_jax.config import Dtype, TargetConfig
from specla_jax.errors import UserError

_LEGACY_D = re.compile(r"model\.layers\.\d+\.attn\.D")
_DTYPES = ("F32", "BF16", "F16")
_EMBEDDING, _HEAD = "model.embeddings.weight", "lm_head.weight"


def read_leaves(
    folder: Path, config: TargetConfig, *, dtype: str | None = None, report: Callable[[str], object] = print
) -> Iterator[tuple[str, np.ndarray]]:
    """Path and array of every leaf of the parameter tree, one at a time in the order of the table.

    Raises:
      UserError: missing, unexpected, misshaped or non-finite tensors, all in one line. Non-finite values are known
        only at the end, so what came before must be thrown away when this raises.
    """
    with open_tensors(folder) as tensors:
        table = _table(tensors, config)
        problems = _header_problems(tensors, table, config)
        broken: list[str] = []
        sound = not any(problems.values())
        if sound:
            for note in _notes(tensors, table, config):
                report(f"note: {folder}: {note}")
        for path, pieces in table.items():
            arrays = [tensors[piece.key].read() for piece in pieces if _readable(tensors, piece.key)]
            names = [piece.key for piece in pieces if _readable(tensors, piece.key)]
            broken += [name for name, array in zip(names, arrays, strict=True) if not np.isfinite(array).all()]
            if sound and not broken:
                yield path, layout.cast_leaf(path, layout.join_pieces(arrays, pieces), dtype)
        problems["not finite (NaN or infinity)"] = broken
        if any(problems.values()):
            raise UserError(f"{folder} does not fit its {CONFIG}: {layout.describe(problems)}")


def _readable(tensors: Mapping[str, StoredTensor], key: str) -> bool:
    return key in tensors and tensors[key].dtype in _DTYPES


def _table(tensors: Mapping[str, StoredTensor], config: TargetConfig) -> dict[str, tuple[Piece, ...]]:
    """The table of pieces, with the single gate_proj of old files where there is one."""
    table = layout.parameter_pieces(config)
    for path, pieces in table.items():
        if path.endswith("gate_up_proj/kernel"):
            gate, up = pieces
            fused = Piece(gate.key, (2 * gate.shape[0], gate.shape[1]), "linear")
            if up.key not in tensors and gate.key in tensors and tensors[gate.key].shape == fused.shape:
                table[path] = (fused,)  # gate rows come first, as in our own columns
    return table


def _header_problems(
    tensors: Mapping[str, StoredTensor], table: Mapping[str, Sequence[Piece]], config: TargetConfig
) -> dict[str, list[str]]:
    wanted = {piece.key: piece.shape for pieces in table.values() for piece in pieces}
    if config.tie_word_embeddings and _HEAD in tensors:
        wanted[_HEAD] = wanted[_EMBEDDING]
    unexpected = [name for name in tensors if name not in wanted and not _LEGACY_D.fullmatch(name)]
    shapes = [
        f"{name} is {list(tensors[name].shape)}, must be {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    dtypes = [
        f"{name} is {tensors[name].dtype}, must be {', '.join(_DTYPES)}"
        for name in wanted
        if name in tensors and tensors[name].dtype not in _DTYPES
    ]
    problems = {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": sorted(unexpected),
        "wrong shape": shapes,
        "wrong dtype": dtypes,
    }
    if config.tie_word_embeddings and _readable(tensors, _HEAD) and _readable(tensors, _EMBEDDING):
        same_shape = tensors[_HEAD].shape == tensors[_EMBEDDING].shape
        if same_shape and not np.array_equal(tensors[_HEAD].read(), tensors[_EMBEDDING].read()):
            problems["tie_word_embeddings is true but these differ"] = [_HEAD, _EMBEDDING]
    return problems


def _notes(
    tensors: Mapping[str, StoredTensor], table: Mapping[str, Sequence[Piece]], config: TargetConfig
) -> Iterator[str]:
    legacy = [name for name in tensors if _LEGACY_D.fullmatch(name)]
    if legacy:
        zero = all(not tensors[name].read().any() for name in legacy)
        values = "all zero" if zero else "not all zero"
        yield f"dropped {len(legacy)} legacy tensors attn.D ({values}; the model never reads them)"
    fused = sum(path.endswith("gate_up_proj/kernel") and len(pieces) == 1 for path, pieces in table.items())
    if fused:
        yield f"read {fused} fused mlp.gate_proj, gate rows first"
    if config.tie_word_embeddings and _HEAD in tensors:
        yield f"dropped {_HEAD}, equal to the tied embedding"


def write_leaves(
    folder: Path,
    config: TargetConfig,
    leaves: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the leaves as fla weights and ``config.json`` into an existing folder."""
    table = layout.parameter_pieces(config)
    stored = "float32"

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal stored
        for path, leaf in leaves:
            leaf = layout.cast_leaf(path, leaf, dtype)
            if path == "embeddings/embedding":
                stored = leaf.dtype.name
            yield from layout.split_leaf(leaf, table[path]).items()

    write_tensors(folder, tensors(), max_shard_bytes=max_shard_bytes)
    write_json(folder / CONFIG, config.to_fla(stored))


def write_fla(
    params: Mapping[str, Any],
    config: TargetConfig,
    dst: str | Path,
    *,
    dtype: Dtype | None = None,
    tokenizer_files: Iterable[Path] = (),
    overwrite: bool = False,
) -> None:
    """Writes an fla folder from a parameter tree, in one step: it is whole or not there.

    Args:
      params: nested dictionary of arrays, as :func:`parameter_shapes` lists them.
      config: the model's shape.
      dst: the folder to make; its parents are made too.
      dtype: "float32" or "bfloat16"; None keeps each array's own. ``A_log`` and ``dt_bias`` stay float32.
      tokenizer_files: files to copy beside the weights.
      overwrite: replace an existing model folder.

    Raises:
      UserError: ``dst`` is taken or cannot be written.
      ValueError: ``params`` is not the tree of ``config``.
    """
    layout.check_dtype(dtype)
    flat = layout.flatten(params)
    shapes = layout.parameter_shapes(config)
    if (got := {path: tuple(leaf.shape) for path, leaf in flat.items()}) != shapes:
        wrong = sorted(path for path in got.keys() | shapes.keys() if got.get(path) != shapes.get(path))
        raise ValueError(f"params must have the leaves and shapes of the config; these differ: {', '.join(wrong)}")
    with new_folder(Path(dst), overwrite=overwrite) as work:
        write_leaves(work, config, ((path, np.asarray(flat[path])) for path in shapes), dtype=dtype)
        copy_files(tokenizer_files, work)
