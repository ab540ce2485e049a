"""The benchmark of decoding runs without a GPU at a tiny size; its times then mean nothing, its counts do."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specla_jax.config import DraftConfig
from specla_jax.decode_step import DecodeStep
from specla_jax.drafters import Context, ScriptedDrafter, script_chain, script_trees
from specla_jax.generate import generate

TINY = ["--shape", "tiny", "--random-weights", "--dtype", "float32", "--tokens", "64", "--repeats", "1"]


def test_a_tiny_run_writes_its_figures(scripts, tmp_path, capsys):
    bench, out = scripts("bench_decode"), ["--out", str(tmp_path)]
    bench.main([*TINY, "--batch", "1", "--nodes", "1", "3", "--depth", "2", "--oracle", "0", "0.5", "1", *out])
    data = json.loads((tmp_path / "bench_decode.json").read_text())
    rounds = {row["method"]: row for row in data["rounds"]}
    assert [(row["method"], row["depth"], row["nodes"]) for row in data["rounds"]] == [
        ("ar", 0, 1),
        ("verify", 2, 3),
        ("chain", 2, 3),
        ("tree", 6, 16),
    ]
    assert rounds["ar"]["round_cost"] == rounds["ar"]["speedup"] == rounds["ar"]["accepted_length"] == 1
    assert rounds["verify"]["drafted"] == rounds["chain"]["drafted"] == 2
    assert rounds["verify"]["floor_ms"] == rounds["ar"]["floor_ms"] < rounds["chain"]["floor_ms"]
    assert all(row["compile_s"] > 0 for row in data["rounds"])

    wrong, half, right = data["oracle"]
    assert [row["p"] for row in data["oracle"]] == [0, 0.5, 1]
    assert [row["expected_length"] for row in data["oracle"]] == pytest.approx([1, 2 - 0.5**7, 8])
    assert (wrong["accepted_length"], right["accepted_length"]) == (1, 8)
    assert 1 < half["accepted_length"] < 8
    assert [row["compile_s"] > 0 for row in data["oracle"]] == [True, False, False]  # one program
    assert all(row["near_ties"] == 0 for row in data["rounds"] + data["oracle"])
    (peer,) = data["peers"]
    assert peer["unpacked_ms"] is None  # nothing is packed
    assert all(peer[f"{way}_ms"] is None or peer[f"{way}_ms"] > 0 for way in ("generate", "eager", "graph"))
    assert (tmp_path / "oracle.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert "breaks even at p = " in printed
    assert "oracle, chain of 8, p = 1: speed-up" in printed

    (tmp_path / "oracle.png").unlink()
    bench.main(["--report", *out])
    assert capsys.readouterr().out == printed[printed.index("\nrounds\n") :]
    assert (tmp_path / "oracle.png").exists()


def test_packed_weights_give_the_same_rounds(scripts, tmp_path, monkeypatch):
    bench, used = scripts("bench_decode"), []
    verify = DecodeStep.verify
    monkeypatch.setattr(
        DecodeStep, "verify", lambda self, *args: used.append(self.implementation) or verify(self, *args)
    )
    options = ["--only", "draft", "peers", "--batch", "1", "--depth", "2", "--packed", "reference"]
    bench.main([*TINY, *options, "--out", str(tmp_path)])
    data = json.loads((tmp_path / "bench_decode.json").read_text())
    assert [(row["method"], row["near_ties"]) for row in data["rounds"]] == [("ar", 0), ("chain", 0), ("tree", 0)]
    assert set(used) == {data["meta"]["packed"]} == {"reference"}
    assert isinstance(data["peers"][0]["unpacked_ms"], float)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "x", "--shape", "tiny"], "--shape and --random-weights must be given without --target"),
        (["--target", "x", "--random-weights"], "--shape and --random-weights must be given without --target"),
        (["--target", "missing-folder"], "missing-folder"),
        (["--shape", "tiny", "--drafter", "x"], "--drafter needs the --target"),
        (["--shape", "tiny", "--oracle", "0.5", "1.5"], "--oracle must be 0 to 1, got 1.5"),
        (["--shape", "tiny", "--batch", "0"], "--batch must be 1 or more, got 0"),
        (["--shape", "tiny", "--depth", "3", "0"], "--depth must be 1 or more, got 0"),
        (["--shape", "tiny", "--repeats", "0"], "--repeats must be 1 or more, got 0"),
        (["--shape", "tiny", "--tokens", "100"], "--tokens must be a power of two"),
        (["--shape", "tiny", "--nodes", "64", "--tokens", "128"], "at least 256 for drafts of 64 nodes, got 128"),
        (["--report"], "does not exist"),
        pytest.param(
            *(["--shape", "tiny", "--packed", "mosaic_gpu"], "--packed mosaic_gpu needs an NVIDIA GPU"),
            marks=pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one"),
        ),
    ],
)
def test_a_mistake_is_one_line(scripts, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        scripts("bench_decode").main([*arguments, "--out", str(tmp_path / "new")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "new").exists()


def test_a_gpu_is_asked_for_in_one_line(scripts, tmp_path, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        scripts("bench_decode").main(["--batch", "1", "--nodes", "1", "8", "16", "32", "--out", str(tmp_path)])
    assert "--shape tiny runs the script without one" in capsys.readouterr().err


def test_the_oracle_can_follow_the_drafter_in_the_same_program(scripts):
    """So what the drafter computes is there in the program, whether it is proposed or not."""
    model = scripts("bench_rounds").random_target(scripts("shapes").TINY, "float32")
    oracle, depth = scripts("oracle"), 3
    truth = generate(model, [[1, 2, 3]] * 2, method="ar", max_new_tokens=40).tokens
    drafter = oracle.OracleDrafter(
        drafter=ScriptedDrafter(draft=DraftConfig(depth=depth, nodes=depth + 1)), vocab_size=model.config.vocab_size
    )

    def decode(params):
        result = generate(model, [[1, 2, 3]] * 2, method="chain", drafter=(drafter, params), max_new_tokens=40)
        assert result.tokens == truth
        return result

    script = script_chain(truth, depth)  # a drafter that is always right
    wrong = oracle.oracle_params(script, truth, depth, 0)
    assert decode(wrong).accepted_length == [1, 1]
    programs = model.programs.count
    assert decode(replace(wrong, follow=jnp.asarray(True))).accepted_length == [4, 4]
    assert decode(oracle.oracle_params(script, truth, depth, 1)).accepted_length == [4, 4]
    half = decode(oracle.oracle_params(script, truth, depth, 0.5))
    assert all(1 < length < 4 for length in half.accepted_length)
    assert half.accepted_at_depth == decode(oracle.oracle_params(script, truth, depth, 0.5)).accepted_at_depth
    assert model.programs.count == programs


def test_no_product_of_the_drafter_is_left_out(scripts):
    rounds, oracle = scripts("bench_rounds"), scripts("oracle")
    model = rounds.random_target(scripts("shapes").TINY, "float32")
    eagle, params = rounds.random_drafter(model)
    eagle, context = replace(eagle, draft=rounds.chain(2)), _context(model.config.vocab_size)
    features = jnp.zeros((1, 4, 3 * model.config.hidden_size))
    drafter = oracle.OracleDrafter(drafter=eagle, vocab_size=model.config.vocab_size)
    told = oracle.oracle_params(params, [[5, 6, 7, 8]], 2, 0.5)

    def products(drafter, params):
        def tokens(params, context, features):
            return drafter.propose(params, drafter.init(params, context, features), context)[0].tokens

        return jax.jit(tokens).lower(params, context, features).compile().as_text().count(" dot(")

    assert products(drafter, told) == products(eagle, params) > 5


def test_the_first_children_of_a_tree_are_the_path(scripts):
    oracle, vocab = scripts("oracle"), 50
    #       0
    #    1     2      truth: 11 12 13, root 10
    #   3 4    5
    #   6
    tree = [(11, 0), (12, 0), (20, 1), (12, 1), (12, 2), (21, 3)]
    draft = DraftConfig(depth=3, branch=2, nodes=8)
    drafter = oracle.OracleDrafter(drafter=ScriptedDrafter(draft=draft), vocab_size=vocab)
    context, script, truth = _context(10), script_trees([[tree]]), [[11, 12, 13, 14]]
    plain, _ = drafter.drafter.propose(script, (), context)
    for probability, path in ((1, [11, 12, 13]), (0, [12, 13, 14])):
        params = oracle.oracle_params(script, truth, 3, probability)
        drafts, _ = drafter.propose(params, (), context)
        assert drafts.tokens[0].tolist() == [10, path[0], 12, path[1], 13, 13, path[2], 0]
        assert (drafts.parents == plain.parents).all()
        assert (drafts.num_nodes == plain.num_nodes).all()


def _context(root: int) -> Context:
    tokens = jnp.asarray([[1, 2, root, 0, 0, 0, 0, 0]], jnp.int32)
    length = jnp.asarray([3], jnp.int32)
    return Context(tokens, length, length, jnp.asarray([True]))


def test_what_is_right_stays_right_at_a_higher_probability(scripts):
    make = scripts("oracle").oracle_params
    truth = [[1] * 500] * 2
    low, high = (np.asarray(make((), truth, 3, p).right) for p in (0.3, 0.6))
    assert (low <= high).all()
    assert low.mean() == pytest.approx(0.3, abs=0.05)
    assert high.mean() == pytest.approx(0.6, abs=0.05)
    assert np.corrcoef(high.reshape(-1, 3).T)[0, 1] == pytest.approx(0, abs=0.1)  # levels are drawn by themselves
    assert (make((), truth, 3, 0.6).right == high).all()
    assert (make((), truth, 3, 0.6, seed=1).right != high).any()


def test_where_a_line_crosses(scripts):
    crossing = scripts("oracle").crossing
    assert crossing([(1, 3), (0, 0.5), (0.5, 0.75)]) == pytest.approx(0.5 + 0.5 * 0.25 / 2.25)
    assert crossing([(0.25, 1.5), (1, 3)]) == 0.25
    assert crossing([(0, 0.5), (1, 0.9)]) is None
    assert crossing([]) is None


def test_a_text_of_its_own_ends_the_run(scripts, tmp_path, capsys):
    rounds = scripts("bench_rounds")
    model = rounds.random_target(scripts("shapes").TINY, "float32")
    result = generate(model, [list(rounds.PROMPT)], method="ar", max_new_tokens=9)
    measured = rounds.Measured(ms=1.0, tokens_per_second=1.0, compile_s=0.0, result=result)
    bench = rounds.Bench(
        model=model, drafter=(None, None), tokens=64, repeats=1, read=1.0, results=None, plain={1: measured}
    )
    begun = replace(measured, result=replace(result, tokens=[result.tokens[0][:5]]))
    assert bench.near_ties("begun", 1, begun) == {"near_ties": 0, "largest_margin": None}
    other = [*result.tokens[0][:4], (result.tokens[0][4] + 7) % model.config.vocab_size]
    with pytest.raises(SystemExit):
        bench.near_ties("other", 1, replace(measured, result=replace(result, tokens=[other])))
    assert "other: row 0 parts from plain decoding at output token 4" in capsys.readouterr().err


def test_targets_are_of_batch_one(scripts, tmp_path):
    bench, benching = scripts("bench_decode"), scripts("benching")
    results = benching.Results(tmp_path / "x.json", {})
    row = {"batch": 1, "compile_s": 30.0, "depth": 0, "nodes": 1, "ms": 0.85, "round_cost": 1.0}
    results.add("rounds", row | {"method": "ar"})
    results.add("rounds", row | {"method": "ar", "batch": 8, "ms": 5.0})
    results.add("rounds", row | {"method": "verify", "nodes": 16, "depth": 15, "round_cost": 1.05})
    results.add("rounds", row | {"method": "verify", "nodes": 32, "depth": 31, "round_cost": 1.25, "compile_s": 130.0})
    results.add("rounds", row | {"method": "chain", "nodes": 6, "depth": 5, "round_cost": 1.3})
    results.add("rounds", row | {"method": "chain", "nodes": 8, "depth": 7, "round_cost": 1.6})
    results.add("peers", {"batch": 1, "over_graph": None})
    oracle = {"method": "chain", "batch": 1, "nodes": 8, "depth": 7, "round_cost": 1.5, "compile_s": 1.0}
    results.add("oracle", oracle | {"p": 0.0, "speedup": 0.6})
    results.add("oracle", oracle | {"p": 1.0, "speedup": 5.4})
    assert {row["target"]: row["met"] for row in bench.targets(results)} == {
        "ar: ms": True,
        "ar: times flash-linear-attention in a CUDA graph": None,
        "verify 16: steps of ar": True,
        "verify 32: steps of ar": False,
        "verify 64: steps of ar": None,
        "tree of 16 nodes: steps of ar": None,
        "chain of 5: steps of ar": True,
        "oracle, chain of 8, p = 1: speed-up": True,
        "compilation of a program: s": False,
    }
    interpolated, formula = bench.break_even(results.rows("oracle"))
    assert interpolated == pytest.approx(0.4 / 4.8)
    assert scripts("oracle").expected_length(formula, 7) == pytest.approx(1.5)
