"""The 1.3B experiment: its data, its training by a budget of time, and all stages at a tiny size."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scripts.experiment_1p3b import SIZES, main
from scripts.experiment_data import build, drafter_corpus
from scripts.experiment_target import Plan, Recipe, train_target
from specla_jax.checkpoint import load_target
from specla_jax.errors import UserError
from train_drafter.data import TokenData, is_held_out, read_documents

ROOT = Path(__file__).resolve().parent.parent


def lines(entries: list[dict]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up text in the layout of the published data sets."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("gsm8k", "humaneval", "spec_bench", "wikitext2"):
        (folder / name).mkdir()
    problems = [
        {"question": f"Ann has {i} apples and buys {i}.", "answer": f"{2 * i}\n#### {2 * i}"} for i in range(99)
    ]
    (folder / "gsm8k" / "train.jsonl").write_text(lines(problems))
    (folder / "gsm8k" / "test.jsonl").write_text(lines([{"question": "TESTQUESTION", "answer": "1"}]))
    (folder / "humaneval" / "HumanEval.jsonl").write_text(lines([{"prompt": "def f(x):\n"}]))
    (folder / "spec_bench" / "question.jsonl").write_text(lines([{"category": "qa", "turns": ["Who?"]}]))
    for name, count in (("valid", 20), ("test", 3)):
        articles = [f" = {name} {i} = \n \n Text {i} of it . \n = = Part = = \n More of {i} . \n" for i in range(count)]
        (folder / "wikitext2" / f"{name}.txt").write_text("".join(articles))
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for package in range(40):
        (folder / f"p{package}").mkdir()
        for i in range(2):
            (folder / f"p{package}" / f"m{i}.py").write_text(f"def f{package}_{i}(x):\n    return x + {i}\n")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "other.py").write_text("never = 1\nread = 2\n")
    return folder


@pytest.fixture(scope="module")
def data(data_dir: Path, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    return build(data_dir, [packages], 1, 300, tmp_path_factory.mktemp("out"))


def test_held_out_packages_and_articles_are_set_apart(data: TokenData) -> None:
    corpus = data.folder.parent / "corpus"
    names = json.loads((corpus / "packages.json").read_text())
    assert names["held out"] == [f"p{i}" for i in range(40) if is_held_out(f"p{i}", 0.03)] != []
    assert len(names["trained"]) + len(names["held out"]) == 40
    assert len(read_documents(corpus / "python-held-out.jsonl")) == 2 * len(names["held out"])
    assert len(read_documents(corpus / "wikitext.jsonl")) == 20
    assert (
        read_documents(corpus / "wikitext-held-out.jsonl")[0] == "= test 0 =\nText 0 of it .\n= = Part = =\nMore of 0 ."
    )
    everything = "".join(path.read_text() for path in corpus.glob("*.jsonl"))
    assert "TESTQUESTION" not in everything
    assert "never" not in everything
    trained = {source.name for source in data.sources if source.train_tokens}
    assert trained == {"gsm8k.jsonl", "python.jsonl", "wikitext.jsonl"}


def test_python_sources_are_cut_to_size(data_dir: Path, packages: Path, tmp_path: Path) -> None:
    build(data_dir, [packages], 0.001, 300, tmp_path)
    texts = read_documents(tmp_path / "corpus" / "python.jsonl")
    assert 900 < sum(map(len, texts)) <= 1000
    assert len({text.split("_")[0] for text in texts}) > 10  # from many packages


def test_the_drafters_corpus_holds_whole_documents_in_the_given_shares(data: TokenData, tmp_path: Path) -> None:
    count = drafter_corpus(data, (0.5, 0.25, 0.25), tmp_path / "drafter.npy")
    tokens = np.load(tmp_path / "drafter.npy")
    assert len(tokens) == count
    assert (tokens == data.bos_token_id).sum() == (tokens == data.eos_token_id).sum()
    assert tokens[0] == data.bos_token_id
    assert tokens[-1] == data.eos_token_id
    spans = [source.train for source in data.sources if source.train_tokens]
    scarcest = min((b - a) / weight for (a, b), weight in zip(spans, (0.5, 0.25, 0.25), strict=True))
    assert 0.9 * scarcest < count <= scarcest + 3


@pytest.mark.parametrize("name", ["gsm8k/train.jsonl", "wikitext2/test.txt"])
def test_a_missing_file_is_named(name: str, data_dir: Path, packages: Path, tmp_path: Path) -> None:
    for path in data_dir.rglob("*.*"):
        if path.relative_to(data_dir).as_posix() != name:
            copy = tmp_path / "data" / path.relative_to(data_dir)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
    with pytest.raises(UserError, match=f"--data-dir .* has no {name}"):
        build(tmp_path / "data", [packages], 1, 300, tmp_path / "out")


RECIPE = Recipe(batch=2, length=16, learning_rate=1e-2, warmup=20, weights=(0.5, 0.3, 0.2), dtype="float32")


def test_the_cosine_ends_where_the_plan_does() -> None:
    plan = Plan().moved(20, 120)
    assert [plan.at(step) for step in (20, 70, 120)] == [0, 0.5, 1]
    longer = plan.moved(70, 170)  # the rate fell by half: what is left of the cosine takes twice as many steps
    assert [longer.at(step) for step in (70, 120, 170)] == [0.5, 0.75, 1]
    assert plan.moved(50, 10).total == 51  # no time left: one step ends it
    assert Plan().at(10) == 0
    rates = [RECIPE.rate(step, Plan().at(step)) for step in (0, 9, 19)]
    rates += [RECIPE.rate(step, plan.at(step)) for step in (70, 120)]
    expected = [0.05, 0.5, 1, 0.05 + 0.95 / 2, 0.05]
    np.testing.assert_allclose(rates, [1e-2 * x for x in expected])


@pytest.fixture(scope="module")
def unbroken(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "target"
    assert train_target(data, target(data), RECIPE, out, seconds=600, reserve=0, steps=25)
    return out


def target(data: TokenData):
    ids = {"bos_token_id": data.bos_token_id, "eos_token_ids": (data.eos_token_id,)}
    return replace(SIZES["tiny"].target, vocab_size=data.vocab_size, num_hidden_layers=1, **ids)


def test_a_cut_target_goes_on_and_equals_an_unbroken_one(data: TokenData, unbroken: Path, tmp_path: Path) -> None:
    run = {"seconds": 0, "reserve": 0, "steps": 25}
    assert not train_target(data, target(data), RECIPE, tmp_path / "t", **run)
    assert not (tmp_path / "t" / "target.json").exists()
    assert train_target(data, target(data), RECIPE, tmp_path / "t", **run | {"seconds": 600})
    reports = [json.loads((out / "target.json").read_text()) for out in (unbroken, tmp_path / "t")]
    assert reports[0]["held_out_loss"] == reports[1]["held_out_loss"]
    assert reports[0]["steps"] == reports[1]["steps"] == 25
    assert len(reports[1]["checkpoint_blocked_seconds"]) == 1
    weights = [(out / "model" / "model.safetensors").read_bytes() for out in (unbroken, tmp_path / "t")]
    assert weights[0] == weights[1]
    assert load_target(unbroken / "model", dtype="float32").config.vocab_size == data.vocab_size
    with pytest.raises(UserError, match="other settings"):
        train_target(data, target(data), replace(RECIPE, batch=4), tmp_path / "t", **run)


def test_a_budget_without_steps_ends_with_the_cosine(data: TokenData, tmp_path: Path) -> None:
    assert train_target(data, target(data), RECIPE, tmp_path / "t", seconds=12, reserve=2)
    metrics = [json.loads(line) for line in (tmp_path / "t" / "metrics.jsonl").read_text().splitlines()]
    last = metrics[-1]
    assert last["plan"]["total"] == last["step"] > 30
    assert last["learning_rate"] < 0.1 * RECIPE.learning_rate
    assert json.loads((tmp_path / "t" / "target.json").read_text())["tokens"] == last["step"] * 32


def test_a_stage_names_the_one_that_it_needs(data_dir: Path, tmp_path: Path, capsys) -> None:
    assert main(["bench", "--out", str(tmp_path), "--data-dir", str(data_dir), "--size", "tiny"]) == 2
    assert capsys.readouterr().err == "error: the stage bench needs data to be finished first\n"
    assert main(["all", "--out", str(tmp_path), "--data-dir", str(data_dir), "--minutes", "0"]) == 2
    assert "--minutes must be above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_all_stages_at_a_tiny_size(data_dir: Path, packages: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "scripts" / "experiment_1p3b.py"), "all", "--size", "tiny"]
    command += ["--data-dir", str(data_dir), "--python", str(packages), "--out", str(out), "--minutes", "20"]
    command += ["--steps", "20", "--drafter-steps", "4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = (out / "report.md").read_text()
    assert "chain" in report
    assert "gsm8k" in report
    bench = json.loads((out / "bench.json").read_text())
    assert {part["suite"] for part in bench["parts"]} == {"gsm8k", "humaneval", "spec-bench", "all"}
    assert not any(row["differing"] for part in bench["parts"] for row in part["methods"].values())
    assert not (out / "target" / "model").exists()
    assert (out / "drafter" / "drafter" / "model.safetensors").is_file()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "specla" not in again.stdout  # nothing is run twice
