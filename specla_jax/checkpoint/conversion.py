"""Convert, export and load: each joins one reader of leaves to one writer."""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import jax
import numpy as np

from specla_jax.checkpoint import fla_folder, layout, store
from specla_jax.checkpoint.folders import (
    copy_files,
    folder_kind,
    new_folder,
    read_config,
    tokenizer_files,
    vocabulary_hash,
)
from specla_jax.config import Dtype, TargetConfig
from specla_jax.errors import UserError
from specla_jax.target import Target
from specla_jax.versions import check_jax

Report = Callable[[str], object]


def convert(
    src: str | Path, dst: str | Path, *, dtype: Dtype | None = None, overwrite: bool = False, report: Report = print
) -> None:
    """Converts an fla folder to an Orbax checkpoint with ``config.json`` and the tokenizer files.

    Works on the host with numpy arrays, a layer at a time. ``dst`` is whole or not there.

    Args:
      src: folder of flash-linear-attention: safetensors or ``pytorch_model.bin``, one file or shards with an index.
      dst: the folder to make; its parents are made too.
      dtype: "float32" or "bfloat16"; None keeps the dtype of each tensor. ``A_log`` and ``dt_bias`` become float32.
      overwrite: replace an existing model folder.
      report: called with each line meant for the user.

    Raises:
      UserError: ``src`` is no fla folder or does not fit its config, or ``dst`` is taken.
    """
    layout.check_dtype(dtype)
    src, dst = Path(src), Path(dst)
    if folder_kind(src) == "converted":
        raise UserError(f"{src} is converted already; decode from it as it is, or turn it back with: specla export")
    config = read_config(src)
    with new_folder(dst, overwrite=overwrite, source=src) as work:
        store.write_store(work, config, fla_folder.read_leaves(src, config, dtype=dtype, report=report))
        copy_files(tokenizer_files(src), work)
    report(f"converted {src} to {dst}: {_count(config):,} parameters")


def export(
    src: str | Path, dst: str | Path, *, overwrite: bool = False, dtype: Dtype | None = None, report: Report = print
) -> None:
    """Writes an fla folder (safetensors, ``config.json``, tokenizer files) from a converted one, or from another.

    Raises:
      UserError: ``src`` is no model folder or is damaged, or ``dst`` is taken.
    """
    layout.check_dtype(dtype)
    src, dst = Path(src), Path(dst)
    folder_kind(src)
    config = read_config(src)
    with new_folder(dst, overwrite=overwrite, source=src) as work:
        fla_folder.write_leaves(work, config, _read(src, config, None, report), dtype=dtype)
        copy_files(tokenizer_files(src), work)
    report(f"exported {src} to {dst}: {_count(config):,} parameters")


def load_target(path: str | Path, dtype: Dtype = "float32") -> Target:
    """Loads a converted folder, or an fla folder as it is, onto the default device.

    Each leaf is cast on the host and moved before the next is read.

    Raises:
      UserError: no such folder, a folder of neither kind, one whose weights do not fit its config, or a version of
        JAX that is not supported.
    """
    check_jax()
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype must be 'float32' or 'bfloat16', got {dtype!r}")
    path = Path(path)
    folder_kind(path)
    config = read_config(path)
    leaves = _read(path, config, dtype, lambda line: None)
    params = layout.unflatten((name, jax.device_put(leaf)) for name, leaf in leaves)
    digest = vocabulary_hash(path)
    return Target(
        config=config,
        params=params,
        dtype=dtype,
        path=path,
        tokenizer_path=None if digest is None else path,
        vocabulary_hash=digest,
    )


def _read(path: Path, config: TargetConfig, dtype: Dtype | None, report: Report) -> Iterator[tuple[str, np.ndarray]]:
    if folder_kind(path) == "converted":
        return store.read_leaves(path, config, dtype=dtype)
    return fla_folder.read_leaves(path, config, dtype=dtype, report=report)


def _count(config: TargetConfig) -> int:
    return sum(prod(shape) for shape in layout.parameter_shapes(config).values())
