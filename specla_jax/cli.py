"""The ``specla`` command.

A user's mistake ends in one line on stderr and exit status 2. Results go to stdout, everything else to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specla_jax.errors import UserError


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as one line."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(prog="specla", description="Speculative decoding of Gated DeltaNet language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    convert = commands.add_parser("convert", help="turn a PyTorch (fla) checkpoint folder into a JAX one")
    convert.add_argument("src", type=Path, metavar="SRC", help="fla folder: config.json and safetensors or .bin")
    convert.add_argument("dst", type=Path, metavar="DST", help="folder to write")
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    convert.add_argument("--overwrite", action="store_true", help="replace DST")
    convert.set_defaults(run=_convert)

    export = commands.add_parser("export", help="turn a converted checkpoint back into an fla folder")
    export.add_argument("src", type=Path, metavar="SRC")
    export.add_argument("dst", type=Path, metavar="DST")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    export.add_argument("--overwrite", action="store_true", help="replace DST")
    export.set_defaults(run=_export)

    decode = commands.add_parser("decode", help="continue prompts")
    _add_decode_arguments(decode)
    decode.set_defaults(run=_decode)

    bench = commands.add_parser("bench", help="measure methods on the prompts of public suites")
    _add_bench_arguments(bench)
    bench.set_defaults(run=_bench)

    # Every argument is positional to this parser: the command has a parser of its own.
    train = commands.add_parser("train-drafter", help="train a drafter for a target", add_help=False, prefix_chars="\0")
    train.add_argument("arguments", nargs="*")
    train.set_defaults(run=_train_drafter)
    return parser


def _add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", type=Path, metavar="DIR", help="converted or fla folder; default: the bundled small model")
    add(
        "--drafter",
        metavar="DIR|ngram|none",
        help="default: ngram (prompt look-up) with --target, the bundled drafter without",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", nargs="+", metavar="TEXT", help="one or more prompts")
    source.add_argument(
        "--prompts", type=Path, metavar="FILE", help='one prompt a line, or .jsonl with "prompt" or "prompt_ids"'
    )
    source.add_argument("--prompt-ids", nargs="+", metavar="IDS", help='token ids, as "5,17,3"')
    add("--method", choices=("ar", "chain", "tree"), default="tree", help="default: tree")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--min-p", type=float, default=0.0, metavar="M")
    add("--seed", type=int, default=0, metavar="S")
    add("--stop-ids", metavar="IDS", help='as "2,5"; default: the end-of-text ids of the model; "" for none')
    add("--depth", type=int, metavar="D", help="levels of the draft below the root; default: 7")
    add("--branch", type=int, metavar="K", help="children of a node; default: 1 in a chain, 4 in a tree")
    add("--nodes", type=int, metavar="N", help="tokens verified a round, root included; default: depth + 1 or 16")
    add("--prune-tau", type=float, metavar="X", help="drop nodes more than X nats below the best; default: keep all")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on an accelerator, float32 on a CPU")
    add("--batch-size", type=int, metavar="B", help="prompts decoded together; default: all")
    add("--memory-limit", type=float, metavar="GIB", help="refuse a run that needs more beside the weights")
    add("--stream", action="store_true", help="print text as it comes, one prompt after another")
    add("--json", action="store_true", help="one JSON object a prompt")
    add(
        "--check-lossless", action="store_true", help="decode again without drafting and compare; status 1 if different"
    )


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", type=Path, metavar="DIR", help="converted or fla folder; default: the bundled small model")
    add(
        "--drafter",
        type=Path,
        metavar="DIR",
        help="drafter folder, for the methods chain and tree; default: none with --target, the bundled one without",
    )
    add("--suite", nargs="+", required=True, choices=("gsm8k", "humaneval", "spec-bench"), metavar="NAME")
    add(
        "--suite-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="holds gsm8k/test.jsonl, humaneval/HumanEval.jsonl.gz, spec_bench/question.jsonl as published",
    )
    add("--prompts", type=_count_or_all, default=64, metavar="N|all", help="of each suite, evenly spaced; default: 64")
    add(
        "--prompt-format",
        choices=("question", "raw", "chat"),
        default="question",
        help="question: 'Question: ... Answer:' (default); raw: the text alone; chat: the tokenizer's chat template. "
        "Code is continued as it stands, unless chat",
    )
    add("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="default: 0 1")
    add(
        "--methods",
        nargs="+",
        choices=("ar", "ngram-chain", "ngram-tree", "chain", "tree"),
        metavar="NAME",
        help="ar is always run; default: ngram-chain, and chain and tree with a drafter, ngram-tree without",
    )
    add("--depth", type=int, metavar="D", help="levels of a draft below the root; default: 7")
    add("--branch", type=int, metavar="K", help="children of a tree's node; default: 4")
    add("--nodes", type=int, metavar="N", help="tokens of a tree, root included; default: 16")
    add("--prune-tau", type=float, metavar="X", help="in a tree, drop nodes more than X nats below the best")
    add("--batch-size", type=int, default=1, metavar="B", help="prompts decoded together; default: 1")
    add(
        "--prefill-lengths",
        type=int,
        nargs="+",
        default=[256, 2048],
        metavar="N",
        help="prompts are padded to one of these, or to a power of two; a length means a program a method. "
        "Default: 256 2048",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on an accelerator, float32 on a CPU")
    add("--seed", type=int, default=0, metavar="S", help="a prompt's seed is S plus its place in the suite")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="keep bench.json, bench.png and records there; a run that was cut goes on",
    )
    add("--profile", action="store_true", help="show where the time of a round goes, too; with --out in profile.json")


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)


def _convert(args: argparse.Namespace) -> int:
    from specla_jax.checkpoint import convert

    _stay_on_cpu()
    convert(args.src, args.dst, dtype=args.dtype, overwrite=args.overwrite, report=_note)
    return 0


def _export(args: argparse.Namespace) -> int:
    from specla_jax.checkpoint import export

    _stay_on_cpu()
    export(args.src, args.dst, dtype=args.dtype, overwrite=args.overwrite, report=_note)
    return 0


def _decode(args: argparse.Namespace) -> int:
    from specla_jax.decode import decode
    from specla_jax.programs import keep_on_disk

    keep_on_disk()
    return decode(args, note=_note)


def _bench(args: argparse.Namespace) -> int:
    from specla_jax.bench import bench
    from specla_jax.programs import keep_on_disk

    keep_on_disk()
    return bench(args, note=_note)


def _train_drafter(args: argparse.Namespace) -> int:
    from importlib import import_module  # the package is above this one; only its command is known here

    from specla_jax.programs import keep_on_disk

    keep_on_disk()
    return import_module("train_drafter.drafter_cli").main(args.arguments)


def _stay_on_cpu() -> None:
    """Keeps a command that only moves weights from claiming an accelerator's memory."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
