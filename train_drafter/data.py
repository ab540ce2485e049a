"""Text to tokens: reading documents, the held-out split, packing, and the sampler of training windows.

A document is one file, or one line of a ``.jsonl`` file. It is stored as BOS, its tokens, EOS, and all documents of a
source lie one after another in one flat array. A training window is cut from that array at random, so it may hold the
end of one document and the start of the next, and the recurrent state carries over between them. That is harmless for
training a target, which learns at EOS and BOS to forget; what must not leak has to be packed otherwise.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray
from tokenizers import Tokenizer

from specla_jax.errors import UserError
from train_drafter.tokenizer import BOS, EOS, load_tokenizer, save_tokenizer, train_tokenizer

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
# Folders of tests, of other people's code and of caches say little about how a package is written.
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "testing", "vendor", "vendored", "_vendor", "extern", "external", "externals", "third_party")
)
MAX_PY_BYTES = 200_000  # larger Python files are mostly tables, or would outweigh a whole package
TOKENIZER_CHARS = 20_000_000  # a few thousand pieces need no more text than this
_MANIFEST = "data.json"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One ``--data`` or ``--held-out`` path after packing; spans are [start, stop) in train.npy and held_out.npy."""

    name: str
    documents: int
    train: tuple[int, int]
    held_out: tuple[int, int]
    held_out_bytes: int

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Source":
        """The inverse of ``asdict``: JSON has no tuples."""
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
        return cls(**values)

    @property
    def train_tokens(self) -> int:
        return self.train[1] - self.train[0]

    @property
    def held_out_tokens(self) -> int:
        return self.held_out[1] - self.held_out[0]


@dataclass(frozen=True)
class TokenData:
    """A prepared folder: ``train.npy`` and ``held_out.npy`` (memory-mapped), the tokenizer and the manifest."""

    folder: Path
    sources: tuple[Source, ...]
    train: Int[ndarray, " n"]
    held_out: Int[ndarray, " m"]
    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    fingerprint: str

    @classmethod
    def load(cls, folder: Path) -> "TokenData":
        """Opens a folder that :func:`prepare` wrote.

        Raises:
          UserError: a file is missing.
        """
        for name in (_MANIFEST, "train.npy", "held_out.npy", "tokenizer.json"):
            if not (folder / name).is_file():
                raise UserError(f"{folder} is not a prepared data folder: {name} is missing")
        manifest = json.loads((folder / _MANIFEST).read_text())
        sources = tuple(Source.from_json(entry) for entry in manifest.pop("sources"))
        train, held_out = (np.load(folder / name, mmap_mode="r") for name in ("train.npy", "held_out.npy"))
        return cls(folder=folder, sources=sources, train=train, held_out=held_out, **manifest)


def is_prepared(folder: Path) -> bool:
    """Whether :func:`prepare` has written ``folder``."""
    return (folder / _MANIFEST).is_file()


def read_documents(path: Path, parse: Callable[[Any, str], Any] | None = None) -> list[Any]:
    r"""The documents of a file or of all files below a folder, in the order of their names.

    ``.txt``, ``.md`` and ``.py`` files are one document each. A line of a ``.jsonl`` file is an object with ``text``,
    or with ``question`` and ``answer``, which become ``Question: ...\nAnswer: ...``. In a folder, tests, vendored
    code, Python files above 200 kB and files that are not UTF-8 are passed over. Empty documents are dropped.

    Args:
      path: file or folder.
      parse: what makes a document of the value of a ``.jsonl`` line and its place, in place of :func:`text_of`.

    Raises:
      UserError: the path does not exist, holds nothing readable, or a ``.jsonl`` line is not one of these.
    """
    if path.is_dir():
        documents = [text for file in _walk(path) for text in _read_file(file, parse, strict=False)]
    elif path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{path} must be one of {', '.join(SUFFIXES)}")
        documents = list(_read_file(path, parse, strict=True))
    else:
        raise UserError(f"{path} does not exist")
    documents = [text for text in documents if not isinstance(text, str) or text.strip()]
    if not documents:
        raise UserError(f"{path} holds no documents ({', '.join(SUFFIXES)})")
    return documents


def _walk(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name.lower() not in SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(files):
            file = Path(folder, name)
            if file.suffix in SUFFIXES and not (file.suffix == ".py" and file.stat().st_size > MAX_PY_BYTES):
                yield file


def _read_file(path: Path, parse: Callable[[Any, str], Any] | None, strict: bool) -> Iterator[Any]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        if strict:
            raise UserError(f"{path} is not UTF-8 text") from None
        return
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                raise UserError(f"{where} is not JSON") from None
            yield (parse or text_of)(record, where)


def text_of(record: Any, where: str) -> str:
    """The document of a ``.jsonl`` line's value; ``where`` is for the error."""
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return record["text"]
        if isinstance(record.get("question"), str) and isinstance(record.get("answer"), str):
            return f"Question: {record['question']}\nAnswer: {record['answer']}"
    raise UserError(f"{where} must be an object with 'text', or with 'question' and 'answer'")


def digest(text: str) -> bytes:
    """What tells documents apart."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is held out: by a hash of its text, so equal documents never part and order is nothing."""
    return within_share(digest(text), fraction)


def within_share(key: bytes, fraction: float) -> bool:
    """Whether a digest lies in the first ``fraction`` of all."""
    return int.from_bytes(key[:8], "big") < fraction * 2**64


def prepare(
    paths: Sequence[Path],
    folder: Path,
    *,
    held_out_paths: Sequence[Path] = (),
    fraction: float = 0.01,
    tokenizer: Path | None = None,
    vocab_size: int = 4096,
) -> TokenData:
    """Reads, splits, tokenises and packs text into ``folder``; an existing folder made from the same is kept.

    Args:
      paths: sources to train on. Documents that occur again, in any source, are dropped.
      folder: where train.npy, held_out.npy, tokenizer.json and data.json go; written beside and renamed.
      held_out_paths: sources that are held out whole.
      fraction: share of the documents of ``paths`` that is held out.
      tokenizer: folder with a tokenizer.json; None trains one of ``vocab_size`` pieces on the training documents.

    Raises:
      UserError: unreadable sources, nothing left to train on in one of ``paths``, nothing to hold out, or ``folder``
        was made from other data.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"--held-out-fraction must be at least 0 and below 1, got {fraction}")
    held_out_texts = [read_documents(path) for path in held_out_paths]
    seen = {digest(text) for texts in held_out_texts for text in texts}
    train_texts: list[list[str]] = []
    for path in paths:
        kept = []
        for text in read_documents(path):
            if (key := digest(text)) not in seen:
                seen.add(key)
                kept.append(text)
        train_texts.append(kept)
    names = _names([*paths, *held_out_paths])
    splits = [
        ([t for t in texts if not is_held_out(t, fraction)], [t for t in texts if is_held_out(t, fraction)])
        for texts in train_texts
    ] + [([], texts) for texts in held_out_texts]
    for path, (kept, _) in zip(paths, splits, strict=False):
        if not kept:
            raise UserError(f"{path} leaves nothing to train on: all of it is held out or occurs in another source")
    if not any(out for _, out in splits):
        raise UserError("no document is held out; give --held-out or a larger --held-out-fraction")

    encoder = load_tokenizer(tokenizer) if tokenizer else None
    recipe = hashlib.sha256(json.dumps([names, fraction, encoder.to_str() if encoder else vocab_size]).encode())
    for side in (side for split in splits for side in split):
        recipe.update(b"|" + b"".join(map(digest, side)))
    fingerprint = recipe.hexdigest()
    if is_prepared(folder):
        data = TokenData.load(folder)
        if data.fingerprint != fingerprint:
            raise UserError(f"{folder} was prepared from other data or settings; choose another --out")
        return data

    if encoder is None:
        encoder = train_tokenizer(_tokenizer_texts([kept for kept, _ in splits]), vocab_size)
    building = folder.with_name(folder.name + ".partial")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    spans = [
        _pack(encoder, [split[side] for split in splits], building / file)
        for side, file in enumerate(("train.npy", "held_out.npy"))
    ]
    sources = [
        Source(
            name=name,
            documents=len(kept) + len(out),
            train=train,
            held_out=held_out,
            held_out_bytes=sum(len(text.encode("utf-8", "surrogatepass")) for text in out),
        )
        for name, (kept, out), train, held_out in zip(names, splits, *spans, strict=True)
    ]
    save_tokenizer(encoder, building)
    manifest = {
        "sources": [asdict(source) for source in sources],
        "vocab_size": encoder.get_vocab_size(),
        "bos_token_id": encoder.token_to_id(BOS),
        "eos_token_id": encoder.token_to_id(EOS),
        "fingerprint": fingerprint,
    }
    (building / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    building.rename(folder)
    return TokenData.load(folder)


def _names(paths: Sequence[Path]) -> list[str]:
    """Last parts of the paths, or whole paths where these are not unique."""
    short = [path.absolute().name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise UserError(f"a source is given twice: {', '.join(names)}")
    return names


def _tokenizer_texts(sources: Sequence[Sequence[str]]) -> Iterator[str]:
    """Documents for the tokenizer: evenly spaced ones of each source, equal characters a source where it has them."""
    share = TOKENIZER_CHARS // max(1, sum(bool(texts) for texts in sources))
    for texts in sources:
        stride = -(-sum(map(len, texts)) // share) or 1
        yield from texts[::stride]


def _pack(tokenizer: Tokenizer, sources: Sequence[Sequence[str]], path: Path) -> list[tuple[int, int]]:
    """Writes BOS, document, EOS of every document as one flat array; returns the span of each source."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    # Text that spells a special token is text: it must not become one.
    tokenizer.encode_special_tokens = True
    parts, spans, start = [np.empty(0, dtype)], [], 0
    for texts in sources:
        stop = start
        for first in range(0, len(texts), 1000):
            for encoding in tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False):
                parts.append(np.array([bos, *encoding.ids, eos], dtype))
                stop += len(parts[-1])
        spans.append((start, stop))
        start = stop
    tokenizer.encode_special_tokens = False
    np.save(path, np.concatenate(parts))
    return spans


@dataclass(frozen=True)
class WindowSampler:
    """Training windows as a pure function of (seed, step): a resumed run needs only its step.

    Attributes:
      data: prepared tokens.
      batch: rows of a step.
      length: predicted tokens of a row; a window holds one more.
      weights: share of the rows drawn from each training source; empty means by their number of tokens.
      seed: of the whole run.
    """

    data: TokenData
    batch: int
    length: int
    weights: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        sources = [source for source in self.data.sources if source.train_tokens]
        for source in sources:
            if source.train_tokens <= self.length:
                raise UserError(
                    f"{source.name} has {source.train_tokens} training tokens, too few for --length {self.length}"
                )
        if self.weights and len(self.weights) != len(sources):
            raise UserError(f"--weights must give {len(sources)} numbers, one a source, got {len(self.weights)}")
        if self.weights and not (min(self.weights) >= 0 < sum(self.weights) < float("inf")):
            raise UserError(f"--weights must be 0 or more and not all 0, got {self.weights}")

    @property
    def shares(self) -> dict[str, float]:
        """Share of the rows of each training source, by name; sums to 1."""
        sources = [source for source in self.data.sources if source.train_tokens]
        weights = self.weights or tuple(float(source.train_tokens) for source in sources)
        return {source.name: weight / sum(weights) for source, weight in zip(sources, weights, strict=True)}

    def __call__(self, step: int) -> Int[ndarray, "batch length+1"]:
        rng = np.random.default_rng([self.seed, step])
        spans = np.array([source.train for source in self.data.sources if source.train_tokens])  # [sources, 2]
        chosen = spans[rng.choice(len(spans), self.batch, p=list(self.shares.values()))]
        starts = rng.integers(chosen[:, 0], chosen[:, 1] - self.length)  # [batch]
        return np.stack([self.data.train[start : start + self.length + 1] for start in starts]).astype(np.int32)


def held_out_windows(
    data: TokenData, source: Source, length: int, limit: int | None = None
) -> tuple[Int[ndarray, "n length+1"], Int[ndarray, "n length"]]:
    """Windows that cover a source's held-out tokens, each predicted once, and which of their predictions count.

    ``limit`` takes that many windows, evenly spaced. The last window is filled with EOS, which does not count.
    """
    tokens = data.held_out[source.held_out[0] : source.held_out[1]]
    count = max(0, -(-(len(tokens) - 1) // length))
    windows = np.full((count, length + 1), data.eos_token_id, np.int32)
    mask = np.zeros((count, length), np.int32)
    for i in range(count):
        piece = tokens[i * length : (i + 1) * length + 1]
        windows[i, : len(piece)] = piece
        mask[i, : len(piece) - 1] = 1
    if limit is not None and limit < count:
        chosen = np.linspace(0, count - 1, limit).round().astype(int)
        windows, mask = windows[chosen], mask[chosen]
    return windows, mask
