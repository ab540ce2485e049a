"""Times the kernels against other ways to do the same: python scripts/bench_kernels.py [--only verify recover ...].

Sections: size (bytes of the factors), verify (a draft tree, against a state a node, replay, and the chain of
flash-linear-attention), recover (against running the accepted tokens again), prefill, conv (what stands before
verification), matmul (the products of a layer, one by one and in one launch, and the head, against XLA's). Every figure
is a median over calls of one compiled loop over all layers, each with a state of its own; the values of a layer are the
outputs of the layer before. Per cent are of the bandwidth measured in the same run.
OUT/bench_kernels.json is written anew after every row. Tables and OUT/verify.png come at the end; for a run that was
cut, --report makes them of what it has written.

With --tune the candidate tiles of each op that has any are timed instead, the best first.
"""

import argparse
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the card; read when jax is imported

import bench_loops as loops
import bench_plots
import bench_products
import benching
import jax
from bench_loops import PATH, Columns, Setup, Shape
from benching import Fla, Loop, Results, Timing, fastest, nbytes, ratio, scaled, show, table

from kernels_pallas import gdn_verify
from kernels_pallas.tiles import Tile
from kernels_pallas.tree_conv.tiles import Tile as ConvTile

SCAN = 16, 6  # nodes and layers with which the tile of a baseline is chosen

SHAPES = {
    "1.3b": Shape(  # m-a-p/1.3B-100B-GatedDeltaNet-pure
        layers=24,
        heads=8,
        value_heads=8,
        dk=256,
        dv=256,
        hidden=2048,
        mlp=5632,
        vocabulary=32000,
        prefill=(8, 4096),
        batches=(1, 16, 32),
        full=(1, 2, 4, 8, 16, 32, 64, 128),
        recover=(1, 8, 32),
        nodes=(1, 4, 8, 16, 32, 64),
        tokens=(1, 16, 32, 64),
        tiles=((16, 2), (16, 4), (32, 4), (64, 8)),
    ),
    "tiny": Shape(
        layers=2,
        heads=2,
        value_heads=4,
        dk=16,
        dv=32,
        hidden=64,
        mlp=128,
        vocabulary=192,
        prefill=(2, 64),
        batches=(1, 2),
        full=(1, 2, 3),
        recover=(1,),
        nodes=(1, 6),
        tokens=(1, 6),
        tiles=((16, 2),),
    ),
}

# The candidates of --tune: columns, rows, warps, stages. Few columns fill the card at batch 1, many read less twice.
_VERIFY = (
    *((8, 0, 4, 1), (16, 0, 4, 1), (64, 0, 4, 1), (64, 0, 8, 1)),
    *((8, 64, 4, 5), (16, 64, 2, 5), (16, 64, 4, 5), (16, 64, 8, 5), (32, 64, 4, 5), (32, 64, 8, 5)),
    *((32, 32, 1, 4), (32, 64, 2, 3), (32, 32, 2, 4), (64, 32, 2, 4), (64, 32, 4, 4), (64, 64, 4, 3), (128, 32, 4, 3)),
)
_RECOVER = (
    *((16, 0, 4, 1), (32, 0, 4, 1), (32, 0, 8, 1), (32, 64, 2, 1), (32, 64, 4, 1), (32, 128, 4, 1)),
    *((64, 32, 2, 1), (64, 32, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (64, 128, 8, 1)),
    *((128, 32, 4, 1), (128, 64, 8, 1), (256, 16, 4, 1), (256, 32, 4, 1), (256, 32, 8, 1)),
)
_PREFILL = (  # all of dk
    *((16, 0, 4, 1), (16, 0, 4, 2), (32, 0, 4, 1), (32, 0, 4, 2), (32, 0, 8, 1), (64, 0, 4, 1), (64, 0, 8, 1)),
)
_CONV = [(nodes, warps) for nodes in (1, 2, 4, 8, 16) for warps in (1, 2, 4, 8)]


def _tiles(candidates: Sequence[tuple[int, int, int, int]]) -> list[Tile]:
    return [Tile(columns=columns, rows=rows, warps=warps, stages=stages) for columns, rows, warps, stages in candidates]


_MOSAIC = [
    Tile(columns=columns, stages=stages)
    for columns, all_stages in ((16, (2, 4)), (32, (2,)), (64, (4, 8, 16)), (128, (2, 3, 5)), (256, (1, 2, 3)))
    for stages in all_stages
]
TUNE: dict[str, Sequence[tuple[Callable[..., Loop], Sequence[Any]]]] = {
    "verify": [
        (loops.verify_loop, _tiles(_VERIFY)),
        (functools.partial(loops.verify_loop, kind="mosaic_gpu"), _MOSAIC),
    ],
    "recover": [(loops.recover_loop, _tiles(_RECOVER))],
    "prefill": [
        (loops.prefill_loop, _tiles(_PREFILL)),
        (functools.partial(loops.prefill_loop, kind="mosaic_gpu"), [Tile(columns=64), Tile(columns=128)]),
    ],
    "conv": [(loops.conv_loop, [ConvTile(nodes=nodes, warps=warps) for nodes, warps in _CONV])],
}


@dataclass(kw_only=True)
class Bench:
    """What the sections share. ``read`` and ``copy`` are measured bandwidths in bytes a second."""

    setup: Setup
    batches: Sequence[int]
    nodes: Sequence[int]
    tokens: Sequence[int]
    results: Results
    fla: Fla
    read: float
    copy: float
    all_tiles: bool
    chosen: dict[tuple[str, int, int], Columns | None] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return self.setup.shape

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.shape.heads, self.shape.value_heads, self.shape.dk, self.shape.dv

    def baseline(self, kind: str, batch: int, nodes: int, scan: Callable, build: Callable) -> tuple[float | None, str]:
        """Seconds of a step of ``build(nodes, tile)`` with the fastest tile, and that tile.

        ``scan(nodes, tile)`` makes a shorter loop, in which tiles are compared: once a batch, or at every ``nodes``.
        """
        at = nodes if self.all_tiles else SCAN[0]
        if (kind, batch, at) not in self.chosen:
            tiles = self.shape.tiles
            if len(tiles) > 1:
                tiles = [tile for _, tile in fastest(tiles, lambda tile: scan(at, tile), kind)]
            self.chosen[kind, batch, at] = tiles[0] if tiles else None
        tile = self.chosen[kind, batch, at]
        timed = fastest([tile] if tile else [], lambda tile: build(nodes, tile), kind, self.setup.timing.repeats)
        return (timed[0][0], "{}x{}".format(*tile)) if tile and timed else (None, "-")


def size(bench: Bench) -> None:
    """Bytes of a node's factors in a layer against a copy of the state; then both with the convolution's part."""
    shape, nodes = bench.shape, 16
    state = jax.ShapeDtypeStruct((1, *shape.state), jax.numpy.float32)
    args = *loops.inputs(shape, 1, nodes), state, loops.every_row(1, loops.tree(nodes))
    _, written = jax.eval_shape(lambda *x: gdn_verify(*x, implementation=bench.setup.implementation), *args)
    factors, snapshot, channels = nbytes(written) // nodes, nbytes(state), 2 * shape.channels
    row = {
        "factor_bytes": factors,
        "state_bytes": snapshot,
        "ratio": snapshot / factors,
        "ratio_with_conv": (snapshot + (shape.taps - 1) * channels) / (factors + channels),
    }
    bench.results.add("size", row)


def verify(bench: Bench) -> None:
    """Every batch and number of nodes; a chain is timed with the program of the tree."""
    for batch in bench.batches:
        state = loops.states(bench.shape, batch)
        states = list(state)
        for nodes in bench.nodes:
            bench.results.add("verify", verify_row(bench, batch, nodes, state, states))


def verify_row(bench: Bench, batch: int, nodes: int, state: jax.Array, states: list[jax.Array]) -> dict[str, Any]:
    """The figures of one batch and number of nodes, a layer."""
    setup, layers = bench.setup, bench.shape.layers
    loop = loops.verify_loop(setup, batch, nodes, state=state)
    moved, seconds = loop.moved // layers, loop.seconds() / layers
    chain = (*loop.fixed[:-1], loops.every_row(batch, loops.chain(nodes)))
    chain_seconds = loop.seconds(chain) / layers
    del loop, chain
    row: dict[str, Any] = {
        "batch": batch,
        "nodes": nodes,
        "us": 1e6 * seconds,
        "chain_us": 1e6 * chain_seconds,
        "bytes": moved,
        "gbps": moved / seconds / 1e9,
        "percent": 100 * moved / seconds / bench.read,
    }
    few = states[: SCAN[1]]
    kinds: dict[str, Callable[[int, Columns, list[jax.Array]], Loop]] = {
        "walk": lambda n, tile, s: loops.walk_loop(setup, batch, n, tile, s, keep=False),
        "walk_keep": lambda n, tile, s: loops.walk_loop(setup, batch, n, tile, s, keep=True),
        "replay": lambda n, tile, s: loops.replay_loop(setup, batch, n, tile, s),
    }
    for kind, make in kinds.items():
        total, tile = bench.baseline(
            *(kind, batch, nodes),
            scan=lambda n, tile, make=make: make(n, tile, few),
            build=lambda n, tile, make=make: make(n, tile, states),
        )
        row |= {f"{kind}_us": scaled(total, 1e6 / layers), f"{kind}_tile": tile}
    row["fla_us"] = scaled(bench.fla.chain(batch, nodes, bench.sizes, layers), 1e6)
    walks = [row[key] for key in ("walk_us", "walk_keep_us") if row[key] is not None]
    row["over_walk"] = ratio(min(walks, default=None), row["us"])
    row["over_replay"] = ratio(row["replay_us"], row["us"])
    row["over_fla"] = ratio(row["fla_us"], row["chain_us"])
    row["difference"] = loops.difference(setup, batch, nodes, states[0])
    return row


def recover(bench: Bench) -> None:
    """A path of 8 of 16 nodes, all layers, against two ways to run its tokens again."""
    setup, nodes = bench.setup, 2 * PATH
    for batch in bench.shape.recover:
        loop = loops.recover_loop(setup, batch, nodes)
        seconds, moved, states = loop.seconds(), loop.moved, nbytes(loop.carry[0])
        del loop

        def build(nodes: int, tile: Columns, batch: int = batch) -> Loop:
            return loops.token_replay_loop(setup, batch, nodes, tile)

        replay, tile = bench.baseline("token_replay", batch, nodes, scan=build, build=build)
        steps = PATH * loops.decode_steps_loop(setup, batch).seconds()
        row = {
            "batch": batch,
            "us": 1e6 * seconds,
            "bytes": moved,
            "gbps": moved / seconds / 1e9,
            "percent": 100 * moved / seconds / bench.copy,
            "floor_us": 2e6 * states / bench.copy,
            "token_replay_us": scaled(replay, 1e6),
            "token_replay_tile": tile,
            "decode_steps_us": 1e6 * steps,
            "over_token_replay": ratio(replay, seconds),
            "over_decode_steps": ratio(steps, seconds),
        }
        bench.results.add("recover", row)


def prefill(bench: Bench) -> None:
    """One layer forward over a batch of prompts."""
    batch, tokens = bench.shape.prefill
    loop = loops.prefill_loop(bench.setup, batch, tokens)
    seconds = loop.seconds()
    fla = bench.fla.prefill(batch, tokens, bench.sizes)
    row = {
        "batch": batch,
        "tokens": tokens,
        "ms": 1e3 * seconds,
        "bytes": loop.moved,
        "percent": 100 * loop.moved / seconds / bench.read,
        "fla_ms": scaled(fla, 1e3),
        "over_fla": ratio(fla, seconds),
    }
    bench.results.add("prefill", row)


def conv(bench: Bench) -> None:
    """``tree_conv`` alone, and with the verification that follows it."""
    layers = bench.shape.layers
    for batch in bench.batches:
        state = loops.states(bench.shape, batch)
        for nodes in bench.nodes:
            loop = loops.conv_loop(bench.setup, batch, nodes)
            seconds, moved = loop.seconds() / layers, loop.moved // layers
            del loop
            both = loops.conv_loop(bench.setup, batch, nodes, state=state).seconds() / layers
            row = {"batch": batch, "nodes": nodes, "us": 1e6 * seconds, "bytes": moved, "gbps": moved / seconds / 1e9}
            bench.results.add("conv", row | {"with_verify_us": 1e6 * both})


def matmul(bench: Bench) -> None:
    """Every product alone, then the four of a layer in one launch."""
    setup, layers = bench.setup, bench.shape.layers
    best = "reference" if setup.interpret or setup.implementation == "reference" else "mosaic_gpu"

    def add(name: str, tokens: int, count: int, build: Callable[[Any], Loop]) -> None:
        loop = build(best)
        seconds, moved = loop.seconds() / count, loop.moved // count
        del loop
        plain = build("reference").seconds() / count
        row = {"product": name, "tokens": tokens, "us": 1e6 * seconds, "bytes": moved, "gbps": moved / seconds / 1e9}
        row |= {"percent": 100 * moved / seconds / bench.read, "xla_us": 1e6 * plain, "over_xla": plain / seconds}
        bench.results.add("matmul", row)

    for name, matrix in bench_products.matrices(bench.shape).items():
        for tokens in bench.tokens:
            add(name, tokens, matrix.copies, functools.partial(bench_products.product_loop, setup, matrix, tokens))
    for tokens in bench.tokens:
        add("layer", tokens, layers, functools.partial(bench_products.layer_loop, setup, tokens))


SECTIONS = {"size": size, "verify": verify, "recover": recover, "prefill": prefill, "conv": conv, "matmul": matmul}


def tune(bench: Bench, ops: Sequence[str], layers: int) -> None:
    """Times the candidates of each op, ``layers`` of them in a loop, and keeps them in order."""
    few = replace(bench.setup, shape=replace(bench.shape, layers=min(layers, bench.shape.layers)))
    for op, (build, candidates) in ((name, way) for name in TUNE if name in ops for way in TUNE[name]):
        setup, launches, grid = few, few.shape.layers, [(batch, n) for batch in bench.batches for n in bench.nodes]
        if op == "recover":  # all layers are one launch
            setup, launches, grid = bench.setup, 1, [(batch, 2 * PATH) for batch in bench.shape.recover]
        elif op == "prefill":
            setup, launches, grid = bench.setup, 1, [bench.shape.prefill]
        for batch, n in grid:

            def run(tile: Any, batch: int = batch, n: int = n, build: Any = build, setup: Setup = setup) -> Loop:
                return build(setup, batch, n, tile)

            print(f"{op}, batch {batch}, {n} {'tokens' if op == 'prefill' else 'nodes'}", flush=True)
            for seconds, tile in fastest(candidates, run, op, repeats=5):
                row = {"op": op, "batch": batch, "nodes": n, "us": 1e6 * seconds / launches, "tile": str(tile)}
                bench.results.add("tune", row)


def targets(results: Results) -> list[dict[str, Any]]:
    """What the kernels are to reach, and whether the figures do; met is None for what was not measured."""
    found: list[dict[str, Any]] = []

    def add(what: str, bound: float, values: Sequence[float | None], most: bool) -> None:
        found.append(benching.judge(what, bound, values, most=most))

    rows = results.rows("verify")

    def at(key: str, batch: int | None = None, nodes: int | None = None, least: int = 0) -> list[float | None]:
        return [
            row[key]
            for row in rows
            if batch in (None, row["batch"]) and nodes in (None, row["nodes"]) and row["nodes"] >= least
        ]

    for batch in (1, 16):
        add(f"verify, batch {batch}, 32 nodes: times the walk", 7.7, at("over_walk", batch, 32), most=False)
    add("verify, 4 nodes or more: times the walk", 1, at("over_walk", least=4), most=False)
    add("verify, batch 1, 16 nodes: us", 8, at("us", 1, 16), most=True)
    add("verify, batch 1, 32 nodes: us", 10, at("us", 1, 32), most=True)
    for nodes in (1, 8):
        add(f"verify, chain of {nodes}: times flash-linear-attention", 1, at("over_fla", nodes=nodes), most=False)
    add("verify, batch 32, 16 nodes: us", 30, at("us", 32, 16), most=True)
    for percent in at("percent", 32, 16):  # shown beside it, without a bound
        found.append({"target": "verify, batch 32, 16 nodes: % of the bandwidth", "worst": percent, "met": None})
    recovery = results.rows("recover")
    add("recovery over the states read and written", 2, [row["us"] / row["floor_us"] for row in recovery], most=True)
    add(f"recovery: times {PATH} decode steps", 2.74, [row["over_decode_steps"] for row in recovery], most=False)
    add("recovery: times fused token replay", 1, [row["over_token_replay"] for row in recovery], most=False)
    add("a state over a node's factors", 120, [row["ratio"] for row in results.rows("size")], most=False)
    add("prefill: times flash-linear-attention", 1, [row["over_fla"] for row in results.rows("prefill")], most=False)
    layer = {row["tokens"]: row for row in results.rows("matmul") if row["product"] == "layer"}
    add("products of a layer, 1 token: % of the bandwidth", 70, [layer[1]["percent"]] if 1 in layer else [], most=False)
    for tokens, bound in ((16, 1.1), (32, 1.2), (64, 1.5)):
        known = [layer[tokens]["us"] / layer[1]["us"]] if {1, tokens} <= layer.keys() else []
        add(f"products of a layer, {tokens} tokens: times 1 token", bound, known, most=True)
    return found


COLUMNS = {
    "tune": "op batch nodes us tile",
    "size": "factor_bytes state_bytes ratio ratio_with_conv",
    "verify": "batch nodes us chain_us bytes gbps percent walk_us walk_keep_us replay_us fla_us over_walk over_replay "
    "over_fla difference",
    "recover": "batch us bytes gbps percent floor_us token_replay_us decode_steps_us over_token_replay "
    "over_decode_steps",
    "prefill": "batch tokens ms bytes percent fla_ms over_fla",
    "conv": "batch nodes us bytes gbps with_verify_us",
    "matmul": "product tokens us bytes gbps percent xla_us over_xla",
}


def report(results: Results) -> None:
    """The targets, then the tables; and the figure, beside the results."""
    if any(results.rows(section) for section in SECTIONS):
        print(f"\n{benching.verdicts(targets(results))}")
    for section, columns in COLUMNS.items():
        if rows := results.rows(section):
            print(f"\n{section}\n{table(rows, {key: key.replace('_', ' ') for key in columns.split()})}")
    if rows := results.rows("verify"):
        meta = results.data["meta"]
        floor = 4 * math.prod(SHAPES[meta["shape"]].state) / (1e9 * meta["read_gbps"])
        bench_plots.plot_verify(rows, floor, results.path.with_name("verify.png"))
    print(f"\n{results.path}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS), help="sections, or ops")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1.3b")
    parser.add_argument("--batch", type=int, nargs="+", help="batches of verify and conv")
    parser.add_argument("--nodes", type=int, nargs="+", help="numbers of nodes of verify and conv, of tokens of matmul")
    parser.add_argument("--layers", type=int, help="layers, each with its own state")
    parser.add_argument("--full", action="store_true", help="all batches from 1 to 128")
    parser.add_argument("--all-tiles", action="store_true", help="try the baselines' tiles at every number of nodes")
    parser.add_argument("--tune", action="store_true", help="time candidate tiles of the ops that --only names")
    parser.add_argument("--tune-layers", type=int, default=6, help="layers in a loop of --tune")
    parser.add_argument("--implementation", choices=("triton", "reference"), help="of ours; the best one by default")
    parser.add_argument("--repeats", type=int, default=20, help="samples that a median is taken of")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--report", action="store_true", help="only show what is in --out, of a run that was cut")
    args = parser.parse_args(arguments)

    if args.report:
        return report(Results.read(args.out / "bench_kernels.json"))
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and args.shape != "tiny":
        benching.stop("times need an NVIDIA GPU; --shape tiny runs the script without one")
    args.out.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[args.shape]
    if args.layers:
        shape = replace(shape, layers=args.layers)
    timing = Timing(repeats=args.repeats, seconds=0.005 if on_gpu else 1e-9)
    start = time.perf_counter()
    small = {} if on_gpu else {"size": 2**24}
    read, copy = benching.read_bandwidth(**small), benching.copy_bandwidth(**small)
    fla = Fla(timing)
    meta = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "flash-linear-attention": fla.version,
        "date": time.strftime("%Y-%m-%d"),
        "shape": args.shape,
        "layers": shape.layers,
        "repeats": args.repeats,
        "implementation": args.implementation,
        "read_gbps": read / 1e9,
        "copy_gbps": copy / 1e9,
    }
    print("  ".join(f"{key}={show(value)}" for key, value in meta.items()), flush=True)
    bench = Bench(
        setup=Setup(shape=shape, timing=timing, implementation=args.implementation),
        batches=args.batch or (shape.full if args.full else shape.batches),
        nodes=args.nodes or shape.nodes,
        tokens=args.nodes or shape.tokens,
        results=Results(args.out / "bench_kernels.json", meta),
        fla=fla,
        read=read,
        copy=copy,
        all_tiles=args.all_tiles,
    )
    if args.tune:
        tune(bench, args.only, args.tune_layers)
    else:
        for name in (name for name in SECTIONS if name in args.only):
            SECTIONS[name](bench)
            print(f"{name} done after {time.perf_counter() - start:.0f} s", flush=True)
    report(bench.results)


if __name__ == "__main__":
    main()
