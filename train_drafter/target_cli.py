"""The command behind ``scripts/train_target.py``: text in, a target in fla format out."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from specla_jax.checkpoint import write_fla
from specla_jax.config import TargetConfig
from specla_jax.errors import UserError
from specla_jax.model import GatedDeltaNetLM
from train_drafter.data import TokenData, WindowSampler, is_prepared, prepare
from train_drafter.target import TrainingConfig, check_out, train
from train_drafter.tokenizer import tokenizer_files


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    p = argparse.ArgumentParser(
        prog="train_target.py",
        description="Train a small Gated DeltaNet target on text and write it as a flash-linear-attention folder. "
        "The same command goes on where an interrupted run stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = p.add_argument_group("data")
    data.add_argument(
        "--data",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help=".txt, .md, .py or .jsonl files, folders of them, or one folder that --prepare-only made",
    )
    data.add_argument(
        "--weights",
        nargs="+",
        type=float,
        default=[],
        metavar="W",
        help="share of the rows drawn from each --data path; by their tokens when left out",
    )
    data.add_argument("--held-out", nargs="+", type=Path, default=[], metavar="PATH", help="sources held out whole")
    data.add_argument("--held-out-fraction", type=float, default=0.01, help="share of the documents held out by hash")
    data.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder with a tokenizer.json instead of a new one")
    data.add_argument("--vocab-size", type=int, default=4096, help="pieces of the new tokenizer")
    data.add_argument("--prepare-only", action="store_true", help="write OUT/data and stop")
    model = p.add_argument_group("model")
    model.add_argument("--layers", type=int, default=7)
    model.add_argument("--hidden-size", type=int, default=256)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--head-dim", type=int, default=64)
    model.add_argument("--head-v-dim", type=int, default=64)
    model.add_argument("--intermediate-size", type=int, default=512)
    model.add_argument("--untied", action="store_true", help="give the head a matrix of its own")
    run = p.add_argument_group("training")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="run folder; the model goes to OUT/model")
    run.add_argument("--steps", type=int, default=2000)
    run.add_argument("--batch", type=int, default=16)
    run.add_argument("--length", type=int, default=256)
    run.add_argument("--learning-rate", type=float, default=1e-3)
    run.add_argument("--warmup", type=int, default=100)
    run.add_argument("--eval-every", type=int, default=500, help="steps between held-out losses and checkpoints")
    run.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    run.add_argument("--model-dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the written model")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--stop-after", type=int, metavar="STEP", help="stop there, to go on later")
    run.add_argument("--dry-run", action="store_true", help="prepare the data, print what would be trained, and stop")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a user's mistake."""
    try:
        return _run(parser().parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    # Everything that needs no data is checked before the data is read.
    config = TrainingConfig(
        steps=args.steps,
        batch=args.batch,
        length=args.length,
        learning_rate=args.learning_rate,
        warmup=args.warmup,
        eval_every=args.eval_every,
        weights=tuple(args.weights),
        dtype=args.dtype,
        seed=args.seed,
    )
    target = TargetConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_heads=args.heads,
        num_v_heads=args.heads,
        head_dim=args.head_dim,
        head_v_dim=args.head_v_dim,
        intermediate_size=args.intermediate_size,
        tie_word_embeddings=not args.untied,
    )
    if args.stop_after is not None and args.stop_after < 1:
        raise UserError(f"--stop-after must be at least 1, got {args.stop_after}")
    check_out(args.out)
    data = _load_data(args)
    target = replace(
        target,
        vocab_size=data.vocab_size,
        bos_token_id=data.bos_token_id,
        eos_token_ids=(data.eos_token_id,),
    )
    if args.prepare_only:
        _describe_data(data)
        return 0
    _describe(data, target, config)
    if args.dry_run:
        return 0
    destination = args.out / "model"
    result = train(data, target, config, args.out, stop_after=args.stop_after)
    if not result.finished:
        print(f"stopped after step {args.stop_after}; the same command goes on")
        return 0
    print(f"held-out loss of the best step, {result.step}, in nats a token (bits a byte):")
    for name, loss in result.held_out.items():
        print(f"  {name}: {loss:.4f}{_bits_per_byte(data, name, loss)}")
    if not destination.exists():
        files = tokenizer_files(data.folder)
        write_fla(result.params, target, destination, dtype=args.model_dtype, tokenizer_files=files)
    print(f"wrote {destination}")
    return 0


def _load_data(args: argparse.Namespace) -> TokenData:
    if len(args.data) == 1 and is_prepared(args.data[0]):
        if args.held_out or args.tokenizer:
            raise UserError(f"--data {args.data[0]} is already prepared: --held-out and --tokenizer do not apply")
        return TokenData.load(args.data[0])
    return prepare(
        args.data,
        args.out / "data",
        held_out_paths=args.held_out,
        fraction=args.held_out_fraction,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
    )


def _describe_data(data: TokenData) -> None:
    print(f"{'source':24} {'documents':>10} {'train tokens':>14} {'held-out tokens':>16}")
    for source in data.sources:
        print(f"{source.name:24} {source.documents:10,} {source.train_tokens:14,} {source.held_out_tokens:16,}")


def _describe(data: TokenData, target: TargetConfig, config: TrainingConfig) -> None:
    _describe_data(data)
    model = GatedDeltaNetLM(target, config.dtype)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    print(f"model: {', '.join(f'{name} {value}' for name, value in asdict(target).items())}")
    for name in ("embeddings", "layers_0"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes[name]):
            print(f"  {name}{jax.tree_util.keystr(path)} {list(leaf.shape)}")
    print(f"parameters: {count:,} ({count * 2 / 1e6:.1f} MB in bfloat16)")
    shares = WindowSampler(data, config.batch, config.length, config.weights, config.seed).shares
    step_tokens = config.batch * config.length
    total = sum(source.train_tokens for source in data.sources)
    print(f"tokens: {step_tokens:,} a step, {config.steps * step_tokens:,} in all, {total:,} an epoch")
    for source in data.sources:
        if source.name in shares and source.train_tokens:
            epochs = shares[source.name] * config.steps * step_tokens / source.train_tokens
            print(f"  {source.name}: {shares[source.name]:.1%} of the rows, {epochs:.1f} epochs")


def _bits_per_byte(data: TokenData, name: str, loss: float) -> str:
    for source in data.sources:
        if source.name == name:
            return f" ({loss * source.held_out_tokens / source.held_out_bytes / 0.6931472:.3f})"
    return ""
