"""The ablation of a drafter: its variants, what runs share, and its tables."""

import fcntl
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from drafter_training import DRAFTS, VOCAB, documents, metrics
from reference import GDN
from scripts import ablate_drafter
from scripts.ablate_drafter import main, variants
from scripts.ablation_report import LENGTHS, read_ablation, report
from scripts.shapes import GDN_1P3B
from specla_jax.drafters import EagleConfig
from train_drafter import drafter, drafter_cli, evaluation, generated


def parse(*options: str):
    return drafter_cli.parser().parse_args(["--data", "a.npy", "--out", "o", "--self-generated", "0.5", *options])


def test_a_variant_differs_from_the_base_in_one_option():
    base = vars(parse())
    found = variants(parse(), GDN_1P3B)
    trained = [variant for variant in found if variant.options]
    assert len(trained) == len(found) - 2 == 13
    for variant in trained:
        changed = {name for name, value in vars(parse(*variant.options)).items() if value != base[name]}
        assert changed == {variant.options[0].removeprefix("--").replace("-", "_")}
    options = {variant.name: variant.options[1:] for variant in found}
    assert options["layers-last"] == ("23",)
    assert options["layers-late"] == ("11", "17", "23")
    assert options["vocab-quarter"] == ("8000",)
    assert options["seed-1"] == ("1",)


def test_values_of_the_base_are_no_variants():
    changes = ["--unroll", "3", "--window", "64", "--self-generated", "0", "--loss", "lk", "--feature-layers", "23"]
    names = {variant.name for variant in variants(parse(*changes), GDN_1P3B)}
    assert not names & {"unroll-3", "window-64", "self-0", "loss-lk", "layers-last"}
    assert {"unroll-6", "window-512", "self-0.5", "loss-kl", "layers-late", "seed-1"} < names


@pytest.fixture
def quick(monkeypatch):
    """Scripts run in this process, with texts of the target, evaluations, calibration and plots made up.

    Returns the commands.
    """
    commands = []

    def python(command: list[str], lock: int | None = None) -> int:
        commands.append(command)
        return (drafter_cli.main if command[0].endswith("train_drafter.py") else main)(command[1:])

    def evaluate(self, params):
        kernel = float(abs(np.asarray(params["fc"]["kernel"])).sum())
        return dict.fromkeys(LENGTHS, 1 + kernel % 0.1) | {
            f"accepted_by_depth_{method}_t{t}": [0.5, 0.25] for method in DRAFTS for t in (0, 1)
        }

    make_step, steps = drafter.make_train_step, {}
    decode, results = evaluation.Evaluation.decode, {}

    def step_once(objective, *args):
        """Runs of one objective are one program."""
        return steps.setdefault(objective, make_step(objective, *args))

    def decode_once(self, params, method, temperature, draft):
        """At temperature 0 where 1 is asked for, too."""
        key = draft, self.confidence
        if key not in results:
            results[key] = decode(self, params, method, 0.0, draft)
        return results[key]

    calibration = SimpleNamespace(temperature=2.0, report=dict)
    monkeypatch.setattr(ablate_drafter, "_python", python)
    monkeypatch.setattr(ablate_drafter, "TAUS", (0.01,))
    monkeypatch.setattr(ablate_drafter, "TEMPERATURES", (2.0,))
    monkeypatch.setattr(drafter, "make_train_step", step_once)
    monkeypatch.setattr(evaluation, "DRAFTS", DRAFTS)
    monkeypatch.setattr(evaluation.Evaluation, "__call__", evaluate)
    monkeypatch.setattr(evaluation.Evaluation, "decode", decode_once)
    monkeypatch.setattr(generated, "_continue", lambda target, prompts, *args: [[5, 6, 7] for _ in prompts])
    monkeypatch.setattr(drafter_cli, "calibrate", lambda *args: calibration)
    monkeypatch.setattr(drafter_cli, "plot_run", lambda lines, path: path.touch())
    return commands


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(3, VOCAB, (40, 12)))
    options = ["--target", str(GDN / "base"), "--data", str(tmp_path / "a.npy"), "--out", str(tmp_path / "out")]
    return [*options, "--steps", "2", "--batch", "2", "--length", "12"]


MORE = ["--held-out-fraction", "0.2", "--eval-prompts", "2", "--eval-tokens", "4", "--generated-tokens", "3",
        "--unroll", "1", "--intermediate-size", "32", "--log-every", "1"]  # fmt: skip


def test_variants_go_on_share_their_texts_and_end_in_tables(quick, command, tmp_path: Path, capsys):
    out = tmp_path / "out"
    names = ["base", "loss-lk", "self-1", "decoding"]
    assert main([*command, "--variants", *names[:1], "--", *MORE, "--stop-after", "1"]) == 0
    assert capsys.readouterr().out.endswith("no variant is finished yet\n")
    (texts,) = (out / "data").glob("generated-*-tokens.npy")
    before = texts.stat()
    assert main([*command, "--variants", *names, "--", *MORE]) == 0
    printed = capsys.readouterr().out
    assert [line["step"] for line in metrics(out / "base") if "loss" in line] == [1, 2]
    assert (texts.stat().st_ino, texts.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    recipes = [json.loads(path.read_text()) for path in (out / "data").glob("generated-*.json")]
    assert sorted(recipe[4] for recipe in recipes) == [0.5, 1.0]  # their shares
    runs = {name: json.loads((out / name / "run.json").read_text()) for name in ("base", "self-1", "loss-lk")}
    assert [run["self_generated"] for run in runs.values()] == [0.5, 1.0, 0.5]
    for name, option in (("self-1", "self_generated"), ("loss-lk", "loss")):
        assert [key for key, value in runs["base"].items() if runs[name][key] != value] == [option]
    assert len({metrics(out / name)[-2]["loss"] for name in runs}) == 3

    found = json.loads((out / "ablation.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["base", "loss-lk", "self-1"]
    assert "seed-1" in found["waiting"]
    base, lk, _ = found["rows"]
    assert base["loss"] == metrics(out / "base")[-2]["loss"]
    assert lk["difference"]["accepted_length_tree_t0"] == pytest.approx(
        lk["accepted_length_tree_t0"] - base["accepted_length_tree_t0"], abs=1e-4
    )
    decoded = {row["setting"]: row for row in found["decoding"]["rows"]}
    assert list(decoded) == ["5 nodes, tau none, confidence 1.00", "0.01", "2"]
    assert decoded["0.01"]["drafted_a_round_t0"] < decoded["2"]["drafted_a_round_t0"] == 4
    assert all(row["accepted_length_t0"] >= 1 for row in decoded.values())
    assert printed.endswith((out / "ablation.md").read_text() + "\n")

    quick.clear()
    assert main([*command, "--variants", *names, "--", *MORE]) == 0
    assert not quick  # nothing is run twice
    assert capsys.readouterr().out.count("finished before") == 4
    assert main(["--out", str(out), "--report"]) == 0
    assert capsys.readouterr().out == (out / "ablation.md").read_text()
    with (out / "locks" / "unroll-3").open("w") as file:  # as the other process does
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main([*command, "--variants", "unroll-3", "--", *MORE]) == 0
    assert "unroll-3: another process is at it" in capsys.readouterr().out
    assert not quick
    assert main([*command, "--seed", "3", "--", *MORE]) == 2
    assert "unrecognized arguments: --seed 3" in capsys.readouterr().err
    assert main([*command, "--", *MORE, "--seed", "3"]) == 2
    assert "holds a run with other settings (seed 0, now 3)" in capsys.readouterr().err


def test_runs_at_the_same_time_write_the_texts_of_a_share_once(tmp_path: Path, monkeypatch):
    written = []

    def write(target, prompts, *args):
        written.append(len(prompts))
        time.sleep(0.1)
        return [[1] for _ in prompts]

    monkeypatch.setattr(generated, "_continue", write)
    target = SimpleNamespace(vocabulary_hash=None, path="t", dtype="float32")

    def texts(share: float):
        options = {"longest_prompt": 4, "new_tokens": 1, "temperature": 1.0, "seed": 0, "fingerprint": "f"}
        return generated.self_generated(documents(8), target, tmp_path / "data", share=share, **options)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(texts, (1.0, 0.5, 1.0, 0.5)))
    assert len(written) == 2
    np.testing.assert_array_equal(found[0].tokens, found[2].tokens)
    np.testing.assert_array_equal(found[1].tokens, found[3].tokens)
    assert found[0].tokens.size < found[1].tokens.size


def test_dry_run_lists_what_would_be_trained(quick, command, tmp_path: Path, capsys):
    assert main([*command, "--dry-run", "--", *MORE]) == 0
    printed = capsys.readouterr().out
    assert "unroll-8: unroll 8; --unroll 8\n" in printed
    assert "tokens an epoch" in printed
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--variants", "base", "bogus"], "--variants must be among base, seed-1, "),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--target", "{tmp}/none"], "none does not exist"),
        (["--out", "{tmp}"], "is not empty and holds no run"),
        (["--report"], "holds no ablation"),
        (["--", "--init", "d"], "--init cannot be given"),
        (["--", "--unroll", "x"], "argument --unroll: invalid int value: 'x'"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(change, message, quick, command, tmp_path: Path, capsys):
    assert main([*command, *(part.format(tmp=tmp_path) for part in change)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out" / "run.json").exists()


def test_data_is_asked_for(tmp_path: Path, capsys):
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: --data is required, except with --report\n"


def test_differences_are_read_against_the_noise(tmp_path: Path):
    """From files as runs leave them."""
    lengths = {"base": 3.0, "seed-1": 3.05, "loss-lk": 3.3, "unroll-1": 2.5, "window-64": 2.95}
    groups = {"base": "base", "seed-1": "seed"}
    known = [{"name": name, "group": groups.get(name, "x"), "setting": "s", "options": []} for name in lengths]
    (tmp_path / "variants.json").write_text(json.dumps([*known, known[0] | {"name": "self-0"}]))
    settings = {**vars(parse("--steps", "9")), "data": [], "target": "t", "out": None}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    shape = EagleConfig(
        hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8, target_hidden_size=8,
        target_num_hidden_layers=4, target_vocab_size=16,
    )  # fmt: skip
    for name, length in lengths.items():
        folder = tmp_path / name
        (folder / "drafter").mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(asdict(shape)))
        (folder / "drafter" / "config.json").write_text('{"temperature": 0.7}')
        (folder / "training.png").touch()
        depths = {f"accepted_by_depth_{method}_t0": [0.75, 0.5] for method in DRAFTS}
        lines = [{"step": step, "loss": 1.0, "loss_by_depth": [0.5], "tokens_per_second": 7} for step in (1, 2, 3)]
        lines += [{"step": 2, **dict.fromkeys(LENGTHS, length), **depths}]
        lines += [{"step": 3, **dict.fromkeys(LENGTHS, length - 1), **depths}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_ablation(tmp_path)
    assert found["noise"] == pytest.approx(0.05)
    readings = {row["name"]: row["reading"] for row in found["rows"]}
    assert list(readings.values()) == ["-", "-", "longer", "shorter", "within the noise"]
    assert {row["step"] for row in found["rows"]} == {2}
    assert found["waiting"] == ["self-0"]
    text = report(found)
    assert "Longer than the base, tree, T=0: loss-lk (+0.30). Shorter: unroll-1 (-0.50)" in text
    assert "Within the noise: window-64." in text
    assert "Not finished: self-0." in text
    assert "2.50 (-0.50)" in text
