"""The ``bench`` command: the prompts of public suites decoded by several methods, held against plain decoding.

Every prompt is decoded by all methods in turn before the next one, so that what drifts on a machine drifts for all of
them. A batch that is finished is a line of ``OUT/records.jsonl``; a run that is cut goes on after the last of them.
"""

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from specla_jax.bench_records import Measured, Record, Records, stamp
from specla_jax.bench_report import (
    PUBLISHED_SETTING,
    Row,
    category_table,
    plot,
    repeated_fourgrams,
    summarise,
    table,
)
from specla_jax.config import DraftConfig, SamplingConfig
from specla_jax.decode import bundled_drafter, bundled_target
from specla_jax.drafters import get_drafter
from specla_jax.errors import UserError
from specla_jax.generate import DEFAULT_DRAFT, GenerationResult, Job, Method, bucket, compile_all, prepare
from specla_jax.lossless import first_difference
from specla_jax.profile import profile, write
from specla_jax.profile import table as profile_table
from specla_jax.suites import Prompt, PromptFormat, read_suite
from specla_jax.target import Target
from specla_jax.text import load_tokenizer

# name: method of generate, and drafter if it is not the one of --drafter
METHODS: dict[str, tuple[Method, str | None]] = {
    "ar": ("ar", "none"),
    "ngram-chain": ("chain", "ngram"),
    "ngram-tree": ("tree", "ngram"),
    "chain": ("chain", None),
    "tree": ("tree", None),
}
_TIMED_STARTS = 3


@dataclass(frozen=True)
class Task:
    """A prompt ready to decode.

    Attributes:
      prompt: where it comes from.
      ids: its tokens.
      seed: its own, so that batches do not change its text.
      prefill_length: static length of the programs that decode it, shared by many prompts.
    """

    prompt: Prompt
    ids: list[int]
    seed: int
    prefill_length: int


@dataclass
class Bench:
    """What stays the same from batch to batch.

    Attributes:
      model: the target.
      methods: of :data:`METHODS`, with their drafters loaded.
      batch_size: rows of a batch; a short batch is filled with rows that are finished from the start.
      max_new_tokens, stop_ids: as for :func:`specla_jax.generate`.
      report: receives lines on memory and compilation.
      starts: seconds of prefill and one round by program.
    """

    model: Target
    methods: dict[str, tuple[Method, Any, DraftConfig]]
    batch_size: int
    max_new_tokens: int
    stop_ids: Sequence[int]
    report: Callable[[str], None]
    starts: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def run(self, suite: str, temperature: float, tasks: Sequence[Task]) -> Record:
        """Decodes a batch by every method and compares the texts with those of ``ar``."""
        texts: dict[str, list[list[int]]] = {}
        measured: dict[str, Measured] = {}
        for name in self.methods:
            result, first_seconds = self._decode(name, temperature, tasks)
            texts[name] = result.tokens
            repeats = [repeated_fourgrams(tokens) for tokens in result.tokens]
            measured[name] = Measured(
                seconds=result.log.seconds,
                first_seconds=first_seconds,
                tokens=[len(tokens) for tokens in result.tokens],
                rounds=result.rounds,
                drafted=result.drafted,
                accepted_at_depth=result.accepted_at_depth,
                repeated=[pair[0] for pair in repeats],
                fourgrams=[pair[1] for pair in repeats],
                differences=list(self._differences(tasks, texts["ar"], texts[name], temperature)),
            )
        return Record(
            suite=suite,
            temperature=temperature,
            key=batch_key(tasks),
            numbers=[task.prompt.number for task in tasks],
            groups=[task.prompt.group for task in tasks],
            methods=measured,
        )

    def compile(self, batches: Iterable[tuple[float, Sequence[Task]]]) -> None:
        """All programs that the batches, each with its temperature, need; side by side."""
        jobs = {}
        for temperature, tasks in batches:
            for name in self.methods:
                key = self._program(name, temperature, tasks)
                if key not in jobs:
                    jobs[key] = self.job(name, temperature, tasks)
        compile_all(jobs.values())

    def _program(self, name: str, temperature: float, tasks: Sequence[Task]) -> tuple[Any, ...]:
        return name, temperature == 0, max(task.prefill_length for task in tasks)

    def _filled(self, tasks: Sequence[Task]) -> list[Task]:
        return [*tasks, *[tasks[0]] * (self.batch_size - len(tasks))]

    def job(self, name: str, temperature: float, tasks: Sequence[Task]) -> Job:
        """What decodes a batch by a method."""
        method, drafter, draft = self.methods[name]
        rows = self._filled(tasks)
        return prepare(
            self.model,
            [task.ids for task in rows],
            drafter=drafter,
            method=method,
            draft=draft,
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            seed=[task.seed for task in rows],
            stop_token_ids=self.stop_ids,
            prefill_length=max(task.prefill_length for task in rows),
            report=self.report,
        )

    def _decode(self, name: str, temperature: float, tasks: Sequence[Task]) -> tuple[GenerationResult, float]:
        job, rows = self.job(name, temperature, tasks), self._filled(tasks)
        lengths = np.array([len(task.ids) for task in rows])
        real = np.arange(len(rows)) < len(tasks)
        program = self._program(name, temperature, tasks)
        if program not in self.starts:  # compiles, and runs once more than is timed
            start = _limited(job, lengths + real)
            self.starts[program] = median([start.run().log.seconds for _ in range(_TIMED_STARTS + 1)][1:])
        result = _limited(job, lengths + self.max_new_tokens * real).run()
        return _rows(result, len(tasks)), self.starts[program]

    def _differences(
        self, tasks: Sequence[Task], expected: list[list[int]], got: list[list[int]], temperature: float
    ) -> Iterator[dict[str, Any]]:
        sampling = SamplingConfig(temperature=temperature)
        for row, task in enumerate(tasks):
            found = first_difference(self.model, task.ids, expected[row], got[row], sampling, task.seed)
            if found is not None:
                margin = found.margin if math.isfinite(found.margin) else None
                yield {"row": row, **asdict(found), "margin": margin}


def _limited(job: Job, limit: np.ndarray) -> Job:
    """The same program, with other lengths at which its rows end."""
    return replace(job, request=replace(job.request, limit=jnp.asarray(limit, jnp.int32)))


def _rows(result: GenerationResult, count: int) -> GenerationResult:
    """The first rows of a result."""
    names = [name for name, value in vars(result).items() if isinstance(value, list)]
    return replace(result, **{name: getattr(result, name)[:count] for name in names})


def batch_key(tasks: Sequence[Task]) -> str:
    """A digest of the token ids and seeds of a batch."""
    return hashlib.sha256(json.dumps([[task.ids, task.seed] for task in tasks]).encode()).hexdigest()[:16]


def batches(tasks: Sequence[Task], size: int) -> list[list[Task]]:
    """Batches of tasks that share a program, in the order of the suite."""
    lengths = sorted({task.prefill_length for task in tasks})
    same = [[task for task in tasks if task.prefill_length == length] for length in lengths]
    return [group[i : i + size] for group in same for i in range(0, len(group), size)]


def bench(args: argparse.Namespace, note: Callable[[str], None]) -> int:
    """Runs the command; returns the exit status: 0, or 1 if a text differs from plain decoding beyond a near tie."""
    from specla_jax.checkpoint import load_target

    for name in ("batch_size", "max_new_tokens", "prefill_lengths"):
        if np.min(getattr(args, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, got {np.min(getattr(args, name))}")
    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed must be 0 to {2**32 - 1}, got {args.seed}")
    for temperature in args.temperature:
        SamplingConfig(temperature=temperature)
    drafter = args.drafter or (None if args.target else bundled_drafter())
    drafts = _drafts(args, drafter)
    suites = {name: read_suite(name, args.suite_dir, args.prompts) for name in dict.fromkeys(args.suite)}
    folder = args.target or bundled_target()
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model = load_target(folder, dtype=dtype)
    tasks = _tasks(suites, args, model)
    methods = {
        name: (METHODS[name][0], get_drafter(METHODS[name][1] or drafter, draft, model), draft)
        for name, draft in drafts.items()
    }
    settings = _settings(args, folder, drafter, dtype, drafts)
    records = Records.open(args.out, settings)
    runner = Bench(
        model=model,
        methods=methods,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        stop_ids=[token for token in model.config.eos_token_ids if token < model.config.vocab_size],
        report=_once(),
    )
    parts = _measure(runner, tasks, records, list(dict.fromkeys(args.temperature)), settings, note)
    print(table(parts) + category_table(parts))
    compiled = model.programs
    note(
        f"{settings['device']}, jax {settings['jax']}, {dtype}, batch {args.batch_size}; times are of warm programs "
        f"and include prefill; compiling {compiled.count} programs took {compiled.seconds:.1f} s, which is left out"
    )
    note(PUBLISHED_SETTING)
    if args.profile:
        _profile(runner, tasks, args)
    lossy = sum(row["differing_beyond_near_ties"] for part in parts for row in part["methods"].values())
    return 1 if lossy else 0


def _profile(runner: Bench, tasks: dict[str, list[Task]], args: argparse.Namespace) -> None:
    """Shows the stages of a round of every method, with the first batch of the first suite."""
    first = batches(tasks[args.suite[0]], runner.batch_size)[0]
    profiles = [profile(runner.job(name, args.temperature[0], first), name) for name in runner.methods]
    print(profile_table(profiles))
    if args.out is not None:
        write(profiles, args.out)


def _measure(
    runner: Bench,
    tasks: dict[str, list[Task]],
    records: Records,
    temperatures: Sequence[float],
    settings: dict[str, Any],
    note: Callable[[str], None],
) -> list[Row]:
    """Runs what is not known yet; returns a part for each suite and temperature, then the totals."""
    parts: list[Row] = []
    finished: dict[float, list[Record]] = {}
    names = list(runner.methods)
    runner.compile(
        (temperature, batch)
        for temperature in temperatures
        for suite in tasks
        for batch in batches(tasks[suite], runner.batch_size)
        if (suite, temperature, batch_key(batch)) not in records.known
    )
    for temperature in temperatures:
        for suite in tasks:
            done = []
            title = f"{suite}, temperature {temperature:g}"
            for batch in tqdm(batches(tasks[suite], runner.batch_size), desc=title, unit="batch", disable=None):
                known = records.known.get((suite, temperature, batch_key(batch)))
                done.append(known or records.add(runner.run(suite, temperature, batch)))
            parts.append(_part(suite, temperature, done, names))
            finished.setdefault(temperature, []).extend(done)
            note(f"{title}: " + ", ".join(_brief(*item) for item in parts[-1]["methods"].items()))
            if records.path is not None:
                _write(records.path.parent, settings, [*parts, *_totals(parts, finished, names)])
    return [*parts, *_totals(parts, finished, names)]


def _drafts(args: argparse.Namespace, drafter: Path | None) -> dict[str, DraftConfig]:
    """The methods asked for, ``ar`` first, and the size of their drafts: what was given, over the defaults."""
    names = args.methods
    if names is None:
        names = ("ngram-chain", "ngram-tree") if drafter is None else ("ngram-chain", "chain", "tree")
    drafts = {}
    for name in dict.fromkeys(("ar", *names)):
        method, own_drafter = METHODS[name]
        if own_drafter is None and drafter is None:
            raise UserError(f"--methods {name} needs --drafter DIR; without one there are ngram-chain and ngram-tree")
        default = DEFAULT_DRAFT[method]
        depth = default.depth if method == "ar" or args.depth is None else args.depth
        if method == "tree":
            drafts[name] = DraftConfig(
                depth=depth,
                branch=default.branch if args.branch is None else args.branch,
                nodes=max(default.nodes, depth + 1) if args.nodes is None else args.nodes,
                prune_tau=args.prune_tau,
            )
        else:
            drafts[name] = DraftConfig(depth=depth, branch=1, nodes=depth + 1)
    return drafts


def _tasks(suites: dict[str, list[Prompt]], args: argparse.Namespace, model: Target) -> dict[str, list[Task]]:
    tokenizer = None if model.tokenizer_path is None else load_tokenizer(model.tokenizer_path)
    if tokenizer is None:
        raise UserError(f"{model.path} has no tokenizer.json or tokenizer.model, which the suites' texts need")
    form = PromptFormat.load(args.prompt_format, model.tokenizer_path)
    lengths = sorted(args.prefill_lengths)

    def task(prompt: Prompt) -> Task:
        ids = form.encode(prompt, tokenizer)
        need = len(ids) - 1
        shared = next((length for length in lengths if length >= need), bucket(need))
        return Task(prompt, ids, (args.seed + prompt.number) % 2**32, shared)

    return {name: [task(prompt) for prompt in prompts] for name, prompts in suites.items()}


def _once() -> Callable[[str], None]:
    """Writes each line to stderr the first time it comes, above a progress bar."""
    seen: set[str] = set()

    def report(line: str) -> None:
        if line not in seen:
            seen.add(line)
            tqdm.write(line, file=sys.stderr)

    return report


def _brief(name: str, row: Row) -> str:
    return f"{name} {row['accepted_length']:.2f} tokens a round, {row['tokens_per_second']:.1f} tokens/s"


def _settings(
    args: argparse.Namespace, target: Path, drafter: Path | None, dtype: str, drafts: dict[str, DraftConfig]
) -> dict[str, Any]:
    """What must be the same for records to stand in one table; suites, temperatures and prompts may be added."""
    return {
        "target": str(target.resolve()),
        "target files": stamp(target),
        "drafter": None if drafter is None else str(drafter.resolve()),
        "drafter files": None if drafter is None else stamp(drafter),
        "dtype": dtype,
        "batch_size": args.batch_size,
        "max_new_tokens": args.max_new_tokens,
        "prompt_format": args.prompt_format,
        "prefill_lengths": args.prefill_lengths,
        "seed": args.seed,
        "methods": {name: asdict(draft) for name, draft in drafts.items()},
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _part(suite: str, temperature: float, records: list[Record], methods: list[str]) -> Row:
    groups = list(dict.fromkeys(sorted(name for record in records for name in record.groups)))
    by_group = {group: {name: summarise(records, name, group) for name in methods} for group in groups}
    return {
        "suite": suite,
        "temperature": temperature,
        "methods": {name: summarise(records, name) for name in methods},
        "groups": by_group if len(groups) > 1 else {},
    }


def _totals(parts: list[Row], finished: dict[float, list[Record]], methods: list[str]) -> list[Row]:
    """All suites together, for each temperature; nothing for a single suite."""
    if len({part["suite"] for part in parts}) < 2:
        return []
    return [
        {"suite": "all", "temperature": temperature, "methods": {name: summarise(records, name) for name in methods}}
        for temperature, records in finished.items()
    ]


def _write(out: Path, settings: dict[str, Any], parts: list[Row]) -> None:
    """Writes ``bench.json`` and ``bench.png``, each whole or not at all."""
    text = json.dumps({"settings": settings, "published": PUBLISHED_SETTING, "parts": parts}, indent=2) + "\n"
    title = (
        f"{Path(settings['target']).name}, {settings['dtype']}, batch {settings['batch_size']}, {settings['device']}"
    )
    (out / "bench.json.part").write_text(text)
    plot(parts, out / "bench.png.part", title)
    for name in ("bench.json", "bench.png"):
        os.replace(out / f"{name}.part", out / name)
