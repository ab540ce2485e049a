"""Model folders: what kind one is, its config.json, its tokenizer, and how a new one comes to be in one step."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from specla_jax.config import TargetConfig
from specla_jax.errors import UserError

CONFIG = "config.json"
PARAMS = "params"  # the Orbax checkpoint of a converted folder
# Safetensors first: a folder that holds both is read without torch.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model")
TOKENIZER_FILES = (*VOCABULARY_FILES, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; UserError names the file when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes an indented JSON object."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def folder_kind(path: Path) -> Literal["fla", "converted"]:
    """Decides from the files that are there, not from what config.json says of itself.

    Raises:
      UserError: no such folder, no config.json, or no weights of either kind.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; name a converted folder or an fla checkpoint folder")
    if not path.is_dir():
        raise UserError(f"{path} is a file; name the folder that holds {CONFIG} and the weights")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} has no {CONFIG}; name a converted folder or an fla checkpoint folder")
    if (path / PARAMS).is_dir():
        return "converted"
    if any((path / name).is_file() for name in WEIGHT_FILES):
        return "fla"
    raise UserError(
        f"{path} has no weights; expected {WEIGHT_FILES[1]}, {WEIGHT_FILES[0]}, {WEIGHT_FILES[3]} or a folder {PARAMS}"
    )


def read_config(path: Path) -> TargetConfig:
    """The configuration of a model folder of either kind; UserError names its file."""
    raw = read_json(path / CONFIG)
    try:
        return TargetConfig.from_fla(raw)
    except UserError as error:
        raise UserError(f"{path / CONFIG}: {error}") from None


def tokenizer_files(path: Path) -> list[Path]:
    """The tokenizer files of a model folder, to travel with the model."""
    return [path / name for name in TOKENIZER_FILES if (path / name).is_file()]


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copies files into a folder under their own names."""
    for file in files:
        shutil.copyfile(file, folder / file.name)


def vocabulary_hash(path: Path) -> str | None:
    """SHA-256 of the file that decides the vocabulary, or None without one."""
    for name in VOCABULARY_FILES:
        if (path / name).is_file():
            return hashlib.sha256((path / name).read_bytes()).hexdigest()
    return None


@contextmanager
def new_folder(dst: Path, *, overwrite: bool, source: Path | None = None) -> Generator[Path]:
    """Yields an empty folder beside ``dst`` that takes its name when the block ends well, and goes when it does not.

    With ``overwrite`` the old ``dst`` is moved aside first and removed last, so that one of the two is always whole.

    Raises:
      UserError: ``dst`` is taken, cannot be written, or overlaps ``source``.
    """
    name, dst = dst, Path(os.path.realpath(dst))
    _check_free(name, dst, overwrite, None if source is None else Path(os.path.realpath(source)))
    token = uuid.uuid4().hex[:8]
    work = dst.parent / f".{dst.name}.{token}.partial"
    made = [parent for parent in dst.parents if not parent.exists()]
    try:
        work.mkdir(parents=True)
        yield work
        _swap(work, dst, dst.parent / f".{dst.name}.{token}.old")
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"cannot write {name}: {error.strerror or error}") from error
        raise


def _check_free(name: Path, dst: Path, overwrite: bool, source: Path | None) -> None:
    if source is not None and (dst == source or dst in source.parents or source in dst.parents):
        raise UserError(f"{name} must be outside the source folder, and not hold it; name another destination")
    if dst.is_dir():
        if not any(dst.iterdir()):
            return
        if not overwrite:
            raise UserError(f"{name} exists and is not empty; name another folder, or pass --overwrite to replace it")
        if not (dst / CONFIG).is_file():
            raise UserError(f"{name} is not a model folder (no {CONFIG}), so it is not replaced; name another folder")
    elif dst.exists():
        raise UserError(f"{name} is a file; name a folder")


def _swap(work: Path, dst: Path, old: Path) -> None:
    if not (dst.is_dir() and any(dst.iterdir())):
        work.rename(dst)  # an empty folder is replaced
        return
    dst.rename(old)
    try:
        work.rename(dst)
    except OSError:
        old.rename(dst)
        raise
    shutil.rmtree(old, ignore_errors=True)
