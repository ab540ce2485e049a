"""The benchmark of the kernels runs without a GPU at tiny sizes; its figures then mean nothing, its form does."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import stream_matmul


def test_a_tiny_run_writes_its_figures(scripts, tmp_path, capsys):
    options = ["--shape", "tiny", "--batch", "1", "--nodes", "6", "--layers", "2", "--repeats", "1"]
    scripts("bench_kernels").main([*options, "--implementation", "reference", "--out", str(tmp_path)])
    data = json.loads((tmp_path / "bench_kernels.json").read_text())
    assert [(row["batch"], row["nodes"]) for row in data["verify"]] == [(1, 6)]
    for row in data["verify"]:
        assert row["difference"] < 2e-6  # ours, walk and replay compute the same
        assert row["us"] > 0
        assert row["over_walk"] == pytest.approx(min(row["walk_us"], row["walk_keep_us"]) / row["us"])
        assert row["fla_us"] is None or row["fla_us"] > 0
    assert [len(data[section]) for section in ("size", "recover", "prefill", "conv")] == [1, 1, 1, 1]
    assert [row["product"] for row in data["matmul"]] == ["in", "o", "gate_up", "down", "head", "layer"]
    alone = {row["product"]: row["bytes"] for row in data["matmul"]}
    assert alone["layer"] == sum(alone[name] for name in ("in", "o", "gate_up", "down"))
    assert (tmp_path / "verify.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert "a state over a node's factors" in printed
    assert "times the walk" in printed

    (tmp_path / "verify.png").unlink()
    scripts("bench_kernels").main(["--report", "--out", str(tmp_path)])
    assert capsys.readouterr().out == printed[printed.index("\ntargets") :]
    assert (tmp_path / "verify.png").exists()


def test_a_gpu_is_asked_for_in_one_line(scripts, tmp_path, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as stop:
        scripts("bench_kernels").main(["--out", str(tmp_path / "new")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: times need an NVIDIA GPU; --shape tiny runs the script without one"
    ]
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit):
        scripts("bench_kernels").main(["--report", "--out", str(tmp_path / "new")])
    assert "does not exist" in capsys.readouterr().err


def test_tune_goes_on_after_a_tile_that_fails(scripts, tmp_path, capsys, monkeypatch):
    """Without a GPU every tile fails; each is named, and nothing stops."""
    if jax.default_backend() == "gpu":
        pytest.skip("they run")
    bench = scripts("bench_kernels")
    monkeypatch.setitem(bench.TUNE, "verify", [(build, tiles[:1]) for build, tiles in bench.TUNE["verify"]])
    options = ["--shape", "tiny", "--batch", "1", "--nodes", "1", "--tune", "--only", "verify"]
    bench.main([*options, "--out", str(tmp_path)])
    assert capsys.readouterr().out.count(" fails: ") == 2


def test_the_products_of_a_layer(scripts):
    """Sizes of the 1.3B model; they are those of the products that a launch makes of their weights."""
    bench, products = scripts("bench_kernels"), scripts("bench_products")
    matrices = products.matrices(bench.SHAPES["1.3b"])
    assert {name: (matrix.depth, matrix.features) for name, matrix in matrices.items()} == {
        "in": (2048, 8208),
        "o": (2048, 2048),
        "gate_up": (2048, 5632),
        "down": (5632, 2048),
        "head": (2048, 32000),
    }
    for matrix in products.matrices(bench.SHAPES["tiny"]).values():
        product = matrix.product(products.packed(matrix, 0))
        assert (product.weights.shape[1], product.width) == (matrix.depth, matrix.features)
        assert product.weights.nbytes >= matrix.moved


def test_a_launch_of_a_layer_ends_with_the_projection_of_the_next(scripts):
    bench, products = scripts("bench_kernels"), scripts("bench_products")
    shape = bench.SHAPES["tiny"]
    matrices = products.matrices(shape)
    launches = products.chains(shape)
    assert len(launches) == shape.layers == 2
    for i, launch in enumerate(launches):
        o, gate_up, down, into = (products.packed(matrices[name], i) for name in ("o", "gate_up", "down", "in"))
        assert [w is own for w, own in zip(launch, (o, gate_up, down, into), strict=True)] == [True] * 3 + [False]
        assert launches[1 - i][-1] is into


@pytest.mark.parametrize("tokens", [6, 8])
def test_a_step_of_a_layers_loop_is_its_products_one_by_one(scripts, monkeypatch, tokens):
    bench, loops, products = scripts("bench_kernels"), scripts("bench_loops"), scripts("bench_products")
    counters = set()

    def run(*args, arrivals, **options):
        counters.add((*arrivals[0].shape, arrivals[1]))
        return stream_matmul(*args, **options)

    monkeypatch.setattr(products, "stream_matmul", run)
    shape = bench.SHAPES["tiny"]
    matrices = products.matrices(shape)
    timing = scripts("benching").Timing(repeats=1, seconds=1e-9)
    loop = products.layer_loop(loops.Setup(shape=shape, timing=timing), tokens, "reference")
    assert loop.steps == 1
    assert counters == {(2, 8, 0), (2, 8, 1)}  # no two launches count in the same row

    mixed, hidden, blank = jax.tree.map(jnp.copy, loop.carry)
    assert mixed.shape == (8, matrices["o"].depth)
    *after, made = loop.program(loop.carry, loop.fixed)
    for launch, projected in zip(loop.fixed, made, strict=True):
        x = mixed
        for name, weights in zip(products.CHAIN, launch, strict=True):
            product = matrices[name].product(weights)
            residual = hidden if product.ends == "residual" else None
            (x,) = stream_matmul(x, [product], tokens=tokens, residual=residual, eps=products.EPS)
            hidden = hidden if residual is None else x
        assert x.shape == projected.shape == (tokens, matrices["in"].features)
        np.testing.assert_allclose(projected, x, atol=0.05)  # of bf16 on its way
        mixed = jnp.zeros_like(mixed).at[:tokens].set(x[:, : mixed.shape[1]].astype(mixed.dtype))
    for found, expected in zip(after, (mixed, hidden), strict=True):
        np.testing.assert_allclose(*(y.astype(jnp.float32) for y in (found, expected)), atol=0.05)
    assert [y.shape for y in blank] == [y.shape for y in made]


def test_the_tree_has_four_nodes_a_level(scripts):
    tree = scripts("bench_loops").tree
    assert tree(3).tolist() == [-1, 0, 1]
    for nodes in (6, 8, 16, 33, 64):
        parents = tree(nodes)
        assert (parents < np.arange(nodes)).all()
        assert (parents[1:] >= 0).all()
        depth = [0]
        for parent in parents[1:]:
            depth.append(depth[parent] + 1)
        counts = np.bincount(depth)
        assert counts[0] == 1
        assert (counts[1:-1] == 4).all()
        assert len(counts) == 1 + -(-(nodes - 1) // 4)


def test_targets_take_the_worst_figure(scripts, tmp_path):
    benching = scripts("benching")
    results = benching.Results(tmp_path / "x.json", {})
    verify = {"us": 9.0, "over_walk": 8.0, "over_fla": None}
    results.add("verify", verify | {"batch": 1, "nodes": 32})
    results.add("verify", verify | {"batch": 16, "nodes": 32, "over_walk": 0.9, "us": 40.0})
    results.add("size", {"ratio": 169.8})
    found = {row["target"]: row for row in scripts("bench_kernels").targets(results)}
    assert found["verify, batch 1, 32 nodes: times the walk"]["met"] is True
    assert found["verify, batch 16, 32 nodes: times the walk"]["met"] is False
    assert found["verify, 4 nodes or more: times the walk"]["worst"] == 0.9
    assert found["verify, batch 1, 32 nodes: us"]["met"] is True
    assert found["verify, batch 1, 16 nodes: us"]["met"] is None
    assert found["verify, chain of 8: times flash-linear-attention"]["met"] is None
    assert found["a state over a node's factors"]["met"] is True


def test_a_loop_repeats_its_step(scripts):
    benching = scripts("benching")
    timing = benching.Timing(repeats=2, seconds=1e-5)
    loop = benching.Loop(lambda x, y: x + y, jnp.zeros(()), jnp.ones(()), moved=4, launches=1, timing=timing)
    assert loop.steps == 4
    assert loop.seconds() > 0
    assert int(loop.carry) % loop.steps == 0
    assert int(loop.carry) >= 5 * loop.steps


def test_copies_of_a_state_are_seen(scripts):
    text = "%a = f32[2,256,512]{2,1,0} copy(%b)\n  ROOT %c = bf16[16,4]{1,0:T(8)} copy(f32[9] %d)\n"
    assert scripts("benching")._large_copies(text) == 1


def test_the_fastest_candidate_comes_first(scripts, capsys):
    class Timed:
        def __init__(self, seconds: float) -> None:
            self.time = 1 / seconds

        def seconds(self, repeats: int) -> float:
            return self.time

    ranked = scripts("benching").fastest([1, 0, 4, 2], Timed, "tile")
    assert [candidate for _, candidate in ranked] == [4, 2, 1]
    assert "tile 0 fails: ZeroDivisionError" in capsys.readouterr().out
