"""The data of scripts/experiment_1p3b.py: what is read, what is held out, and the corpus of the drafter."""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specla_jax.errors import UserError
from train_drafter.data import TokenData, is_held_out, prepare, read_documents

GSM8K, PYTHON, WIKITEXT = SOURCES = ("gsm8k.jsonl", "python.jsonl", "wikitext.jsonl")
HELD_OUT = ("python-held-out.jsonl", "wikitext-held-out.jsonl")
_HELD_OUT_PACKAGES = 0.03  # of the packages, by a hash of their names
_HELD_OUT_DOCUMENTS = 0.02  # of the documents of the sources, by a hash of their text
_NO_PACKAGES = frozenset(("site-packages", "dist-packages", "idlelib", "lib2to3", "ensurepip", "turtledemo"))


def python_roots() -> list[Path]:
    """The standard library and the packages of the interpreter that runs."""
    return [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]


def build(data_dir: Path, roots: Sequence[Path], megabytes: float, vocab_size: int, out: Path) -> TokenData:
    """Reads the sources into ``out/corpus``, and splits, tokenises and packs them into ``out/data``.

    GSM8K train, Python sources and WikiText-2 valid are trained on. Held out: 2 % of their documents, 3 % of the Python
    packages (whole) and WikiText-2 test. GSM8K test is not touched.

    Args:
      data_dir: holds gsm8k/train.jsonl, wikitext2/valid.txt and wikitext2/test.txt.
      roots: folders whose entries are Python packages and modules.
      megabytes: of Python sources at most.
      vocab_size: pieces of the tokenizer, which is trained on the training side alone.
      out: existing folders of the same data are kept.

    Raises:
      UserError: a file or a root is missing, or ``out`` was made from other data.
    """
    corpus = out / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    files = {name: data_dir / name for name in ("gsm8k/train.jsonl", "wikitext2/valid.txt", "wikitext2/test.txt")}
    for path in files.values():
        if not path.is_file():
            raise UserError(f"--data-dir {data_dir} has no {path.relative_to(data_dir)}")
    kept, held_out, packages = _packages(roots, int(megabytes * 1e6))
    _write(corpus / GSM8K, read_documents(files["gsm8k/train.jsonl"]))
    _write(corpus / PYTHON, kept)
    _write(corpus / WIKITEXT, _articles(files["wikitext2/valid.txt"].read_text(encoding="utf-8")))
    _write(corpus / HELD_OUT[0], held_out)
    _write(corpus / HELD_OUT[1], _articles(files["wikitext2/test.txt"].read_text(encoding="utf-8")))
    (corpus / "packages.json").write_text(json.dumps(packages, indent=2) + "\n")
    return prepare(
        [corpus / name for name in SOURCES],
        out / "data",
        held_out_paths=[corpus / name for name in HELD_OUT],
        fraction=_HELD_OUT_DOCUMENTS,
        vocab_size=vocab_size,
    )


def _packages(roots: Sequence[Path], limit: int) -> tuple[list[str], list[str], dict[str, Any]]:
    """Training documents of ``limit`` bytes at most, documents of held-out packages, and the names of both."""
    kept: list[str] = []
    held_out: list[str] = []
    names: dict[str, Any] = {"trained": [], "held out": []}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"--python: no folder {root}")
        for entry in sorted(root.iterdir()):
            texts = list(_sources(entry))
            if texts:
                out = is_held_out(entry.name, _HELD_OUT_PACKAGES)
                (held_out if out else kept).extend(texts)
                names["held out" if out else "trained"].append(entry.name)
    if not kept:
        raise UserError(f"--python: no Python sources in {', '.join(map(str, roots))}")
    if not held_out:  # few packages: the last document stands for one
        held_out.append(kept.pop())
    return _within(kept, limit), held_out, names


def _sources(entry: Path) -> Iterator[str]:
    skipped = entry.name in _NO_PACKAGES or entry.name.startswith((".", "_"))
    if skipped or entry.suffix in (".dist-info", ".egg-info"):
        return
    if entry.is_dir() or entry.suffix == ".py":
        try:
            yield from (text for text in read_documents(entry) if "\n" in text)
        except UserError:  # not a line of Python in it
            return


def _within(texts: list[str], limit: int) -> list[str]:
    """Documents spread evenly over all of them, ``limit`` bytes or a little less."""
    total = sum(len(text.encode()) for text in texts)
    if total <= limit:
        return texts
    order = np.random.default_rng(0).permutation(len(texts))
    sizes = np.cumsum([len(texts[i].encode()) for i in order])
    return [texts[i] for i in sorted(order[: max(1, int(np.searchsorted(sizes, limit)))])]


def _articles(text: str) -> list[str]:
    """WikiText's articles: each begins with a line `` = Title = ``."""
    articles: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith(" = ") and not line.startswith(" = =") and line.rstrip().endswith(" ="):
            articles.append([])
        articles[-1].append(line.strip())
    joined = ("\n".join(line for line in lines if line) for lines in articles)
    return [article for article in joined if article]


def _write(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def drafter_corpus(data: TokenData, weights: Sequence[float], path: Path) -> int:
    """Writes whole documents of the training tokens as one array, its sources in the shares of ``weights``.

    The source that is scarcest for its share is taken whole. Returns the number of tokens.
    """
    sources = [source for source in data.sources if source.train_tokens]
    total = min(source.train_tokens / weight for source, weight in zip(sources, weights, strict=True) if weight)
    parts = []
    for source, weight in zip(sources, weights, strict=True):
        tokens = data.train[source.train[0] : source.train[1]]
        ends = np.flatnonzero(tokens == data.eos_token_id) + 1
        fits = ends[ends <= total * weight + 1]
        parts.append(tokens[: fits[-1] if len(fits) else ends[0] if weight else 0])
    joined = np.concatenate(parts)
    np.save(path, joined)
    return len(joined)
