"""An ablation of the drafter of a target: variants that differ from a base in one option, trained and decoded alike.

    python scripts/ablate_drafter.py --data chats.jsonl --out OUT --steps 2000
    python scripts/ablate_drafter.py --out OUT --report

The base is ``specla train-drafter`` with its defaults and half of the documents written by the target itself. Options
behind ``--`` change it, and with it all variants: ``... --steps 2000 -- --intermediate-size 1024``. A variant is a run
folder OUT/NAME; what is finished is skipped and what was cut goes on. The variant ``decoding`` trains nothing: it
decodes with the base's drafter at several thresholds of pruning, confidence temperatures and sizes of the tree.

Documents and the target's own texts lie in OUT/data for all variants, so the texts of one share and seed are written
once. The same command may run on several GPUs at the same time, each with its ``--variants`` or all with the same: a
variant that another process is at is left out.

OUT/ablation.md and OUT/ablation.json hold the figures of what is finished.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

# Before this folder, whose train_drafter.py would hide the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.ablation_report import (
    BASE,
    CONFIDENCE,
    DECODING,
    NODES,
    TAU,
    finished,
    read_ablation,
    report,
    write_report,
)
from specla_jax.checkpoint.folders import folder_kind, read_config
from specla_jax.config import DraftConfig, TargetConfig
from specla_jax.decode import bundled_target
from specla_jax.drafters.eagle_layer import EagleConfig
from specla_jax.errors import UserError
from train_drafter import drafter_cli, evaluation
from train_drafter.drafter_loss import LossKind
from train_drafter.target import check_out, claim_run

TAUS = (1.0, 2.0, 4.0, 8.0)  # nats
TEMPERATURES = (0.5, 0.71, 1.0, 1.41)  # of the drafter's confidence
_SELF_GENERATED = "0.5"  # as docs/training.md has it
_NOT_SETTINGS = ("out", "dry_run", "stop_after", "log_every")  # may differ from one call to the next
_SCRIPTS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Variant:
    """A run that differs from the base in one option.

    Attributes:
      name: of its folder.
      group: what is varied.
      setting: its value, for the table.
      options: of ``specla train-drafter``, behind those of the base.
    """

    name: str
    group: str
    setting: str
    options: tuple[str, ...] = ()


def variants(base: argparse.Namespace, target: TargetConfig) -> list[Variant]:
    """The base, then its variants group by group; values that the base has itself are left out.

    Args:
      base: arguments of ``specla train-drafter``.
      target: names the layers and the size of the vocabulary.
    """
    last, vocab, seed = target.num_hidden_layers - 1, target.vocab_size, (base.seed + 1) % 2**32
    late = tuple(dict.fromkeys((last // 2, 3 * last // 4, last)))
    groups: list[tuple[str, str, Any, dict[str, Any]]] = [  # title, option, value of the base, values by name
        ("seed", "--seed", base.seed, {f"seed-{seed}": seed}),
        ("loss", "--loss", base.loss, {f"loss-{kind}": kind for kind in get_args(LossKind)}),
        ("unroll", "--unroll", base.unroll, {f"unroll-{depth}": depth for depth in (1, 3, 6, 8)}),
        (
            "feature layers",
            "--feature-layers",
            base.feature_layers or target.feature_layers,
            {"layers-last": (last,), "layers-late": late},
        ),
        (
            "self-generated",
            "--self-generated",
            base.self_generated,
            {"self-0": 0.0, "self-0.5": 0.5, "self-1": 1.0},
        ),
        (
            "draft vocabulary",
            "--draft-vocab-size",
            base.draft_vocab_size or vocab,
            {"vocab-half": vocab // 2, "vocab-quarter": vocab // 4},
        ),
        ("window", "--window", base.window or EagleConfig.window, {f"window-{size}": size for size in (64, 128, 512)}),
    ]
    own = ", ".join(f"{title} {' '.join(_words(value))}" for title, _, value, _ in groups)
    found = [Variant(BASE, BASE, own)]
    for title, option, value, others in groups:
        taken = [_words(value)]
        for name, other in others.items():
            words = _words(other)
            if words not in taken:
                taken.append(words)
                found.append(Variant(name, title, " ".join(words), (option, *words)))
    return [*found, Variant(DECODING, DECODING, "the base's drafter with other drafts")]


def _words(value: Any) -> list[str]:
    """A value as it stands on a command line."""
    if isinstance(value, tuple | list):
        return [str(part) for part in value]
    return [f"{value:g}" if isinstance(value, float) else str(value)]


def parser() -> argparse.ArgumentParser:
    p = drafter_cli.Parser(
        prog="ablate_drafter.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = p.add_argument
    add("--target", type=Path, metavar="DIR", help="fla or converted folder; default: the bundled model")
    add("--data", type=Path, nargs="+", metavar="PATH", help="as for specla train-drafter")
    add("--out", type=Path, required=True, metavar="OUT")
    add("--steps", type=int, metavar="N", help="of each variant; default: that of specla train-drafter")
    add("--batch", type=int, metavar="N", help="rows; default: that of specla train-drafter")
    add("--length", type=int, metavar="N", help="tokens of a row; default: that of specla train-drafter")
    add("--variants", nargs="+", metavar="NAME", help="default: all; --dry-run lists them")
    add("--report", action="store_true", help="print the tables of what is in OUT, and nothing else")
    add("--dry-run", action="store_true", help="prepare the data, print what would be trained, and stop")
    add("--only", choices=(DECODING,), help=argparse.SUPPRESS)  # how it calls itself
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 2 for a user's mistake, 1 if a variant failed."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        args = parser().parse_args(arguments[:cut])
        if args.report:
            print(report(read_ablation(args.out)))
            return 0
        return _run(args, arguments[:cut], arguments[cut + 1 :])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, arguments: list[str], more: list[str]) -> int:
    if not args.data:
        raise UserError("--data is required, except with --report")
    target = args.target or bundled_target()
    folder_kind(target)
    options = _options(args, more)
    base = drafter_cli.parser().parse_args([*options, "--out", str(args.out)])
    if base.init is not None:
        raise UserError("--init cannot be given: variants change the shape of the drafter")
    known = {variant.name: variant for variant in variants(base, read_config(target))}
    unknown = [name for name in args.variants or () if name not in known]
    if unknown:
        raise UserError(f"--variants must be among {', '.join(known)}, got {unknown[0]}")
    chosen = [known[name] for name in dict.fromkeys(args.variants or known)]
    check_out(args.out)
    if args.only:
        return measure_decoding(base, target, args.out)
    prepare = [str(_SCRIPTS / "train_drafter.py"), *options, "--out", str(args.out), "--dry-run"]
    if args.dry_run:
        status = _python(prepare)
        for variant in chosen if status == 0 else ():
            print(
                f"{variant.name}: {variant.group} {variant.setting}; {' '.join(variant.options) or 'no more options'}"
            )
        return status

    with _locked(args.out, "run"):
        if not (args.out / "run.json").is_file():  # checks all options, and makes OUT/data
            status = _python(prepare)
            if status:
                return status
        claim_run(args.out, _settings(base, target))
        _write(args.out / "variants.json", [asdict(variant) for variant in known.values()])
    failed = 0
    for variant in chosen:
        if variant.name == DECODING:
            command = [str(_SCRIPTS / "ablate_drafter.py"), *arguments, "--only", DECODING, "--", *more]
        else:
            run = ["--out", str(args.out / variant.name)]
            command = [str(_SCRIPTS / "train_drafter.py"), *options, *variant.options, *run]
        status = _one(variant, args.out, command)
        if status in (2, 130):  # said by the process itself, and not of this variant alone
            return status
        if status:
            print(f"{variant.name} failed, exit status {status}; the same command tries it again", file=sys.stderr)
            failed = 1
        if any(finished(args.out, name) for name in known if name != DECODING):
            with _locked(args.out, "report"):  # after each, so that a run that is cut has a table, too
                write_report(args.out)
    table = args.out / "ablation.md"
    print(table.read_text() if table.is_file() else "no variant is finished yet")
    return failed


def _settings(base: argparse.Namespace, target: Path) -> dict[str, Any]:
    """What must be the same for variants to stand in one table."""
    paths = {name: [str(path.resolve()) for path in getattr(base, name)] for name in ("data", "held_out")}
    settings = {name: value for name, value in vars(base).items() if name not in _NOT_SETTINGS}
    return {**settings, **paths, "target": str(target.resolve())}


def _options(args: argparse.Namespace, more: list[str]) -> list[str]:
    """The options of the base. Paths are whole: the target's own texts are known by the path of the target, too."""
    options = ["--self-generated", _SELF_GENERATED]
    if args.steps is not None:
        options += ["--warmup", str(min(100, args.steps // 4))]
    options += more
    if args.target is not None:
        options += ["--target", str(args.target.resolve())]
    for name in ("steps", "batch", "length"):
        if getattr(args, name) is not None:
            options += [f"--{name}", str(getattr(args, name))]
    return [*options, "--data", *(str(path) for path in args.data)]


def _one(variant: Variant, out: Path, command: list[str]) -> int:
    """Runs a variant unless it is finished or another process is at it; returns the exit status."""
    with _locked(out, variant.name, wait=False) as lock:
        if lock is None:
            print(f"{variant.name}: another process is at it", flush=True)
            return 0
        if finished(out, variant.name):
            print(f"{variant.name}: finished before", flush=True)
            return 0
        if variant.name == DECODING:
            if not finished(out, BASE):
                print(f"{DECODING}: the base is not finished yet; the same command goes on", flush=True)
                return 0
        else:
            (out / variant.name).mkdir(exist_ok=True)
            data = out / variant.name / "data"
            if not data.exists():
                data.unlink(missing_ok=True)  # a link that leads nowhere
                data.symlink_to(Path("..", "data"), target_is_directory=True)
        print(f"--- {variant.name}: {variant.group} {variant.setting}", flush=True)
        return _python(command, lock)


def _python(command: list[str], lock: int | None = None) -> int:
    """Runs a script in a process of its own, so that its device memory is free for the next one.

    Args:
      command: the script and its arguments.
      lock: a file descriptor that the process keeps open, so that a variant stays locked if only this one is killed.
    """
    process = subprocess.Popen([sys.executable, *command], pass_fds=() if lock is None else (lock,))
    try:
        return process.wait()
    except KeyboardInterrupt:  # the process has got it, too, and says so
        process.wait()
        return 130


@contextmanager
def _locked(out: Path, name: str, wait: bool = True) -> Generator[int | None]:
    """Holds a lock among the processes of OUT; gives its file descriptor, or None if it is taken and not waited for."""
    folder = out / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield file.fileno()


def measure_decoding(base: argparse.Namespace, folder: Path, out: Path) -> int:
    """Decodes the prompts of the evaluations with the base's drafter as written, then with one thing changed.

    Writes OUT/decoding.json: accepted length and drafted nodes a round at temperatures 0 and 1.
    """
    import jax

    from specla_jax.checkpoint import load_target
    from specla_jax.drafters import load_drafter
    from train_drafter.documents import Documents

    dtype = base.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    target = load_target(folder, dtype=dtype)
    config, params = load_drafter(out / BASE / "drafter", target)
    held_out = Documents.load(out / "data", "held-out")
    prompts = evaluation.prompts_of(held_out, base.eval_prompts, drafter_cli.LONGEST_PROMPT)
    tree, chain = evaluation.DRAFTS["tree"], evaluation.DRAFTS["chain"]
    plain = evaluation.Evaluation(target, config, prompts, base.eval_tokens)

    def measure(group: str, setting: str, draft: DraftConfig, confidence: float) -> dict[str, Any]:
        row: dict[str, Any] = {"group": group, "setting": setting}
        for temperature in (0, 1):
            decoding = replace(plain, confidence=confidence)
            result = decoding.decode(params, "tree", float(temperature), draft)
            rounds = sum(result.rounds)
            row[f"accepted_length_t{temperature}"] = round(sum(map(len, result.tokens)) / rounds, 4)
            row[f"drafted_a_round_t{temperature}"] = round(sum(result.drafted) / rounds, 4)
        print(row, flush=True)
        return row

    own = config.temperature
    rows = [measure(BASE, f"{tree.nodes} nodes, tau none, confidence {own:.2f}", tree, own)]
    rows += [measure(TAU, f"{tau:g}", replace(tree, prune_tau=tau), own) for tau in TAUS]
    rows += [measure(CONFIDENCE, f"{value:g}", tree, value) for value in TEMPERATURES]
    if chain.nodes != tree.nodes:
        rows.append(measure(NODES, f"{chain.nodes}, as a chain", replace(tree, nodes=chain.nodes), own))
    _write(out / "decoding.json", {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows})
    return 0


def _write(path: Path, value: Any) -> None:
    """Writes JSON in one go: another process may be reading."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
