"""The converted folder: an Orbax checkpoint ``params``, ``config.json`` and the tokenizer files.

``config.json`` holds fla's keys and an object ``specla`` with the format version, the dtype, the state layout and the
size of each file of ``params``, so that an incomplete copy is found before Orbax starts.
The checkpoint is written and read a layer at a time, so neither direction holds the model in memory.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from specla_jax.checkpoint import layout
from specla_jax.checkpoint.folders import CONFIG, PARAMS, read_json, write_json
from specla_jax.config import TargetConfig
from specla_jax.errors import UserError

FORMAT_VERSION = 1
# Named in the file because fla has changed its own: key-first until 0.5.0, value-first since.
STATE_LAYOUT = ["layer", "row", "value head", "key dim", "value dim"]


def _top(item: tuple[str, Any]) -> str:
    return item[0].split("/")[0]


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(file for file in (folder / PARAMS).rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


def write_store(folder: Path, config: TargetConfig, leaves: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes the leaves and ``config.json`` into an existing folder."""
    context = ocp.Context()
    context.array.saving.use_compression = False  # weights hardly shrink, and zstd costs more time than it saves
    context.memory.deepcopy_host_arrays = False  # nobody changes them while they are written
    path, dtype = str(folder / PARAMS), "float32"
    with context:
        for _, group in groupby(leaves, key=_top):
            part = dict(group)
            tree: Any = layout.unflatten(part.items())
            if "embeddings/embedding" in part:
                dtype = part["embeddings/embedding"].dtype.name
            ocp.partial.save(path, tree)
        ocp.partial.finalize(path)
    specla = {"format_version": FORMAT_VERSION, "dtype": dtype, "state_layout": STATE_LAYOUT, "files": _sizes(folder)}
    write_json(folder / CONFIG, {**config.to_fla(dtype), "specla": specla})


def read_leaves(folder: Path, config: TargetConfig, *, dtype: str | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Path and array of every leaf, one at a time in the order of the table.

    Raises:
      UserError: another format version, a damaged checkpoint, or leaves that do not fit ``config.json``.
    """
    specla = read_json(folder / CONFIG).get("specla")
    specla = specla if isinstance(specla, dict) else {}
    if (version := specla.get("format_version")) != FORMAT_VERSION:
        raise UserError(f"{folder / CONFIG}: specla.format_version must be {FORMAT_VERSION}, got {version!r}")
    files, sizes = specla.get("files"), _sizes(folder)
    for name, size in files.items() if isinstance(files, dict) else ():
        if sizes.get(name) != size:
            found = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise UserError(f"{folder / name} {found}, must have {size}; copy or convert the model again")
    shapes = layout.parameter_shapes(config)
    checkpoint = str((folder / PARAMS).absolute())
    try:
        tree: Any = ocp.metadata(checkpoint).metadata
        metadata = layout.flatten(tree)
        _check(folder, {path: tuple(leaf.shape) for path, leaf in metadata.items()}, shapes)
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        for _, group in groupby(shapes.items(), key=_top):
            # Abstract leaves on the host: Orbax gives numpy arrays back and touches no accelerator.
            wanted = {path: np.empty(shape, metadata[path].dtype) for path, shape in group}
            abstract: Any = layout.unflatten(wanted.items())
            with context:
                loaded: Any = ocp.load(checkpoint, abstract)
            part = layout.flatten(loaded)
            for path in wanted:
                yield path, layout.cast_leaf(path, part[path], dtype)
    except UserError:
        raise
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"cannot read {folder / PARAMS}, convert the model again: {reason}") from error


def _check(folder: Path, got: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> None:
    problems = {
        "missing": [path for path in shapes if path not in got],
        "unexpected": sorted(path for path in got if path not in shapes),
        "wrong shape": [
            f"{path} is {list(got[path])}, must be {list(shape)}"
            for path, shape in shapes.items()
            if path in got and got[path] != shape
        ],
    }
    if any(problems.values()):
        raise UserError(f"{folder / PARAMS} does not fit {CONFIG}: {layout.describe(problems)}")
