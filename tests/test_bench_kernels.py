"""The benchmark of the kernels runs without a GPU at tiny sizes; its figures then mean nothing, its form does."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest


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
    products = scripts("bench_products")
    monkeypatch.setattr(products.Product, "tiles", lambda product: [products.Tile(depth=64)])
    bench.main([*options[:-1], "matmul", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count(" fails: ") == 5


def test_candidates_for_products(scripts):
    """No two are the same when they are cut to the depth, and only whole sums are normed."""
    products = scripts("bench_products").products(scripts("bench_kernels").SHAPES["1.3b"])
    assert [product.features for product in products.values()] == [8208, 2048, 5632, 2048, 32000]
    assert {tile.split for tile in products["in"].tiles()} == {1}
    tiles = products["down"].tiles()
    assert {(tile.depth, tile.split) for tile in tiles} >= {(128, 4), (256, 2), (64, 8)}
    assert (256, 4) not in {(tile.depth, tile.split) for tile in tiles}
    assert len(tiles) == len(set(tiles))


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
