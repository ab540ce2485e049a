"""The 1.3B experiment: trains a target and its drafter on public text, and measures both on the suites SpecLA used.

    python scripts/experiment_1p3b.py all --data-dir DATA --out OUT --minutes 25

Stages, each of which goes on where it was cut; ``all`` runs those that are not finished:

    data     GSM8K train, Python sources, WikiText-2 valid; held-out files set apart first; a 32,000-piece tokenizer
    target   24 layers, hidden 2048, 8 heads of 256 x 256, vocabulary 32,000, for as long as the budget allows
    drafter  specla train-drafter on the same text and on the target's own continuations
    bench    specla bench on GSM8K, HumanEval and Spec-Bench
    report   OUT/report.md

``--minutes`` is for this call. ``target`` plans its steps so that the cosine ends inside its share; ``drafter`` and
``bench`` are stopped at the end of theirs, and the same command goes on. DATA holds gsm8k, wikitext2, humaneval and
spec_bench as published. ``--size small`` is a target of 117M parameters, ``tiny`` a test of the script.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before this folder, whose train_drafter.py would hide the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.shapes import GDN_1P3B, shape
from specla_jax.config import TargetConfig
from specla_jax.errors import UserError

STAGES = ("data", "target", "drafter", "bench", "report")
SHARES = {"data": 2.0, "target": 6.5, "drafter": 5.5, "bench": 11.0, "report": 0.3}
STOPPED = 3  # exit status of a stage that the budget cut
_GRACE = 20  # seconds for a stopped command to write what it has


@dataclass(frozen=True, kw_only=True)
class Size:
    """A target and the amounts that go with it.

    Attributes:
      target: its shape; end-of-text and BOS ids come with the tokenizer.
      batch, length: rows and tokens of a training step, the drafter's too.
      learning_rate, warmup: of the target.
      weights: shares of GSM8K, Python and WikiText in the rows.
      megabytes: of Python sources.
      reserve: seconds of the target's share for its held-out loss and its files.
      drafter_speed: tokens a second in training the drafter over those in training the target.
      drafter: more options of ``specla train-drafter``.
      bench: more options of ``specla bench``.
    """

    target: TargetConfig
    batch: int
    length: int
    learning_rate: float
    warmup: int
    weights: tuple[float, ...]
    megabytes: float
    reserve: float
    drafter_speed: float
    drafter: tuple[str, ...]
    bench: tuple[str, ...]


_DRAFTER = ("--self-generated", "0.25", "--unroll", "6", "--loss", "kl", "--eval-prompts", "16", "--eval-tokens", "96")
SIZES = {
    "1.3b": Size(
        target=GDN_1P3B,
        batch=16,
        length=1024,
        learning_rate=4e-4,
        warmup=60,
        weights=(0.4, 0.5, 0.1),
        megabytes=60,
        reserve=75,
        drafter_speed=0.7,
        drafter=_DRAFTER,
        bench=("--prefill-lengths", "2048"),
    ),
    "small": Size(
        target=shape(12, 768, 6, 128, 2048, 32000, True),
        batch=32,
        length=1024,
        learning_rate=1.5e-3,
        warmup=100,
        weights=(0.3, 0.6, 0.1),
        megabytes=300,
        reserve=40,
        drafter_speed=0.5,
        drafter=_DRAFTER,
        bench=("--prefill-lengths", "2048"),
    ),
    "tiny": Size(
        target=shape(2, 64, 2, 16, 64, 512, True),
        batch=4,
        length=64,
        learning_rate=3e-3,
        warmup=20,
        weights=(0.4, 0.4, 0.2),
        megabytes=0.05,
        reserve=5,
        drafter_speed=0.5,
        drafter=("--self-generated", "0.1", "--generated-tokens", "8", "--unroll", "2",
                 "--eval-prompts", "2", "--eval-tokens", "8"),
        bench=("--prefill-lengths", "256", "--max-new-tokens", "8", "--depth", "2", "--nodes", "4",
               "--temperature", "0", "--methods", "chain"),
    ),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("stage", choices=("all", *STAGES))
    add("--out", type=Path, required=True, metavar="DIR")
    add("--data-dir", type=Path, required=True, metavar="DIR", help="folder of gsm8k, humaneval, spec_bench, wikitext2")
    add("--size", choices=SIZES, default="1.3b")
    add("--minutes", type=float, default=25.0, help="of this call; default: 25")
    add("--python", type=Path, nargs="+", metavar="DIR", help="folders of packages; default: this interpreter's")
    add("--steps", type=int, help="of the target, in place of what the budget allows")
    add("--drafter-steps", type=int, help="in place of an estimate from the target's speed")
    add("--checkpoint-minutes", type=float, default=4.0, help="between the target's checkpoints; default: 4")
    add("--prompts", type=int, default=64, help="of each suite; default: 64")
    add("--only", choices=STAGES, help=argparse.SUPPRESS)  # how "all" calls itself
    add("--keep", action="store_true", help="keep the target and all checkpoints when the report is written")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = parser().parse_args(arguments)
    try:
        if args.minutes <= 0:
            raise UserError(f"--minutes must be above 0, got {args.minutes:g}")
        stage = args.only or args.stage
        return _all(args, arguments) if stage == "all" else _stage(stage, args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _all(args: argparse.Namespace, arguments: list[str]) -> int:
    """Runs each unfinished stage in a process of its own, so that its memory is free for the next one."""
    end = time.monotonic() + 60 * args.minutes
    waiting = [stage for stage in STAGES if not _finished(stage, args.out)]
    status = 0
    for i, stage in enumerate(waiting):
        left = (end - time.monotonic()) / 60
        share = max(0.05, left * SHARES[stage] / sum(SHARES[later] for later in waiting[i:]))
        print(f"--- {stage}, {share:.1f} of {left:.1f} minutes", flush=True)
        command = [sys.executable, __file__, *arguments, "--only", stage, "--minutes", f"{share:.2f}"]
        status = subprocess.run(command, check=False).returncode or status
        if status and not (status == STOPPED and stage == "bench"):  # the report shows what bench has so far
            return status
    return status


def _finished(stage: str, out: Path) -> bool:
    marks = {
        "data": out / "data" / "drafter.npy",  # its last file
        "target": out / "target" / "target.json",
        "drafter": out / "drafter.json",
        "bench": out / "bench.json",
    }
    return stage in marks and marks[stage].is_file()


def _stage(stage: str, args: argparse.Namespace) -> int:
    size, end = SIZES[args.size], time.monotonic() + 60 * args.minutes
    needed = STAGES[: STAGES.index(stage)] if stage != "report" else ("data", "target", "drafter")
    for earlier in needed:
        if not _finished(earlier, args.out):
            raise UserError(f"the stage {stage} needs {earlier} to be finished first")
    if stage == "data":
        return _data(args, size)
    if stage == "target":
        return _target(args, size)
    if stage == "drafter":
        return _drafter(args, size, end)
    if stage == "bench":
        return _bench(args, size, end)
    return _report(args)


def _data(args: argparse.Namespace, size: Size) -> int:
    from scripts.experiment_data import build, drafter_corpus, python_roots

    data = build(args.data_dir, args.python or python_roots(), size.megabytes, size.target.vocab_size, args.out)
    for source in data.sources:
        print(
            f"{source.name}: {source.documents:,} documents, {source.train_tokens:,} tokens to train on, "
            f"{source.held_out_tokens:,} held out"
        )
    tokens = drafter_corpus(data, size.weights, args.out / "data" / "drafter.npy")
    print(f"the drafter's corpus: {tokens:,} tokens, sources in the shares {size.weights}")
    return 0


def _target(args: argparse.Namespace, size: Size) -> int:
    import jax

    from scripts.experiment_target import Recipe, train_target
    from train_drafter.data import TokenData

    data = TokenData.load(args.out / "data")
    recipe = Recipe(
        batch=size.batch,
        length=size.length,
        learning_rate=size.learning_rate,
        warmup=size.warmup,
        weights=size.weights,
        dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
    )
    finished = train_target(
        data,
        replace(size.target, bos_token_id=data.bos_token_id, eos_token_ids=(data.eos_token_id,)),
        recipe,
        args.out / "target",
        seconds=60 * args.minutes,
        reserve=size.reserve,
        steps=args.steps,
        checkpoint_seconds=60 * args.checkpoint_minutes,
    )
    return 0 if finished else _stopped("target")


def _drafter(args: argparse.Namespace, size: Size, end: float) -> int:
    out, run = args.out / "drafter", args.out / "drafter" / "run.json"
    if run.is_file():  # a run that was cut keeps its number of steps
        steps = json.loads(run.read_text())["steps"]
    elif args.drafter_steps:
        steps = args.drafter_steps
    else:  # half of the time is for compiling, the target's own texts, evaluation and writing
        speed = size.drafter_speed * (_read(args.out / "target" / "target.json")["tokens_per_second"] or 1.0)
        steps = max(20, int(0.5 * (end - time.monotonic()) * speed / (size.batch * size.length)))
    command = ["train-drafter", "--target", str(args.out / "target" / "model"), "--out", str(out)]
    command += ["--data", str(args.out / "data" / "drafter.npy"), "--steps", str(steps), "--batch", str(size.batch)]
    command += ["--length", str(size.length), "--eval-every", str(steps)]  # once: it compiles four programs
    command += ["--warmup", str(min(100, steps // 4)), *size.drafter]
    status = _specla(command, end)
    if status == 0:
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        _write(args.out / "drafter.json", {"steps": steps, "tokens_per_second": speeds, "last": lines[-1]})
    return status


def _bench(args: argparse.Namespace, size: Size, end: float) -> int:
    command = ["bench", "--target", str(args.out / "target" / "model")]
    command += ["--drafter", str(args.out / "drafter" / "drafter")]
    command += ["--suite", "gsm8k", "humaneval", "spec-bench", "--suite-dir", str(args.data_dir)]
    command += ["--prompts", str(args.prompts), "--out", str(args.out / "bench"), *size.bench]
    status = _specla(command, end)
    if status in (0, 1):  # 1: a text differs by more than a near tie; the table says so
        for name in ("bench.json", "bench.png"):
            shutil.copy(args.out / "bench" / name, args.out / name)
        return 0
    return status


def _specla(command: list[str], end: float) -> int:
    """Runs a specla command until ``end``; then interrupts it, to go on another time."""
    print("specla " + " ".join(command), flush=True)
    process = subprocess.Popen([sys.executable, "-m", "specla_jax.cli", *command])
    try:
        return process.wait(max(1.0, end - time.monotonic() - _GRACE))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return _stopped(command[0])


def _stopped(stage: str) -> int:
    print(f"{stage} was stopped by its budget; the same command goes on")
    return STOPPED


def _report(args: argparse.Namespace) -> int:
    from specla_jax.bench_report import PUBLISHED_SETTING, category_table, table

    if not (args.out / "bench" / "bench.json").is_file():
        raise UserError("the stage report needs a part of bench to be finished first")
    files = ("target/target.json", "drafter.json", "bench/bench.json")
    target, drafter, bench = (_read(args.out / name) for name in files)
    manifest = _read(args.out / "data" / "data.json")
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in target["held_out_loss"].items())
    settings, pauses = bench["settings"], target["checkpoint_blocked_seconds"]
    lines = [
        f"# {args.size} on {target['device']}, jax {target['jax']}",
        "",
        f"- data: {_sources(manifest)}; vocabulary {manifest['vocab_size']:,}",
        f"- target: {target['parameters']:,} parameters, {target['steps']:,} steps, {target['tokens']:,} tokens at "
        f"{target['tokens_per_second'] or 0:,.0f} tokens/s; training loss {target['training_loss']:.3f}, held-out loss "
        f"in nats a token: {losses}",
        f"- {len(pauses)} checkpoints of the whole state, for which training stood still {sum(pauses):.1f} s",
        f"- drafter: {drafter['steps']:,} steps; last evaluation: {_flat(drafter['last'])}",
        f"- decoding: {settings['dtype']}, batch {settings['batch_size']}, {settings['max_new_tokens']} new tokens, "
        f"prompts as '{settings['prompt_format']}'",
        "",
        table(bench["parts"]) + category_table(bench["parts"]),
        "",
        PUBLISHED_SETTING,
    ]
    (args.out / "report.md").write_text("\n".join(lines) + "\n")
    print(args.out / "report.md")
    if _finished("bench", args.out) and not args.keep:
        for folder in (
            args.out / "target" / "model",
            *(args.out / name / "checkpoints" for name in ("target", "drafter")),
        ):
            if folder.is_dir():
                print(f"removing {folder}; --keep keeps it")
                shutil.rmtree(folder)
    return 0


def _sources(manifest: dict[str, Any]) -> str:
    return ", ".join(
        f"{source['name']} {source['train'][1] - source['train'][0]:,} tokens"
        for source in manifest["sources"]
        if source["train"][1] > source["train"][0]
    )


def _flat(line: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in line.items() if isinstance(value, int | float))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
