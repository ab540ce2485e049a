"""Times a round of decoding: python scripts/bench_decode.py [--target DIR [--drafter DIR]] [--oracle] [--only ...].

Without --target the weights are random, in the shape of m-a-p/1.3B-100B-GatedDeltaNet-pure; without --drafter so are
those of an EAGLE drafter in the default shape for the target. Sections:

- verify: `ar`, and the same round with a chain of N nodes that costs nothing to draft, for each --nodes;
- draft: `chain` for each --depth, and `tree` (depth 6, top-k 4, 16 nodes, pruned), drafted by EAGLE;
- oracle (with --oracle): SpecLA's control study. The drafter does all its work, but a draft token is the target's next
  one with probability p and another one otherwise, level by level;
- peers: a token of flash-linear-attention's model with random weights, by its `generate`, by its forward pass from
  Python, and in a CUDA graph; with --packed also `ar` without it.

Decoding is greedy, and a text that is not that of `ar` ends the run, unless a near tie explains it.

A round is the whole of it: draft, verify, accept, recover. Its time is the difference between a long and a short
generation over the difference of their rounds, so that prefill and start-up drop out; the median of --repeats. The
floor is what a round must move at the bandwidth measured in the same run: the weights read, the state read and written,
and of the drafter its layer and head read once a level. OUT/bench_decode.json is written anew after every row. Tables,
the targets and OUT/oracle.png come at the end; for a run that was cut, --report makes them of what it has written.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the card; read when jax is imported

import benching
import jax
from bench_plots import plot_oracle
from bench_rounds import TREE, Bench, Rounds, chain, random_drafter, random_target
from benching import Fla, Results, Timing, judge, ratio, read_bandwidth, scaled, show, stop, table
from oracle import FillerDrafter, OracleDrafter, crossing, expected_length, oracle_params
from shapes import GDN_1P3B, TINY

from specla_jax.bench_report import break_even_acceptance
from specla_jax.checkpoint import load_target
from specla_jax.config import DraftConfig
from specla_jax.drafters import get_drafter
from specla_jax.errors import UserError
from specla_jax.generate import Method

SHAPES = {"gdn-1.3b": GDN_1P3B, "tiny": TINY}
ORACLE = DraftConfig(depth=7, branch=1, nodes=8)  # SpecLA's chain
PROBABILITIES = (0.0, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SPECLA = 3.71, "SpecLA, as reported (arXiv 2607.16673)"  # 1.3B, one H100, every draft right


def fillers(batch: int, nodes: Sequence[int]) -> list[Rounds]:
    """Every number of nodes; one node is `ar`."""
    drafts = [chain(count - 1) for count in nodes if count > 1]
    return [Rounds(batch, "chain", (FillerDrafter(draft=draft), ()), draft) for draft in drafts]


def verify(bench: Bench, rounds: Sequence[Rounds]) -> None:
    """What ``fillers`` lists, held against `ar`."""
    for one in rounds:
        bench.ar(one.batch)
        bench.add_round("verify", one.batch, one.draft, bench.measure(one), bench.floor_bytes(one.batch))


def drafts(bench: Bench, batch: int, depths: Sequence[int]) -> list[Rounds]:
    """Chains and the tree of the drafter."""
    drafter, params = bench.drafter
    kinds: list[tuple[Method, DraftConfig]] = [*(("chain", chain(depth)) for depth in depths), ("tree", TREE)]
    return [Rounds(batch, method, (replace(drafter, draft=size), params), size) for method, size in kinds]


def drafted(bench: Bench, rounds: Sequence[Rounds]) -> None:
    """What ``drafts`` lists, held against `ar`."""
    for one in rounds:
        bench.ar(one.batch)
        moved = bench.floor_bytes(one.batch, bench.drafter[1], one.draft.depth)
        bench.add_round(one.method, one.batch, one.draft, bench.measure(one), moved)


def oracle(bench: Bench, batch: int, method: Method, probabilities: Sequence[float]) -> None:
    """A row for each probability, all by one program."""
    eagle, params = bench.drafter
    size = ORACLE if method == "chain" else TREE
    drafter = OracleDrafter(drafter=replace(eagle, draft=size), vocab_size=bench.model.config.vocab_size)
    plain = bench.ar(batch)
    for p in probabilities:
        told = oracle_params(params, plain.result.tokens, size.depth, p)
        measured = bench.measure(Rounds(batch, method, (drafter, told), size))
        row = {
            "method": method,
            "batch": batch,
            "depth": size.depth,
            "nodes": size.nodes,
            "p": p,
            "accepted_length": measured.accepted_length,
            # The path of a pruned tree ends where it ends.
            "expected_length": expected_length(p, size.depth) if method == "chain" else None,
            "ms": measured.ms,
            "round_cost": measured.ms / plain.ms,
            "tokens_per_second": measured.tokens_per_second,
            "speedup": measured.tokens_per_second / plain.tokens_per_second,
            "compile_s": measured.compile_s,
        }
        bench.results.add("oracle", row | bench.near_ties(f"oracle, p = {p:g}", batch, measured))


def peers(bench: Bench, batches: Sequence[int], fla: Fla) -> None:
    """A token of flash-linear-attention's model of the same shape; and of ours over weights that are not packed."""
    for batch in batches:
        plain = bench.ar(batch)
        times = fla.decode(bench.model.config.to_fla("bfloat16"), batch)
        unpacked = None if bench.packed is None else replace(bench, packed=None).measure(Rounds(batch)).ms
        times["unpacked"] = scaled(unpacked, 1e-3)
        row = {f"{name}_ms": scaled(seconds, 1e3) for name, seconds in times.items()}
        over = {f"over_{name}": ratio(row[f"{name}_ms"], plain.ms) for name in times}
        bench.results.add("peers", {"batch": batch, "ar_ms": plain.ms} | row | over)


def targets(results: Results) -> list[dict[str, Any]]:
    """What a round is to reach at batch 1, and whether the figures do."""
    rounds = [row for row in results.rows("rounds") if row["batch"] == 1]

    def of(method: str, key: str, **sizes: int) -> list[float]:
        return [row[key] for row in rounds if row["method"] == method and sizes.items() <= row.items()]

    found = [judge("ar: ms", 0.9, of("ar", "ms"), most=True)]
    graph = [row["over_graph"] for row in results.rows("peers") if row["batch"] == 1]
    found.append(judge("ar: times flash-linear-attention in a CUDA graph", 2.3, graph, most=False))
    for nodes, bound in ((16, 1.1), (32, 1.2), (64, 1.5)):
        found.append(judge(f"verify {nodes}: steps of ar", bound, of("verify", "round_cost", nodes=nodes), most=True))
    name = f"tree of {TREE.nodes} nodes: steps of ar"
    found.append(judge(name, 1.5, of("tree", "round_cost", nodes=TREE.nodes), most=True))
    found.append(judge("chain of 5: steps of ar", 1.4, of("chain", "round_cost", depth=5), most=True))
    full = [
        row["speedup"]
        for row in results.rows("oracle")
        if (row["method"], row["batch"], row["nodes"], row["p"]) == ("chain", 1, ORACLE.nodes, 1)
    ]
    found.append(judge("oracle, chain of 8, p = 1: speed-up", 5, full, most=False))
    compiled = [row["compile_s"] for section in ("rounds", "oracle") for row in results.rows(section)]
    found.append(judge("compilation of a program: s", 120, compiled, most=True))
    return found


def break_even(rows: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """The p at which an oracle's speed-up is 1: by interpolation, and for a chain from the median round cost."""
    cost = median(row["round_cost"] for row in rows)
    formula = break_even_acceptance(cost, rows[0]["depth"]) if rows[0]["method"] == "chain" else None
    return crossing([(row["p"], row["speedup"]) for row in rows]), formula


COLUMNS = {
    "rounds": "method batch depth nodes ms round_cost floor_ms percent drafted accepted_length tokens_per_second "
    "speedup compile_s near_ties largest_margin",
    "oracle": "method batch depth nodes p accepted_length expected_length ms round_cost tokens_per_second speedup "
    "compile_s near_ties largest_margin",
    "peers": "batch ar_ms generate_ms eager_ms graph_ms unpacked_ms over_generate over_eager over_graph over_unpacked",
}


def report(results: Results) -> None:
    """The tables, what follows from the oracle, and the targets; the figure, beside the results."""
    for section, columns in COLUMNS.items():
        if rows := results.rows(section):
            print(f"\n{section}\n{table(rows, {key: key.replace('_', ' ') for key in columns.split()})}")
    if rows := results.rows("oracle"):
        interpolated, formula = break_even(rows)
        print(f"\nbreaks even at p = {show(interpolated)} (interpolated), {show(formula)} (from the round cost)")
        meta = results.data["meta"]
        title = f"{meta['target']}, {rows[0]['method']} of {rows[0]['nodes']} nodes, {meta['device']}"
        plot_oracle(rows, interpolated, SPECLA, title, results.path.with_name("oracle.png"))
    print(f"\n{benching.verdicts(targets(results))}\n\n{results.path}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="folder of a target")
    parser.add_argument("--drafter", type=Path, help="folder of an EAGLE drafter for --target")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="of random weights; gdn-1.3b by default")
    parser.add_argument("--random-weights", action="store_true", help="what there is without --target")
    parser.add_argument("--only", nargs="+", choices=("verify", "draft", "oracle", "peers"), help="sections")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="rows; the oracle takes the first")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16], help="of verify")
    parser.add_argument("--depth", type=int, nargs="+", default=[5, 7], help="drafts of the chains")
    parser.add_argument("--oracle", type=float, nargs="*", metavar="P", help="probabilities; without any, a range")
    parser.add_argument("--method", choices=("chain", "tree"), default="chain", help="of the oracle")
    parser.add_argument("--packed", choices=("mosaic_gpu", "reference"), help="verify and draft over packed weights")
    parser.add_argument("--tokens", type=int, default=1024, help="a generation's length at most, a power of two")
    parser.add_argument("--repeats", type=int, default=5, help="samples that a median is taken of")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("out/bench_decode"))
    parser.add_argument("--report", action="store_true", help="only show what is in --out, of a run that was cut")
    args = parser.parse_args(arguments)
    try:
        if args.report:
            report(Results.read(args.out / "bench_decode.json"))
        else:
            report(run(args))
    except UserError as error:
        stop(str(error))


def check(args: argparse.Namespace) -> None:
    """Raises UserError for arguments that do not go together."""
    if args.target is not None and (args.shape is not None or args.random_weights):
        raise UserError("--shape and --random-weights must be given without --target, which has its own")
    if args.drafter is not None and args.target is None:
        raise UserError("--drafter needs the --target that it was trained for")
    for p in args.oracle or ():
        if not 0 <= p <= 1:
            raise UserError(f"--oracle must be 0 to 1, got {p:g}")
    for name, least in (("batch", 1), ("nodes", 1), ("depth", 1)):
        if min(getattr(args, name)) < least:
            raise UserError(f"--{name} must be {least} or more, got {min(getattr(args, name))}")
    if args.repeats < 1:
        raise UserError(f"--repeats must be 1 or more, got {args.repeats}")
    longest = max(*args.nodes, *(depth + 1 for depth in args.depth), ORACLE.nodes)
    least = max(64, 1 << (4 * longest - 1).bit_length())
    if args.tokens < least or args.tokens & (args.tokens - 1):
        raise UserError(
            f"--tokens must be a power of two and at least {least} for drafts of {longest} nodes, got {args.tokens}"
        )


def run(args: argparse.Namespace) -> Results:
    """Measures; what the rows are held against is measured first."""
    check(args)
    on_gpu, shape = jax.default_backend() == "gpu", args.shape or "gdn-1.3b"
    if not on_gpu and args.target is None and shape != "tiny":
        raise UserError("times need an NVIDIA GPU; --shape tiny runs the script without one")
    if args.packed == "mosaic_gpu" and not on_gpu:
        raise UserError("--packed mosaic_gpu needs an NVIDIA GPU; --packed reference runs without one")
    sections = args.only or ["verify", "draft", *(["oracle"] if args.oracle is not None else []), "peers"]
    model = (
        random_target(SHAPES[shape], args.dtype) if args.target is None else load_target(args.target, dtype=args.dtype)
    )
    drafter = (
        random_drafter(model, args.packed)
        if args.drafter is None
        else get_drafter(args.drafter, TREE, model, args.packed)
    )
    args.out.mkdir(parents=True, exist_ok=True)
    read = read_bandwidth(**({} if on_gpu else {"size": 2**24}))
    fla = Fla(Timing(repeats=args.repeats)) if "peers" in sections else None
    meta = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "flash-linear-attention": fla and fla.version,
        "date": time.strftime("%Y-%m-%d"),
        "target": shape if args.target is None else args.target.name,
        "drafter": "random" if args.drafter is None else args.drafter.name,
        "dtype": args.dtype,
        "packed": args.packed,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "compilation_cache": jax.config.values["jax_compilation_cache_dir"] is not None,
        "read_gbps": read / 1e9,
    }
    print("  ".join(f"{key}={show(value)}" for key, value in meta.items()), flush=True)
    results = Results(args.out / "bench_decode.json", meta)
    bench = Bench(
        model=model,
        drafter=drafter,
        tokens=args.tokens,
        repeats=args.repeats,
        read=read,
        results=results,
        packed=args.packed,
    )
    verified = [one for batch in args.batch for one in fillers(batch, args.nodes)] if "verify" in sections else []
    grown = [one for batch in args.batch for one in drafts(bench, batch, args.depth)] if "draft" in sections else []
    bench.compile([*map(Rounds, args.batch), *verified, *grown])
    if "verify" in sections:
        for batch in args.batch:
            bench.ar(batch)
    verify(bench, verified)
    drafted(bench, grown)
    if "oracle" in sections:
        oracle(bench, args.batch[0], args.method, args.oracle or PROBABILITIES)
    if fla is not None:
        peers(bench, args.batch, fla)
    return results


if __name__ == "__main__":
    main()
