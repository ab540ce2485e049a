"""Training a small target: data, tokenizer, sampler, resumption, and the script from text to a loadable folder."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from specla_jax.checkpoint import load_target
from specla_jax.config import TargetConfig
from specla_jax.errors import UserError
from train_drafter.data import (
    TokenData,
    WindowSampler,
    held_out_windows,
    is_held_out,
    prepare,
    read_documents,
)
from train_drafter.target import TrainingConfig, TrainingResult, decay_mask, init_carry, train
from train_drafter.target_cli import main
from train_drafter.tokenizer import load_tokenizer, train_tokenizer

ODD_TEXT = "A 世界 \u200d🙂 <|eos|>\r\n\tdef f(x):\n        return x ** 2  # 1234\x00 \ud7ff"
SMALL = ["--layers", "1", "--hidden-size", "32", "--heads", "1", "--head-dim", "16", "--head-v-dim", "16"]
SMALL += ["--intermediate-size", "32", "--vocab-size", "300", "--batch", "4", "--length", "32", "--warmup", "2"]


def stories(count: int) -> list[str]:
    names = ["Ann", "Bob", "Cara", "Dan", "Eve"]
    return [
        f"{names[i % 5]} has {i} apples and buys {i + 1}. Now {names[i % 5]} has {2 * i + 1}." for i in range(count)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "stories.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in stories(200)))
    code = folder / "code"
    (code / "tests").mkdir(parents=True)
    for i in range(40):
        (code / f"f{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n")
    (code / "tests" / "test_f.py").write_text("hidden = 1\n")
    (code / "latin.txt").write_bytes(b"caf\xe9")
    (code / "empty.txt").write_text(" \n")
    return folder


@pytest.fixture(scope="module")
def data(corpus: Path) -> TokenData:
    paths = [corpus / "stories.jsonl", corpus / "code"]
    return prepare(paths, corpus / "prepared", fraction=0.2, vocab_size=300)


@pytest.fixture(scope="module")
def target(data: TokenData) -> TargetConfig:
    return TargetConfig(
        vocab_size=data.vocab_size,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=1,
        num_v_heads=2,
        head_dim=16,
        head_v_dim=8,
        intermediate_size=32,
        bos_token_id=data.bos_token_id,
        eos_token_ids=(data.eos_token_id,),
    )


TRAINING = TrainingConfig(steps=40, batch=4, length=32, learning_rate=1e-2, warmup=4, eval_every=15)


@pytest.fixture(scope="module")
def unbroken(
    data: TokenData, target: TargetConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingResult, Path]:
    out = tmp_path_factory.mktemp("unbroken")
    return train(data, target, TRAINING, out, progress=False, log_every=1), out


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def documents_of(data: TokenData, array: np.ndarray, span: tuple[int, int]) -> list[str]:
    """Splits a packed span at its BOS and EOS, checking that nothing lies between documents."""
    tokenizer = load_tokenizer(data.folder)
    tokens = array[span[0] : span[1]].tolist()
    found = []
    while tokens:
        assert tokens[0] == data.bos_token_id
        end = tokens.index(data.eos_token_id)
        found.append(tokenizer.decode(tokens[1:end]))
        tokens = tokens[end + 1 :]
    return found


def test_tokenizer_round_trips_any_text():
    tokenizer = train_tokenizer(stories(50), 300)
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(ODD_TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == ODD_TEXT
    assert not {0, 1} & set(ids)
    assert 258 < tokenizer.get_vocab_size() <= 300  # so small a text has few pairs to merge
    assert tokenizer.encode("Ann").ids[0] == tokenizer.token_to_id("<|bos|>") == 0
    assert [tokenizer.decode([i]) for i in tokenizer.encode("123", add_special_tokens=False).ids] == ["1", "2", "3"]


def test_tokens_of_a_line_do_not_depend_on_the_next_line():
    tokenizer = train_tokenizer(["def f(x):\n    return x\n\n\nclass A:\n    pass\n"] * 20, 300)
    whole = tokenizer.encode("def f(x):\n    return x\n\n").ids
    for prompt in ("def f(x):\n", "def f(x):\n    return x\n"):
        ids = tokenizer.encode(prompt).ids
        assert whole[: len(ids)] == ids


def test_packing_keeps_every_document_on_one_side(data: TokenData, corpus: Path):
    for source, path in zip(data.sources, (corpus / "stories.jsonl", corpus / "code"), strict=True):
        train_side = documents_of(data, data.train, source.train)
        held_side = documents_of(data, data.held_out, source.held_out)
        assert train_side
        assert held_side
        assert not set(train_side) & set(held_side)
        assert sorted(train_side + held_side) == sorted(read_documents(path))
        assert all(is_held_out(text, 0.2) for text in held_side)
        assert source.documents == len(train_side) + len(held_side)
        assert source.held_out_bytes == sum(len(text.encode()) for text in held_side)
    assert data.train.dtype == np.uint16
    assert isinstance(data.train, np.memmap)
    assert sum(source.train_tokens for source in data.sources) == len(data.train)


def test_what_counts_as_a_document(corpus: Path, tmp_path: Path):
    assert len(read_documents(corpus / "code")) == 40  # no tests, no Latin-1, nothing empty
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n\n")
    assert read_documents(problems) == ["Question: 1+1?\nAnswer: 2"]


def test_duplicates_and_held_out_sources_never_reach_training(corpus: Path, tmp_path: Path):
    texts = stories(200)
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (texts[0], "fresh")))
    (tmp_path / "held.txt").write_text(texts[7])
    paths = [corpus / "stories.jsonl", tmp_path / "more.jsonl"]
    data = prepare(paths, tmp_path / "d", held_out_paths=[tmp_path / "held.txt"], fraction=0.2, vocab_size=300)
    assert data.sources[1].documents == 1
    assert data.sources[2].train_tokens == 0
    assert documents_of(data, data.held_out, data.sources[2].held_out) == [texts[7]]
    assert texts[7] not in documents_of(data, data.train, data.sources[0].train)
    (tmp_path / "again.txt").write_text(texts[0])
    with pytest.raises(UserError, match=r"again.txt leaves nothing to train on"):
        prepare([corpus / "stories.jsonl", tmp_path / "again.txt"], tmp_path / "e", fraction=0.2, vocab_size=300)


def test_text_that_spells_a_special_token_stays_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one <|eos|> two " * 20)
    (tmp_path / "b.txt").write_text("held <|bos|> out")
    data = prepare(
        [tmp_path / "a.txt"], tmp_path / "d", held_out_paths=[tmp_path / "b.txt"], fraction=0, vocab_size=300
    )
    assert np.count_nonzero(data.train == data.eos_token_id) == 1
    assert np.count_nonzero(data.held_out == data.bos_token_id) == 1


def test_sampler_is_a_function_of_seed_and_step(data: TokenData):
    sampler = WindowSampler(data, 64, 32, (), 5)
    later = sampler(7)
    sampler(8)
    np.testing.assert_array_equal(sampler(7), later)
    np.testing.assert_array_equal(WindowSampler(TokenData.load(data.folder), 64, 32, (), 5)(7), later)
    assert (WindowSampler(data, 64, 32, (), 6)(7) != later).any()
    assert (sampler(8) != later).any()
    assert later.shape == (64, 33)
    assert later.dtype == np.int32


def test_weights_choose_the_source_and_windows_stay_inside_it(data: TokenData):
    first, second = (data.train[slice(*source.train)] for source in data.sources)
    windows = WindowSampler(data, 200, 32, (0.0, 1.0), 0)(0)
    inside = {tuple(second[i : i + 33]) for i in range(len(second) - 32)}
    assert {tuple(window) for window in windows} <= inside
    last = {tuple(window) for step in range(60) for window in WindowSampler(data, 200, 32, (0.0, 1.0), 0)(step)}
    assert last == inside  # the first and the last window of the source occur too
    assert WindowSampler(data, 4, 32, (3.0, 1.0), 0).shares == {"stories.jsonl": 0.75, "code": 0.25}
    assert len(first) > 33


def test_held_out_windows_predict_each_token_once(data: TokenData):
    source = data.sources[0]
    windows, mask = held_out_windows(data, source, 32)
    expected = data.held_out[source.held_out[0] + 1 : source.held_out[1]]
    np.testing.assert_array_equal(windows[:, 1:][mask == 1], expected)
    few, _ = held_out_windows(data, source, 32, limit=2)
    np.testing.assert_array_equal(few, windows[[0, -1]])


def test_decay_spares_norms_gates_and_filters(target: TargetConfig):
    from specla_jax.model import GatedDeltaNetLM

    params = jax.eval_shape(lambda: init_carry(GatedDeltaNetLM(target), TRAINING)["params"])
    mask = decay_mask(params)
    attn = mask["layers_0"]["attn"]
    assert attn["in_proj"]["kernel"]
    assert attn["o_proj"]["kernel"]
    assert mask["embeddings"]["embedding"]
    assert mask["lm_head"]["kernel"]
    assert mask["layers_0"]["mlp"]["gate_up_proj"]["kernel"]
    assert not attn["A_log"]
    assert not attn["dt_bias"]
    assert not attn["conv"]["kernel"]
    assert not attn["o_norm"]["scale"]
    assert not mask["norm"]["scale"]
    assert not mask["layers_0"]["attn_norm"]["scale"]


def test_loss_falls_and_the_best_step_is_kept(unbroken: tuple[TrainingResult, Path]):
    result, out = unbroken
    losses = [line["loss"] for line in metrics(out) if "loss" in line]
    assert len(losses) == 40
    assert losses[0] > 5
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    held = {line["step"]: line["held_out"]["mean"] for line in metrics(out) if "held_out" in line}
    assert sorted(held) == [15, 30, 40]
    assert result.finished
    assert result.step == min(held, key=lambda step: held[step])
    assert result.held_out["mean"] == pytest.approx(held[result.step], rel=1e-5)
    assert set(result.held_out) == {"stories.jsonl", "code", "mean"}


def test_a_resumed_run_equals_an_unbroken_one(
    data: TokenData, target: TargetConfig, unbroken: tuple[TrainingResult, Path], tmp_path: Path
):
    stopped = train(data, target, TRAINING, tmp_path, stop_after=17, progress=False, log_every=1)
    assert not stopped.finished
    with (tmp_path / "metrics.jsonl").open("a") as log:  # what a crash after the checkpoint leaves behind
        log.write('{"step": 18, "loss": 99}\n{"step": 1')
    resumed = train(data, target, TRAINING, tmp_path, progress=False, log_every=1)
    result, out = unbroken
    assert resumed.step == result.step
    jax.tree.map(np.testing.assert_array_equal, resumed.params, result.params)
    assert [line["loss"] for line in metrics(tmp_path) if "loss" in line] == [
        line["loss"] for line in metrics(out) if "loss" in line
    ]
    again = train(data, target, TRAINING, tmp_path, progress=False)  # nothing is left to do
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)


def test_script_from_text_to_a_folder_that_loads(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    command = ["--data", str(corpus / "stories.jsonl"), "--held-out-fraction", "0.2", "--out", str(out), *SMALL]
    command += ["--steps", "4", "--eval-every", "2", "--model-dtype", "float32"]

    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "parameters:" in printed
    assert "['in_proj']['kernel'] [32, 66]" in printed
    assert "tokens: 128 a step, 512 in all" in printed
    assert "an epoch" in printed
    assert not (out / "model").exists()
    assert not (out / "run.json").exists()

    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "held-out loss" in printed
    assert "stories.jsonl" in printed
    model = load_target(out / "model", "float32")
    assert model.config.vocab_size == load_tokenizer(out / "model").get_vocab_size()
    assert model.config.bos_token_id == 0
    assert model.config.eos_token_ids == (1,)
    assert model.config.tie_word_embeddings
    assert (out / "model" / "tokenizer.json").is_file()

    assert main([*command, "--learning-rate", "0.5"]) == 2
    assert "learning_rate 0.001, now 0.5" in capsys.readouterr().err
    assert main([*command, "--held-out-fraction", "0.3"]) == 2
    assert "other data or settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--data", "{corpus}/absent"], "absent does not exist"),
        (["--data", "{corpus}/code/latin.txt"], "latin.txt is not UTF-8"),
        (["--data", "{corpus}/prepared/train.npy"], "must be one of .txt, .md, .py, .jsonl"),
        (["--data", "{tmp}/bad.jsonl"], "bad.jsonl line 2 must be an object with 'text'"),
        (["--data", "{tmp}/empty.txt"], "empty.txt holds no documents"),
        (["--held-out-fraction", "1"], "--held-out-fraction must be at least 0 and below 1"),
        (["--held-out-fraction", "0"], "no document is held out"),
        (["--held-out", "{tmp}/copy"], "code leaves nothing to train on"),
        (["--data", "{corpus}/code", "{corpus}/code"], "a source is given twice"),
        (["--vocab-size", "100"], "--vocab-size must be at least 258"),
        (["--tokenizer", "{tmp}"], "has no tokenizer.json"),
        (["--length", "100000"], "too few for --length 100000"),
        (["--weights", "1", "2", "3"], "--weights must give 2 numbers"),
        (["--weights", "0", "0"], "--weights must be 0 or more and not all 0"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--warmup", "9999"], "warmup must be 0 to steps - 1"),
        (["--learning-rate", "0"], "learning_rate must be above 0"),
        (["--heads", "0"], "num_heads must be a positive integer"),
        (["--seed", "-1"], "seed must be 0 or more"),
        (["--out", "{tmp}/empty.txt"], "is a file, not a folder"),
        (["--out", "{tmp}/full"], "is not empty and holds no run"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(
    change: list[str], message: str, corpus: Path, data: TokenData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "copy").symlink_to(corpus / "code")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    command = ["--data", str(corpus / "stories.jsonl"), str(corpus / "code"), "--held-out-fraction", "0.2"]
    command += ["--out", str(tmp_path / "run"), *SMALL, "--steps", "4"]
    command += [part.format(corpus=corpus, tmp=tmp_path) for part in change]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_diverged_run_says_so(data: TokenData, target: TargetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import train_drafter.target as module

    def broken(params, opt_state, windows):
        return params, opt_state, {"loss": float("nan"), "grad_norm": 0.0}

    monkeypatch.setattr(module, "make_train_step", lambda *_: broken)
    with pytest.raises(UserError, match="the loss is nan at step 1; try a lower --learning-rate"):
        train(data, target, TRAINING, tmp_path, progress=False, log_every=1)
