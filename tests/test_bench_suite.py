"""The suites, the figures of a benchmark, and the command that makes them."""

import gzip
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import specla_jax.bench
from reference import GDN, Reference
from specla_jax.bench import Bench, Task, batches
from specla_jax.bench_records import Measured, Record
from specla_jax.bench_report import break_even_acceptance, repeated_fourgrams, summarise, table
from specla_jax.cli import main
from specla_jax.config import DraftConfig
from specla_jax.drafters import EagleConfig, ScriptedDrafter, init_eagle, save_drafter, script_chain
from specla_jax.errors import UserError
from specla_jax.programs import Programs
from specla_jax.suites import Prompt, PromptFormat, read_suite

CATEGORIES = ["writing", "coding", "qa", "qa", "translation", "translation"]


def lines(entries: list[dict]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


@pytest.fixture(scope="module")
def suite_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up suite folder in the layout of the published ones."""
    folder = tmp_path_factory.mktemp("suites")
    for name in ("gsm8k", "humaneval", "spec_bench"):
        (folder / name).mkdir()
    (folder / "gsm8k" / "test.jsonl").write_text(
        lines([{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(5)])
    )
    heads = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}(x):\n", "test": "secret"} for i in range(2)]
    (folder / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines(heads).encode()))
    (folder / "spec_bench" / "question.jsonl").write_text(
        lines([{"question_id": i, "category": c, "turns": [f"{c}?", "more?"]} for i, c in enumerate(CATEGORIES)])
    )
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plainest of the reference checkpoints with a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("models") / "target"
    shutil.copytree(GDN / "base", folder)
    pieces = ["\n", *map(chr, range(32, 126))]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafters") / "drafter", 64)


def write_drafter(folder: Path, target_hidden_size: int) -> Path:
    config = EagleConfig(
        hidden_size=target_hidden_size, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32,
        target_hidden_size=target_hidden_size, target_num_hidden_layers=2, target_vocab_size=96, window=32,
    )  # fmt: skip
    save_drafter(init_eagle(jax.random.key(0), config), config, folder)
    return folder


def test_suites_are_read_in_their_own_layout(suite_dir: Path) -> None:
    assert [prompt.text for prompt in read_suite("gsm8k", suite_dir)] == [f"What is {i} + {i}?" for i in range(5)]
    assert [prompt.text for prompt in read_suite("humaneval", suite_dir)] == ["def f0(x):\n", "def f1(x):\n"]
    mixed = read_suite("spec-bench", suite_dir)
    assert [prompt.group for prompt in mixed] == ["multi-turn", "multi-turn", "qa", "qa", "translation", "translation"]
    assert mixed[2].text == "qa?"


def test_a_part_of_a_suite_is_spread_over_it(suite_dir: Path) -> None:
    few = read_suite("spec-bench", suite_dir, 3)
    assert [prompt.number for prompt in few] == [0, 2, 5]
    assert {prompt.group for prompt in few} == {"multi-turn", "qa", "translation"}
    assert len(read_suite("spec-bench", suite_dir, 99)) == 6


def test_humaneval_may_be_unpacked(suite_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "humaneval").mkdir()
    packed = (suite_dir / "humaneval" / "HumanEval.jsonl.gz").read_bytes()
    (tmp_path / "humaneval" / "HumanEval.jsonl").write_bytes(gzip.decompress(packed))
    assert read_suite("humaneval", tmp_path) == read_suite("humaneval", suite_dir)


def test_prompt_formats() -> None:
    question, code = Prompt(0, "g", "Why?"), Prompt(0, "g", "def f():\n", is_code=True)
    assert PromptFormat.load("question", None).text(question) == "Question: Why?\nAnswer:"
    assert PromptFormat.load("question", None).text(code) == "def f():\n"
    assert PromptFormat.load("raw", None).text(question) == "Why?"


def test_a_chat_prompt_is_what_the_template_says(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": template}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert PromptFormat.load("chat", tmp_path).text(Prompt(0, "g", "Why?")) == "<s><user>Why?<assistant>"


def test_a_chat_prompt_without_jinja2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match="pip install jinja2"):
        PromptFormat.load("chat", tmp_path)


def measured(seconds: float, tokens: list[int], rounds: list[int], at_depth: list[list[int]], **other) -> Measured:
    values = {
        "drafted": [2 * n for n in rounds], "repeated": [1] * len(tokens), "fourgrams": [4] * len(tokens),
        "differences": [],
    } | other  # fmt: skip
    return Measured(
        seconds=seconds, first_seconds=0.5, tokens=tokens, rounds=rounds, accepted_at_depth=at_depth, **values
    )


def record(groups: list[str], **methods: Measured) -> Record:
    return Record(suite="s", temperature=0.0, key="k", numbers=list(range(len(groups))), groups=groups, methods=methods)


# Plain: 10 tokens in 5.5 s, so 5 s for the 9 rounds after the first (of each batch). Chain: 2 s for 4 + 1 of them.
TWO_BATCHES = [
    record(["a"], ar=measured(3.5, [6], [6], [[]]), chain=measured(2.0, [6], [5], [[1, 0]])),
    record(
        ["b"],
        ar=measured(2.0, [4], [4], [[]]),
        chain=measured(1.0, [4], [2], [[1, 1]], differences=[{"row": 0, "margin": None, "near_tie": False}]),
    ),
]


def test_figures_of_two_batches_by_hand() -> None:
    chain = summarise(TWO_BATCHES, "chain")
    assert chain["accepted_length"] == 10 / 7
    assert chain["first_token_match"] == 2 / 7
    assert chain["acceptance_by_depth"] == [2 / 7, 1 / 2]  # of the rounds that reached the depth
    assert chain["drafted_a_round"] == 2
    assert chain["repeated_4grams"] == 1 / 4
    assert chain["tokens_per_second"] == pytest.approx(10 / 3)
    assert chain["speedup"] == pytest.approx(5.5 / 3)
    assert chain["median_speedup"] == pytest.approx((3.5 / 2 + 2) / 2)
    assert chain["round_cost"] == pytest.approx((2 / 5) / (4.5 / 8))
    assert chain["break_even_acceptance"] == 0  # a round is cheaper than a plain one
    assert (chain["differing"], chain["differing_beyond_near_ties"], chain["largest_margin"]) == (1, 1, None)
    plain = summarise(TWO_BATCHES, "ar")
    assert (plain["accepted_length"], plain["speedup"], plain["round_cost"]) == (1, 1, 1)
    assert plain["first_token_match"] is None


def test_figures_of_a_group() -> None:
    assert summarise(TWO_BATCHES, "chain", "b")["accepted_length"] == 2
    assert summarise(TWO_BATCHES, "chain", "b")["speedup"] == 2
    both = record(
        ["a", "b"], ar=measured(3.0, [6, 4], [6, 4], [[], []]), chain=measured(1.5, [6, 4], [5, 2], [[1, 0], [1, 1]])
    )
    mixed = summarise([both], "chain", "b")
    assert mixed["accepted_length"] == 2
    assert mixed["speedup"] is None  # the batch's time is not the group's
    assert summarise([both], "chain")["round_cost"] == pytest.approx((1.0 / 4) / (2.5 / 5))  # rounds of the slowest row


def test_break_even_acceptance() -> None:
    assert break_even_acceptance(1.75, 2) == pytest.approx(0.5)  # 1 + 1/2 + 1/4
    assert break_even_acceptance(0.9, 2) == 0
    assert break_even_acceptance(3.0, 2) == pytest.approx(1)
    assert break_even_acceptance(3.1, 2) is None


def test_repeated_fourgrams() -> None:
    assert repeated_fourgrams([1, 2, 3, 4, 5]) == (0, 2)
    assert repeated_fourgrams([1, 2] * 4) == (3, 5)
    assert repeated_fourgrams([1, 2, 3]) == (0, 0)


def test_published_figures_stand_beside_greedy_ones_only() -> None:
    methods = {"tree": summarise(TWO_BATCHES, "chain")}
    greedy, sampled = ({"suite": "gsm8k", "temperature": t, "methods": methods} for t in (0.0, 1.0))
    assert "accepted 5.00, first 0.81, speed-up 1.70" in table([greedy])
    assert "5.00" not in table([sampled])


NGRAM_TREE = {"ngram-tree": ("tree", "ngram", DraftConfig(depth=2, branch=2, nodes=4))}


def runner(base: Reference, batch_size: int = 1, **drafted: tuple) -> Bench:
    methods = {"ar": ("ar", "none", DraftConfig(depth=0, nodes=1)), **drafted}
    return Bench(base.model, methods, batch_size, 12, (), lambda line: None)


def tasks(base: Reference) -> list[Task]:
    return [Task(Prompt(i, "g", "?"), ids, i, 64) for i, ids in enumerate(base.prompts)]


def test_a_perfect_drafter_of_depth_d_gives_d_plus_1(base: Reference) -> None:
    draft = DraftConfig(depth=3, nodes=4)
    perfect = (ScriptedDrafter(draft=draft), script_chain([base.greedy[0]], 3))
    measured = runner(base, chain=("chain", perfect, draft)).run("s", 0.0, tasks(base)[:1])
    figures = summarise([measured], "chain")
    assert figures["accepted_length"] == 4
    assert figures["acceptance_by_depth"] == [1, 1, 1]
    assert summarise([measured], "ar")["accepted_length"] == 1
    assert figures["differing"] == 0


def test_a_text_unlike_plain_decoding_is_found(base: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    fair = specla_jax.bench.prepare

    def lossy(model, prompts, **options):
        return fair(model, prompts, **options | {"seed": [5 if options["method"] == "tree" else 0] * len(prompts)})

    monkeypatch.setattr(specla_jax.bench, "prepare", lossy)
    measured = runner(base, **NGRAM_TREE).run("s", 1.0, tasks(base)[:1])
    (found,) = measured.methods["ngram-tree"].differences
    assert found["row"] == 0
    assert found["expected"] != found["got"]
    assert not found["near_tie"]
    assert measured.methods["ar"].differences == []


def test_rows_that_fill_a_batch_change_nothing(base: Reference) -> None:
    """A batch of 4 holds the 2 prompts and 2 finished rows; its counts are those of the prompts alone."""
    (both,) = batches(tasks(base), 4)
    together = runner(base, 4, **NGRAM_TREE).run("s", 1.0, both)
    alone = [runner(base, 1, **NGRAM_TREE).run("s", 1.0, [task]) for task in tasks(base)]
    for name in ("ar", "ngram-tree"):
        for field in ("tokens", "rounds", "drafted", "accepted_at_depth", "repeated"):
            expected = [getattr(record.methods[name], field)[0] for record in alone]
            assert getattr(together.methods[name], field) == expected
    assert together.numbers == [0, 1]


def test_all_programs_are_compiled_before_the_first_batch(base: Reference) -> None:
    """One for each method, and for greedy and sampled texts."""
    model = replace(base.model, programs=Programs())
    bench = replace(runner(base, **NGRAM_TREE), model=model)
    given = [(temperature, [task]) for temperature in (0.0, 1.0, 0.5) for task in tasks(base)]
    bench.compile(given)
    assert model.programs.count == 4
    for temperature, batch in given:
        bench.run("s", temperature, batch)
    assert model.programs.count == 4


def test_batches_share_a_program() -> None:
    made = [Task(Prompt(i, "g", "?"), [1], i, length) for i, length in enumerate([64, 128, 64, 64, 128])]
    numbers = [[task.prompt.number for task in batch] for batch in batches(made, 2)]
    assert numbers == [[0, 2], [3], [1, 4]]


@pytest.fixture(scope="module")
def command(target: Path, drafter: Path, suite_dir: Path) -> list[str]:
    return [
        "bench", "--target", str(target), "--drafter", str(drafter), "--suite-dir", str(suite_dir), "--prompts", "3",
        "--max-new-tokens", "8", "--depth", "2", "--nodes", "4", "--prefill-lengths", "64",
    ]  # fmt: skip


ALL = ["--suite", "gsm8k", "humaneval", "spec-bench"]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Replaces decoding by made-up counts, and draws nothing; lists what was asked for."""
    asked = []

    def run(self, suite: str, temperature: float, batch: list[Task]) -> Record:
        asked.append((suite, temperature))
        methods = {name: measured(1.0, [8], [4], [[3, 1] if name != "ar" else []]) for name in self.methods}
        made = record([task.prompt.group for task in batch], **methods)
        return replace(made, suite=suite, temperature=temperature, key=specla_jax.bench.batch_key(batch))

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(Bench, "compile", lambda self, batches: None)
    monkeypatch.setattr(specla_jax.bench, "plot", lambda parts, path, title: path.touch())
    return asked


def parts_of(out: Path) -> dict[tuple[str, float], dict]:
    return {
        (part["suite"], part["temperature"]): part for part in json.loads((out / "bench.json").read_text())["parts"]
    }


def test_the_command_decodes_by_a_drafter(command: list[str], tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    options = ["--suite", "gsm8k", "spec-bench", "--temperature", "0", "--methods", "chain", "tree"]
    assert main([*command, *options, "--out", str(out)]) == 0
    parts = parts_of(out)
    assert list(parts) == [("gsm8k", 0), ("spec-bench", 0), ("all", 0)]
    for part in parts.values():
        assert list(part["methods"]) == ["ar", "chain", "tree"]
        assert len({figures["tokens"] for figures in part["methods"].values()}) == 1
        assert part["methods"]["ar"]["rounds"] == part["methods"]["ar"]["tokens"]
        assert len(part["methods"]["chain"]["acceptance_by_depth"]) == 2
        assert not any(figures["differing"] for figures in part["methods"].values())
    assert set(parts["spec-bench", 0]["groups"]) == {"multi-turn", "qa", "translation"}
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((out / "bench.json").read_text())["settings"]
    assert settings["methods"]["tree"] == {"depth": 2, "branch": 4, "nodes": 4, "prune_tau": None}
    shown = capsys.readouterr().out
    assert shown.count("| gsm8k") == 3
    assert "| spec-bench | translation | 0 " in shown


def test_a_profile_is_shown_and_kept(command: list[str], tmp_path: Path, pretended, capsys) -> None:
    out = tmp_path / "out"
    options = ["--suite", "gsm8k", "--temperature", "0", "--methods", "tree", "--max-new-tokens", "64", "--profile"]
    assert main([*command, *options, "--out", str(out)]) == 0
    kept = json.loads((out / "profile.json").read_text())
    assert [one["method"] for one in kept] == ["ar", "tree"]
    assert all(one["milliseconds"]["recover"] > 0 for one in kept)
    shown = capsys.readouterr().out
    assert "ms a round (launches)" in shown
    assert "\nverify: convolution" in shown


def test_every_suite_temperature_and_method_is_run(command: list[str], tmp_path: Path, pretended) -> None:
    assert main([*command, *ALL, "--out", str(tmp_path / "out")]) == 0
    parts = parts_of(tmp_path / "out")
    suites = ("gsm8k", "humaneval", "spec-bench")
    assert list(parts) == [(s, t) for t in (0, 1) for s in suites] + [("all", 0), ("all", 1)]
    assert list(dict.fromkeys(pretended)) == [(s, t) for t in (0, 1) for s in suites]
    assert list(parts["all", 1]["methods"]) == ["ar", "ngram-chain", "chain", "tree"]
    assert parts["all", 1]["methods"]["tree"]["prompts"] == 3 + 2 + 3


def test_a_cut_run_goes_on_where_it_was_cut(command: list[str], tmp_path: Path, pretended) -> None:
    out, records = tmp_path / "out", tmp_path / "out" / "records.jsonl"
    assert main([*command, *ALL, "--out", str(out)]) == 0
    whole, report = records.read_text(), (out / "bench.json").read_text()
    lines = whole.splitlines(keepends=True)
    records.write_text("".join(lines[:-2]) + lines[-2][:40])
    pretended.clear()
    assert main([*command, *ALL, "--out", str(out)]) == 0
    assert pretended == [("spec-bench", 1.0)] * 2
    assert (records.read_text(), (out / "bench.json").read_text()) == (whole, report)
    assert main([*command, "--suite", "gsm8k", "--temperature", "0", "0.5", "--out", str(out)]) == 0
    assert pretended[2:] == [("gsm8k", 0.5)] * 3  # more may be asked of a run


def test_a_run_with_other_settings_is_refused(command: list[str], tmp_path: Path, pretended, capsys) -> None:
    out = tmp_path / "out"
    assert main([*command, *ALL, "--out", str(out)]) == 0
    before = (out / "records.jsonl").read_text()
    capsys.readouterr()
    assert main([*command, *ALL, "--out", str(out), "--max-new-tokens", "9"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert err[0].startswith("error: --out")
    assert "max_new_tokens 8, now 9" in err[0]
    assert (out / "records.jsonl").read_text() == before


def test_a_difference_beyond_near_ties_fails(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    wrong = measured(1.0, [8], [4], [[3, 1]], differences=[{"row": 0, "index": 0, "margin": 2.0, "near_tie": False}])
    made = record(["gsm8k"], ar=measured(1.0, [8], [8], [[]]), chain=wrong)
    monkeypatch.setattr(Bench, "run", lambda self, *args: made)
    assert main([*command, "--suite", "gsm8k", "--methods", "chain"]) == 1
    assert "3 (3 NOT near ties, margin at most 2)" in capsys.readouterr().out


def other(path: Path, name: str, content: bytes) -> str:
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (lambda t: ["--suite", "mmlu"], ["--suite", "mmlu", "gsm8k"]),
        (lambda t: ["--suite", "gsm8k", "--suite-dir", str(t / "absent")], ["--suite-dir", "no folder", "absent"]),
        (lambda t: ["--suite", "gsm8k", "--suite-dir", str(t)], ["gsm8k/test.jsonl", "--suite gsm8k"]),
        (
            lambda t: ["--suite", "humaneval", "--suite-dir", other(t, "humaneval/HumanEval.jsonl.gz", b"no gzip")],
            ["HumanEval.jsonl.gz", "gzip"],
        ),
        (
            lambda t: ["--suite", "gsm8k", "--suite-dir", other(t, "gsm8k/test.jsonl", b'{"question": "a"}\n{"q": 1}')],
            ["entry 2 of", "test.jsonl"],
        ),
        (lambda t: ["--suite", "gsm8k", "--suite-dir", other(t, "gsm8k/test.jsonl", b"\n")], ["holds no prompt"]),
        (lambda t: [*ALL, "--prompts", "0"], ["--prompts must be 1 or more, got 0"]),
        (lambda t: [*ALL, "--prompts", "some"], ["--prompts", "some"]),
        (lambda t: [*ALL, "--batch-size", "0"], ["--batch-size must be 1 or more, got 0"]),
        (lambda t: [*ALL, "--max-new-tokens", "0"], ["--max-new-tokens must be 1 or more, got 0"]),
        (lambda t: [*ALL, "--temperature", "0", "-1"], ["temperature", "-1"]),
        (lambda t: [*ALL, "--seed", "-1"], ["--seed must be 0 to", "-1"]),
        (lambda t: [*ALL, "--nodes", "65"], ["nodes must be 1 to 64, got 65"]),
        (lambda t: [*ALL, "--methods", "beam"], ["--methods", "beam"]),
        (lambda t: [*ALL, "--prompt-format", "chat"], ["--prompt-format chat", "no chat template"]),
        (lambda t: [*ALL, "--target", str(GDN / "base")], ["tokenizer.json"]),
        (lambda t: [*ALL, "--drafter", str(write_drafter(t / "d", 32))], ["another target", "hidden size 32, not 64"]),
        (lambda t: [*ALL, "--drafter", str(t / "absent")], ["drafter", "absent"]),
        (lambda t: [*ALL, "--out", other(t, "mine.txt", b"keep")], ["--out", "holds no benchmark"]),
    ],
)
def test_a_mistake_is_one_line_and_status_2(options, parts, command: list[str], tmp_path: Path, capsys) -> None:
    assert main([*command, *options(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


def test_drafts_of_a_model_need_a_drafter(target: Path, suite_dir: Path, capsys) -> None:
    command = ["bench", "--target", str(target), "--suite-dir", str(suite_dir), "--suite", "gsm8k"]
    assert main([*command, "--methods", "tree"]) == 2
    assert "--methods tree needs --drafter DIR" in capsys.readouterr().err
