"""The measurements of a benchmark and the file that keeps them, so that a run that was cut goes on."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specla_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A batch decoded by one method; lists have an entry a row.

    Attributes:
      seconds: from the start of prefill to the last token of the slowest row, without compilation.
      first_seconds: the same program on the same shapes, stopped after one round: prefill and start-up.
      tokens: output tokens.
      rounds: verifications.
      drafted: tokens proposed.
      accepted_at_depth: rounds in which the draft of a depth was committed, depth 1 first.
      repeated: output 4-grams that stood earlier in the same output.
      fourgrams: output 4-grams.
      differences: rows whose text is not that of ``ar``: row, index, expected, got, margin, near_tie.
    """

    seconds: float
    first_seconds: float
    tokens: list[int]
    rounds: list[int]
    drafted: list[int]
    accepted_at_depth: list[list[int]]
    repeated: list[int]
    fourgrams: list[int]
    differences: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A batch decoded by every method, ``ar`` among them.

    Attributes:
      suite, temperature: what it belongs to.
      key: digest of the prompts' token ids.
      numbers: the prompts' places in the suite.
      groups: their categories.
      methods: measurements by name.
    """

    suite: str
    temperature: float
    key: str
    numbers: list[int]
    groups: list[str]
    methods: dict[str, Measured]

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Record":
        """The inverse of ``asdict``."""
        values: dict[str, Any] = {**entry, "methods": {name: Measured(**run) for name, run in entry["methods"].items()}}
        return cls(**values)


@dataclass
class Records:
    """The batches of a run; ``path`` is None for one that is not kept."""

    path: Path | None
    known: dict[tuple[str, float, str], Record]

    @classmethod
    def open(cls, out: Path | None, settings: dict[str, Any]) -> "Records":
        """Begins a run in a new or empty folder, or goes on with the one that lies there.

        Raises:
          UserError: ``out`` holds something else, or a run with other settings.
        """
        if out is None:
            return cls(None, {})
        path = out / "records.jsonl"
        if out.exists() and not out.is_dir():
            raise UserError(f"--out {out} is a file, not a folder")
        if not path.is_file():
            if out.is_dir() and any(out.iterdir()):
                raise UserError(f"--out {out} is not empty and holds no benchmark; choose another folder")
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings}) + "\n")
            return cls(path, {})
        text = path.read_text()
        entries = [json.loads(line) for line in text.split("\n")[:-1]]  # what follows the last newline was cut short
        if not entries or "settings" not in entries[0]:
            raise UserError(f"{path} is not a benchmark's; choose another --out")
        if len(entries) == 1:  # nothing was measured
            path.write_text(json.dumps({"settings": settings}) + "\n")
            return cls(path, {})
        found = entries[0]["settings"]
        other = [f"{key} {found.get(key)}, now {value}" for key, value in settings.items() if found.get(key) != value]
        if other:
            raise UserError(f"--out {out} holds a benchmark with other settings ({'; '.join(other)})")
        if not text.endswith("\n"):
            path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        records = map(Record.from_json, entries[1:])
        return cls(path, {(record.suite, record.temperature, record.key): record for record in records})

    def add(self, record: Record) -> Record:
        """Keeps a record; returns it."""
        self.known[record.suite, record.temperature, record.key] = record
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")
        return record


def stamp(folder: Path) -> str:
    """Changes when a file of the folder does."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [(path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]
