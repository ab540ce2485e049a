"""The command behind ``specla train-drafter`` and ``scripts/train_drafter.py``: text and a target in, a drafter out."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from specla_jax.checkpoint import load_target
from specla_jax.decode import bundled_target
from specla_jax.drafters.eagle_files import load_drafter, save_drafter
from specla_jax.drafters.eagle_layer import EagleConfig, Params, eagle_shapes
from specla_jax.errors import UserError
from specla_jax.model import GatedDeltaNetLM
from specla_jax.target import Target
from train_drafter.calibration import calibrate
from train_drafter.documents import DrafterData, prepare
from train_drafter.draft_vocab import frequent_tokens
from train_drafter.drafter import DrafterResult, DrafterTraining, narrow, rows_mesh, train
from train_drafter.evaluation import BEST, Evaluation, prompts_of
from train_drafter.generated import check_share, self_generated
from train_drafter.objective import Frozen, Objective
from train_drafter.packing import Rows, RowSampler, pack
from train_drafter.plots import plot_run
from train_drafter.target import check_out, claim_run, read_metrics

_SHAPE = ("window", "draft_vocab_size", "feature_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
LONGEST_PROMPT = 128  # tokens of prompts, for the target's own texts and for evaluation


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as one line."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message} (see {self.prog} --help)")


def parser(prog: str = "specla train-drafter") -> argparse.ArgumentParser:
    """The arguments of the command."""
    default = {field.name: field.default for field in fields(DrafterTraining)}
    p = Parser(
        prog=prog,
        description="Train an EAGLE drafter for a frozen target. The same command goes on where an interrupted run "
        "stopped. OUT/drafter is for 'specla decode --drafter'.",
    )

    def option(group: Any, name: str, kind: Any, help: str, **more: Any) -> None:
        """An option of the training configuration, with its default."""
        value = default[name.replace("-", "_")]
        group.add_argument(f"--{name}", type=kind, default=value, help=f"{help}; default: {value}", **more)

    data = p.add_argument_group("data")
    data.add_argument("--target", type=Path, metavar="DIR", help="fla or converted folder; default: the bundled model")
    data.add_argument(
        "--data",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help=".txt, .md, .py, .jsonl (text, or messages) or .npy (token ids) files, or folders of them",
    )
    data.add_argument("--held-out", nargs="+", type=Path, default=[], metavar="PATH", help="sources held out whole")
    data.add_argument(
        "--held-out-fraction", type=float, default=0.02, metavar="F", help="of the documents; default: 0.02"
    )
    data.add_argument(
        "--self-generated",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the documents that the target writes itself, from a prompt out of each; default: 0",
    )
    data.add_argument("--generated-tokens", type=int, default=256, metavar="N", help="of each such text; default: 256")
    data.add_argument("--generated-temperature", type=float, default=1.0, metavar="T", help="default: 1")

    model = p.add_argument_group("drafter")
    model.add_argument("--init", type=Path, metavar="DIR", help="go on from this drafter: its shape and vocabulary map")
    model.add_argument("--window", type=int, help="positions that it attends to; default: 512")
    model.add_argument("--draft-vocab-size", type=int, metavar="N", help="draft only these many frequent tokens")
    model.add_argument("--feature-layers", type=int, nargs="+", metavar="I", help="layers of the target that it reads")
    model.add_argument("--num-heads", type=int)
    model.add_argument("--num-kv-heads", type=int)
    model.add_argument("--head-dim", type=int)
    model.add_argument("--intermediate-size", type=int, help="default: the target's")

    run = p.add_argument_group("training")
    run.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="run folder; the drafter goes to OUT/drafter"
    )
    run.add_argument("--steps", type=int, default=2000, help="default: 2000")
    option(run, "batch", int, "rows")
    option(run, "length", int, "tokens of a row, in which documents are packed")
    option(run, "accumulate", int, "batches a step")
    option(run, "loss", str, "kl or lk (acceptance rate)")
    option(run, "unroll", int, "levels of the training-time test")
    option(run, "step-weight", float, "weight of a level relative to the one above")
    option(run, "learning-rate", float, "peak")
    option(run, "warmup", int, "steps")
    option(run, "weight-decay", float, "on matrices")
    option(run, "clip", float, "of the gradient's norm")
    option(run, "eval-every", int, "steps between evaluations by decoding and checkpoints")
    option(run, "eval-prompts", int, "held-out prompts decoded there")
    option(run, "eval-tokens", int, "new tokens of each")
    option(run, "seed", int, "of weights, order and the target's own texts")
    run.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the computation; default: bfloat16 on an accelerator"
    )
    run.add_argument(
        "--log-every", type=int, default=20, metavar="N", help="steps between lines of metrics; default: 20"
    )
    run.add_argument("--stop-after", type=int, metavar="STEP", help="stop there, to go on later")
    run.add_argument("--dry-run", action="store_true", help="prepare the data, print what would be trained, and stop")
    return p


def main(argv: Sequence[str] | None = None, prog: str = "specla train-drafter") -> int:
    """Runs the command; returns its exit status, 2 for a user's mistake."""
    try:
        return _run(parser(prog).parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


@dataclass(frozen=True)
class _Plan:
    """A checked run."""

    target: Target
    config: EagleConfig
    training: DrafterTraining
    settings: dict[str, Any]
    init: Params | None


def _run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    data = prepare(
        args.data,
        args.out / "data",
        plan.target,
        held_out_paths=args.held_out,
        fraction=args.held_out_fraction,
    )
    for note in data.notes:
        print(f"warning: {note}", file=sys.stderr)
    plan.settings["data"] = data.fingerprint
    rows = pack(data.train, plan.training.length)
    _describe(plan, data, rows)
    if args.dry_run:
        return 0
    claim_run(args.out, {**asdict(plan.config), **asdict(plan.training), **plan.settings})
    start = perf_counter()
    documents = self_generated(
        data.train,
        plan.target,
        args.out / "data",
        share=args.self_generated,
        longest_prompt=LONGEST_PROMPT,
        new_tokens=args.generated_tokens,
        temperature=args.generated_temperature,
        seed=plan.training.seed,
        fingerprint=data.fingerprint,
        progress=sys.stderr.isatty(),
    )
    if documents is not data.train:
        print(f"with the target's own texts: {len(documents):,} documents, in {perf_counter() - start:.1f} s")
        rows = pack(documents, plan.training.length)
    sampler = RowSampler(rows, plan.training.batch, plan.training.seed)
    fixed = _vocabulary(plan, sampler, args.out)
    prompts = prompts_of(data.held_out, plan.training.eval_prompts, LONGEST_PROMPT)
    # Not with the seed of the run: the texts decoded are those of every other run on the data.
    evaluation = Evaluation(plan.target, plan.config, prompts, plan.training.eval_tokens)
    result = train(
        plan.target,
        plan.config,
        plan.training,
        sampler,
        evaluation,
        args.out,
        settings=plan.settings,
        init=plan.init,
        fixed=fixed,
        stop_after=args.stop_after,
        log_every=args.log_every,
        progress=sys.stderr.isatty(),
        report=(lambda line: None) if sys.stderr.isatty() else partial(print, file=sys.stderr, flush=True),
    )
    if not result.finished:
        print(f"stopped after step {args.stop_after}; the same command goes on")
        return 0
    _finish(plan, result, evaluation, pack(data.held_out, plan.training.length), args.out)
    return 0


def _plan(args: argparse.Namespace) -> _Plan:
    """Everything that needs no data is checked before the data is read."""
    if args.stop_after is not None and args.stop_after < 1:
        raise UserError(f"--stop-after must be at least 1, got {args.stop_after}")
    if args.log_every < 1:
        raise UserError(f"--log-every must be at least 1, got {args.log_every}")
    check_share(args.self_generated)
    if args.generated_tokens < 1:
        raise UserError(f"--generated-tokens must be at least 1, got {args.generated_tokens}")
    if not 0 <= args.generated_temperature < float("inf"):
        raise UserError(f"--generated-temperature must be 0 or more, got {args.generated_temperature}")
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    names = {field.name for field in fields(DrafterTraining)}
    training = DrafterTraining(
        **{name: getattr(args, name) for name in names & vars(args).keys() - {"dtype"}}, dtype=dtype
    )
    rows_mesh(training.batch)
    check_out(args.out)
    folder = args.target or bundled_target()
    target = load_target(folder, dtype=dtype)
    init = None
    if args.init is None:
        config = default_config(target, **{name: getattr(args, name) for name in _SHAPE})
    else:
        given = [f"--{name.replace('_', '-')}" for name in _SHAPE if getattr(args, name) is not None]
        if given:
            raise UserError(f"{', '.join(given)} cannot be given with --init, which keeps the shape of {args.init}")
        config, init = load_drafter(args.init, target)
        config = replace(config, temperature=1.0)  # of the weights that were, not of those that will be
    settings = {
        **{f"target_{name}": value for name, value in asdict(target.identity).items()},
        "target": str(folder.resolve()),
        "init": None if args.init is None else str(args.init.resolve()),
        **{name: getattr(args, name) for name in ("self_generated", "generated_tokens", "generated_temperature")},
    }
    return _Plan(target, config, training, settings, init)


def default_config(target: Target, **given: Any) -> EagleConfig:
    """The shape of a drafter for a target: its hidden and MLP sizes, heads of 64 or 128, half as many key heads.

    Args:
      target: what it drafts for.
      **given: fields of :class:`EagleConfig` that are not None override these.
    """
    size = target.config.hidden_size
    chosen = {name: value for name, value in given.items() if value is not None}
    head_dim = chosen.get("head_dim") or (128 if size >= 1024 else max(2, min(64, size // 4) // 2 * 2))
    heads = chosen.get("num_heads") or max(1, size // head_dim)
    shape: dict[str, Any] = {
        "hidden_size": size,
        "num_heads": heads,
        "num_kv_heads": heads // 2 if heads % 2 == 0 else heads,
        "head_dim": head_dim,
        "intermediate_size": target.config.intermediate_size,
    }
    shape |= {f"target_{name}": value for name, value in asdict(target.identity).items()}
    return EagleConfig(**{**shape, **chosen})


def _vocabulary(plan: _Plan, sampler: RowSampler, out: Path) -> Params:
    """The map of a reduced draft vocabulary: that of ``--init``, that of this run, or a new one."""
    if plan.config.draft_vocab_size is None:
        return {}
    if plan.init is not None:
        return {"draft_to_target": plan.init["draft_to_target"]}
    path = out / "draft_to_target.npy"
    if not path.is_file():
        np.save(path, frequent_tokens(plan.target, sampler, plan.config.draft_vocab_size))
    return {"draft_to_target": jax.numpy.asarray(np.load(path))}


def _finish(plan: _Plan, result: DrafterResult, evaluation: Evaluation, held_out: Rows, out: Path) -> None:
    """Calibrates the best drafter, writes it, plots the run and says how it does."""
    objective = Objective(
        model=GatedDeltaNetLM(plan.target.config, plan.target.dtype), config=plan.config, steps=plan.training.unroll
    )
    frozen = Frozen(plan.target.params, result.params.get("draft_to_target"))
    found = calibrate(objective, result.params, frozen, held_out)
    config, report = plan.config, result.best
    with_temperature = replace(evaluation, confidence=found.temperature)(result.params)
    if with_temperature[BEST] > report[BEST]:
        config, report = replace(config, temperature=found.temperature), with_temperature
    save_drafter(narrow(result.params), config, out / "drafter")
    plot_run(read_metrics(out / "metrics.jsonl"), out / "training.png")
    print(f"calibration on held-out rows: {found.report()}")
    print(f"accepted length, tree, temperature 0: {result.best[BEST]}; with that temperature {with_temperature[BEST]}")
    print(f"temperature of the drafter's confidence: {config.temperature:.3f}")
    print(f"best step {result.step}; {result.skipped} updates were not finite and skipped")
    for name, value in report.items():
        if name != "step":
            print(f"  {name}: {value}")
    print(f"wrote {out / 'drafter'} and {out / 'training.png'}")


def _describe(plan: _Plan, data: DrafterData, rows: Rows) -> None:
    config, training, target = plan.config, plan.training, plan.target
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target.params))
    shapes = eagle_shapes(config)
    count = sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "draft_to_target")
    print(f"target: {target.path}, {target.config.num_hidden_layers} layers, {weights / 1e6:,.1f} MB in {target.dtype}")
    print(f"drafter: {', '.join(f'{name} {value}' for name, value in asdict(config).items())}")
    for name, shape in shapes.items():
        print(f"  {name} {list(shape)}")
    print(f"parameters: {count:,} ({count * 2 / 1e6:.1f} MB in bfloat16, {count * 16 / 1e6:.1f} MB while training)")
    print(f"training: {', '.join(f'{name} {value}' for name, value in asdict(training).items())}")
    tokens = data.train.tokens.size
    filled = int((rows.pieces[:, 1] - rows.pieces[:, 0]).sum()) / (len(rows) * rows.length)
    print(f"data: {len(data.train):,} documents, {tokens:,} tokens an epoch; {len(data.held_out):,} documents held out")
    step = training.batch * training.accumulate
    epochs = training.steps * step / len(rows)
    print(f"rows: {len(rows):,} of {rows.length} tokens, {filled:.1%} filled")
    print(f"tokens: {step * rows.length:,} a step, {training.steps * step * rows.length:,} in all, {epochs:.2f} epochs")
