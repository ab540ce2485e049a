"""Documents as tokens: reading, the held-out split, and the folder that keeps them.

A text becomes the ids of the target's tokenizer, with the BOS token that the tokenizer adds in front and the target's
EOS token behind. A conversation becomes what ``chat.py`` says. A ``.npy`` file holds token ids already: of two axes, a
row is a document; of one, documents end behind each EOS token.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from numpy import ndarray

from specla_jax.chat_template import load_chat_template
from specla_jax.errors import UserError
from specla_jax.target import Target
from specla_jax.text import Tokenizer, load_tokenizer
from train_drafter.chat import conversation, parse_messages
from train_drafter.data import digest, read_documents, text_of, within_share

_MANIFEST = "documents.json"
_PARTS = ("tokens", "learned", "starts")


@dataclass(frozen=True)
class Documents:
    """Token documents, one behind another.

    Attributes:
      tokens: [n] int32.
      learned: [n] bool. Whether the prediction of the token counts.
      starts: [documents + 1] int64. Document i is ``tokens[starts[i] : starts[i + 1]]``.
    """

    tokens: Int[ndarray, " n"]
    learned: Bool[ndarray, " n"]
    starts: Int[ndarray, " documents+1"]

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int] | ndarray, Sequence[bool] | ndarray]]) -> "Documents":
        """From (tokens, learned) of each document."""
        pairs = list(pairs)
        tokens = [np.asarray(ids, np.int32) for ids, _ in pairs]
        learned = [np.asarray(mask, bool) for _, mask in pairs]
        starts = np.cumsum([0, *(len(ids) for ids in tokens)])
        return cls(
            np.concatenate([np.empty(0, np.int32), *tokens]),
            np.concatenate([np.empty(0, bool), *learned]),
            starts.astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __iter__(self) -> Iterator[tuple[Int[ndarray, " m"], Bool[ndarray, " m"]]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> tuple[Int[ndarray, " m"], Bool[ndarray, " m"]]:
        span = slice(self.starts[index], self.starts[index + 1])
        return self.tokens[span], self.learned[span]

    def save(self, folder: Path, name: str) -> None:
        for part in _PARTS:
            np.save(folder / f"{name}-{part}.npy", getattr(self, part))

    @classmethod
    def load(cls, folder: Path, name: str) -> "Documents":
        """Memory-mapped, from where :meth:`save` put them."""
        return cls(*(np.load(folder / f"{name}-{part}.npy", mmap_mode="r") for part in _PARTS))


@dataclass(frozen=True)
class DrafterData:
    """Documents to train on and held-out ones.

    Attributes:
      fingerprint: of the documents and of what made tokens of them.
      notes: lines on what was left out.
    """

    train: Documents
    held_out: Documents
    fingerprint: str
    notes: tuple[str, ...] = ()


def prepare(
    paths: Sequence[Path],
    folder: Path,
    target: Target,
    *,
    held_out_paths: Sequence[Path] = (),
    fraction: float = 0.02,
) -> DrafterData:
    """Reads, splits and tokenises into ``folder``; an existing folder made from the same is kept.

    Args:
      paths: ``.txt``, ``.md``, ``.py``, ``.jsonl`` (``text``, ``messages``, or ``question`` and ``answer``) and
        ``.npy`` files, or folders of them. Documents that occur again are dropped.
      folder: written beside and renamed.
      target: its tokenizer makes the tokens; its configuration knows EOS.
      held_out_paths: sources that are held out whole.
      fraction: share of the documents of ``paths`` held out, chosen by a hash of the document.

    Raises:
      UserError: a source cannot be read, text without a tokenizer, nothing is left on one side, or ``folder`` was made
        from other data.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"--held-out-fraction must be at least 0 and below 1, got {fraction}")
    reader = _Reader.of(target)
    held_out = [item for path in held_out_paths for item in reader.read(path)]
    seen = {item.key for item in held_out}
    train: list[_Item] = []
    for item in (item for path in paths for item in reader.read(path)):
        if item.key not in seen:
            seen.add(item.key)
            (held_out if within_share(item.key, fraction) else train).append(item)
    if not train:
        raise UserError("--data leaves no document to train on: all are held out")
    if not held_out:
        raise UserError("no document is held out; give --held-out or a larger --held-out-fraction")

    recipe = hashlib.sha256(json.dumps([target.vocabulary_hash, target.config.vocab_size, reader.eos]).encode())
    for side in (train, held_out):
        recipe.update(b"|" + b"".join(item.key for item in side))
    fingerprint = recipe.hexdigest()
    if (folder / _MANIFEST).is_file():
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["fingerprint"] != fingerprint:
            raise UserError(f"{folder} was prepared from other data or for another tokenizer; choose another --out")
    else:
        building = folder.with_name(folder.name + ".partial")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        notes = []
        for name, side in (("train", train), ("held-out", held_out)):
            by_item = [[pair for pair in item.tokenise() if any(pair[1][1:])] for item in side]
            if not any(by_item):
                raise UserError(f"no {name} document has a token to learn: conversations need a turn of the assistant")
            if not all(by_item):
                notes.append(f"{by_item.count([])} {name} documents have no token to learn and are left out")
            Documents.of(pair for pairs in by_item for pair in pairs).save(building, name)
        manifest = {"fingerprint": fingerprint, "notes": notes}
        (building / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        building.rename(folder)
    return DrafterData(
        Documents.load(folder, "train"), Documents.load(folder, "held-out"), fingerprint, tuple(manifest["notes"])
    )


Pair = tuple[Any, Sequence[bool]]  # token ids, and which of them are learned


@dataclass(frozen=True)
class _Item:
    """A document before it is tokenised; ``key`` tells documents apart."""

    key: bytes
    tokenise: Callable[[], list[Pair]]


@dataclass(frozen=True)
class _Reader:
    """Reads sources for a target."""

    tokenizer: Tokenizer | None
    template: Any
    vocab_size: int
    eos: int | None

    @classmethod
    def of(cls, target: Target) -> "_Reader":
        folder, config = target.tokenizer_path, target.config
        eos = next((token for token in config.eos_token_ids if token < config.vocab_size), None)
        tokenizer = None if folder is None else load_tokenizer(folder)
        return cls(tokenizer, load_chat_template(folder), config.vocab_size, eos)

    def read(self, path: Path) -> list[_Item]:
        if path.suffix == ".npy":
            return self._read_array(path)
        documents = read_documents(path, _parse)
        if self.tokenizer is None:
            raise UserError(f"{path} is text, and the target has no tokenizer; give token ids as .npy")
        items = []
        for document in documents:
            text = isinstance(document, str)
            tokenise = partial(self._text if text else self._conversation, document)
            items.append(_Item(digest(document if text else json.dumps(document)), tokenise))
        return items

    def _read_array(self, path: Path) -> list[_Item]:
        if not path.is_file():
            raise UserError(f"{path} does not exist")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError):
            raise UserError(f"{path} is not a .npy array") from None
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.size == 0:
            raise UserError(f"{path} must hold integers of one or two axes, got {array.dtype} {list(array.shape)}")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise UserError(f"{path} must hold ids 0 to {self.vocab_size - 1}, got {array.min()} to {array.max()}")
        if array.ndim == 2:
            rows = list(array)
        else:
            cuts = np.flatnonzero(array == self.eos) + 1 if self.eos is not None else []
            rows = [row for row in np.split(array, cuts) if len(row)]

        def item(row: ndarray) -> _Item:
            return _Item(hashlib.sha256(row.astype(np.int32).tobytes()).digest(), lambda: [(row, [True] * len(row))])

        return [item(row) for row in rows]

    def _end(self) -> list[int]:
        return [] if self.eos is None else [self.eos]

    def _text(self, text: str) -> list[Pair]:
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(text) + self._end()
        return [(ids, [True] * len(ids))]

    def _conversation(self, messages: list[dict[str, Any]]) -> list[Pair]:
        """Parts are tokenised one by one, as a prompt and its answer are. A template ends its turns itself."""
        assert self.tokenizer is not None
        documents: list[Pair] = []
        for parts in conversation(messages, self.template):
            ids: list[int] = []
            learned: list[bool] = []
            for number, (text, learn) in enumerate(parts):
                piece = self.tokenizer.encode(text, add_special=number == 0 and self.template is None)
                ids += piece
                learned += [learn] * len(piece)
            if self.template is None:
                ids += self._end()
                learned += [True] * (len(ids) - len(learned))
            documents.append((ids, learned))
        return documents


def _parse(record: Any, where: str) -> Any:
    if isinstance(record, dict) and "messages" in record:
        return parse_messages(record, where)
    return text_of(record, where)
