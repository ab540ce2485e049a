"""Tensors of a checkpoint folder, whatever the files: safetensors or torch pickles, one or many.

Nothing is read until asked for, except that a torch file is loaded whole. Safetensors files are read with ``pread``:
a memory map would count every page ever touched as memory in use.
"""

import importlib
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specla_jax.checkpoint.folders import WEIGHT_FILES, read_json, write_json
from specla_jax.errors import UserError

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor still on disk. ``dtype`` is the safetensors code, e.g. ``BF16``."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@contextmanager
def open_tensors(folder: Path) -> Generator[dict[str, StoredTensor]]:
    """Every tensor of an fla folder by name.

    Raises:
      UserError: a file that is missing or cannot be read, named.
    """
    with ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(folder):
            tensors |= _torch_tensors(file) if file.suffix == ".bin" else _safetensors(file, stack)
        yield tensors


def _weight_files(folder: Path) -> list[Path]:
    chosen = next(name for name in WEIGHT_FILES if (folder / name).is_file())
    if not chosen.endswith(".index.json"):
        return [folder / chosen]
    index = folder / chosen
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map; an index maps each tensor to its file")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise UserError(f"{index} names {name!r}, which is not a weight file of this folder")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{index} names files that are not there: {', '.join(absent)}")
    return [folder / name for name in names]


def _safetensors(file: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    try:
        handle = stack.enter_context(safe_open(file, framework="np", backend="pread"))
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {file} as safetensors: {error}{_pointer_hint(file)}") from None

    def reader(name: str) -> Callable[[], np.ndarray]:
        return lambda: handle.get_tensor(name)

    return {
        name: StoredTensor(tuple(part.get_shape()), part.get_dtype(), reader(name)) for name, part in slices.items()
    }


def _pointer_hint(file: Path) -> str:
    with file.open("rb") as stream:
        is_pointer = stream.read(40).startswith(b"version https://git-lfs")
    return "; it is a Git LFS pointer, fetch the file itself (git lfs pull)" if is_pointer else ""


def _torch_tensors(file: Path) -> dict[str, StoredTensor]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise UserError(f"{file} needs torch to read; run: pip install 'specla-jax[torch]'") from None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what the file makes it raise
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"cannot load {file} with weights_only=True: {reason}{_pointer_hint(file)}") from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{file} must hold a dictionary of tensors, as state_dict() gives")
    codes = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

    def reader(tensor: Any) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            dense = tensor.detach().contiguous()
            if dense.dtype == torch.bfloat16:  # numpy has no bfloat16: pass the bits
                return dense.view(torch.int16).numpy().view(jnp.dtype("bfloat16"))
            return dense.numpy()

        return read

    return {
        str(name): StoredTensor(tuple(tensor.shape), codes.get(tensor.dtype, str(tensor.dtype)), reader(tensor))
        for name, tensor in state.items()
    }


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes ``model.safetensors``, or shards of at most ``max_shard_bytes`` and their index, holding one at a time."""
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    size = total = 0

    def flush() -> None:
        file = folder / f"shard-{len(shards)}"
        save_file(pending, file, metadata={"format": "pt"})
        file.chmod(folder.stat().st_mode & 0o666)  # save_file leaves it readable by its owner alone
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        pending[name] = np.ascontiguousarray(tensor)  # save_file trusts the memory order
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
