"""The command line: what it prints, and how a mistake ends."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specla_jax.lossless
from reference import GDN, Reference
from specla_jax.checkpoint import load_target
from specla_jax.cli import main
from specla_jax.config import SamplingConfig
from specla_jax.drafters import EagleConfig, init_eagle, save_drafter
from specla_jax.generate import generate

BASE = ["decode", "--target", str(GDN / "base"), "--stop-ids", "", "--max-new-tokens", "16"]


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def test_json_holds_the_greedy_tokens_and_counts_that_add_up(base: Reference, capsys) -> None:
    status = main([*BASE, "--prompt-ids", *map(ids, base.prompts), "--json", "--check-lossless"])
    out, err = capsys.readouterr()
    assert status == 0
    entries = [json.loads(line) for line in out.splitlines()]
    assert [entry["tokens"] for entry in entries] == [row[:16] for row in base.greedy]
    for entry, prompt in zip(entries, base.prompts, strict=True):
        assert entry["prompt_ids"] == prompt
        assert entry["finish_reason"] == "length"
        assert entry["accepted_length"] == 16 / entry["rounds"]
        assert entry["tokens_per_second"] == pytest.approx(16 / entry["seconds"])
        assert entry["rounds_per_second"] == pytest.approx(entry["rounds"] / entry["seconds"])
        assert len(entry["logprobs"]) == 16
    assert err.count("16 tokens equal plain decoding") == 2
    assert "memory: weights" in err
    assert "compiled generate" in err


def test_stream_prints_the_same_ids(base: Reference, capsys) -> None:
    assert main([*BASE, "--prompt-ids", ids(base.prompts[0]), "--stream", "--method", "chain"]) == 0
    out, err = capsys.readouterr()
    assert out == ids(base.prompts[0]) + " -> " + " ".join(map(str, base.greedy[0][:16])) + "\n"
    assert "tokens/s" in err
    assert "accepted length" in err


def test_a_lossy_decoding_is_reported_and_fails(base: Reference, capsys, monkeypatch) -> None:
    """Another sampler for the drafted run: the check names the place, the tokens and the margin, and returns 1."""
    fair = specla_jax.decode.generate

    def lossy(model, prompts, **options):
        return fair(model, prompts, **options | {"seed": 1 if options["method"] == "tree" else 0})

    monkeypatch.setattr(specla_jax.decode, "generate", lossy)
    status = main([*BASE, "--prompt-ids", ids(base.prompts[0]), "--temperature", "1", "--check-lossless"])
    err = capsys.readouterr().err
    assert status == 1
    assert "first difference at output token 0" in err
    assert "NOT a near tie" in err


def test_margin_of_a_difference(base: Reference) -> None:
    """The reported margin is the reference's own top-2 margin; equal texts and early ends are told apart."""
    greedy, prompt, place = base.greedy[0], base.prompts[0], 7
    logits = generate(base.model, [prompt], method="ar", max_new_tokens=8).logprobs[0]
    assert len(logits) == 8
    margin = float(base.expected["greedy_margin"][0, place])
    args = (base.model, prompt, greedy[:16])
    assert specla_jax.lossless.first_difference(*args, greedy[:16], SamplingConfig(), 0) is None
    short = specla_jax.lossless.first_difference(*args, greedy[:9], SamplingConfig(), 0)
    assert (short.index, short.got, short.near_tie) == (9, None, False)
    margins = []
    for token in range(96):
        got = [*greedy[:place], token, *greedy[place + 1 : 16]]
        found = specla_jax.lossless.first_difference(*args, got, SamplingConfig(), 0)
        if found is not None:
            assert (found.index, found.expected, found.got) == (place, greedy[place], token)
            margins.append(found.margin)
    assert min(margins) == pytest.approx(margin, abs=1e-3)


def test_prompts_from_files(base: Reference, tmp_path: Path, capsys) -> None:
    lines = [json.dumps({"prompt_ids": prompt}) for prompt in base.prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    assert main([*BASE, "--prompts", str(tmp_path / "prompts.jsonl"), "--json", "--batch-size", "1"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["tokens"] for entry in entries] == [row[:16] for row in base.greedy]


def broken(tmp_path: Path, change) -> str:
    """A copy of the base checkpoint with its tensors changed."""
    folder = tmp_path / "broken"
    shutil.copytree(GDN / "base", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def missing_shard(tmp_path: Path) -> str:
    folder = tmp_path / "shards"
    shutil.copytree(GDN / "legacy-shards", folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return str(folder)


def unknown_key(tensors: dict) -> None:
    tensors["model.layers.0.attn.E"] = np.zeros(2, np.float32)


def wrong_shape(tensors: dict) -> None:
    tensors["model.norm.weight"] = np.ones(63, np.float32)


def not_finite(tensors: dict) -> None:
    tensors["lm_head.weight"][3, 3] = np.nan


def full_folder(tmp_path: Path) -> str:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep me")
    return str(tmp_path / "full")


def foreign_drafter(tmp_path: Path) -> str:
    config = EagleConfig(
        hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, target_hidden_size=32,
        target_num_hidden_layers=2, target_vocab_size=96,
    )  # fmt: skip
    save_drafter(init_eagle(jax.random.key(0), config), config, tmp_path / "drafter")
    return str(tmp_path / "drafter")


def prompt_file(tmp_path: Path, content: bytes) -> str:
    (tmp_path / "prompts.jsonl").write_bytes(content)
    return str(tmp_path / "prompts.jsonl")


FILE = ["decode", "--target", str(GDN / "base"), "--prompts"]
DECODE = ["decode", "--target", str(GDN / "base"), "--prompt-ids"]


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (lambda t: ["convert", missing_shard(t), str(t / "out")], ["model-00002-of-00002.safetensors"]),
        (lambda t: ["convert", broken(t, unknown_key), str(t / "out")], ["model.layers.0.attn.E"]),
        (lambda t: ["convert", broken(t, wrong_shape), str(t / "out")], ["model.norm.weight", "63", "64"]),
        (lambda t: ["convert", broken(t, not_finite), str(t / "out")], ["lm_head.weight"]),
        (lambda t: ["convert", str(t / "absent"), str(t / "out")], ["absent"]),
        (lambda t: ["convert", str(GDN / "base"), full_folder(t)], ["full", "--overwrite"]),
        (lambda t: ["decode", "--target", str(t / "absent"), "--prompt-ids", "1"], ["absent"]),
        (lambda t: ["decode", "--target", str(GDN / "base"), "--prompts", str(t / "absent.txt")], ["absent.txt"]),
        (lambda t: ["decode", "--target", str(GDN / "base"), "--prompt", "hello"], ["tokenizer", "--prompt-ids"]),
        (lambda t: [*FILE, prompt_file(t, b'{"prompt_ids": ["a"]}')], ["line 1 of", "prompts.jsonl", "prompt_ids"]),
        (lambda t: [*FILE, prompt_file(t, b"[1, 2]")], ["line 1 of", "prompts.jsonl"]),
        (lambda t: [*FILE, prompt_file(t, b"\xff\xfe")], ["prompts.jsonl is not UTF-8"]),
        (lambda t: [*FILE, prompt_file(t, b"  \n")], ["prompts.jsonl holds no prompt"]),
        (lambda t: [*DECODE, ""], ["prompt 0 is empty"]),
        (lambda t: [*DECODE, "1,96"], ["token id 96", "96"]),
        (lambda t: [*DECODE, "1,-3"], ["token id -3", "96"]),
        (lambda t: [*DECODE, "1,x"], ["--prompt-ids", "1,x"]),
        (lambda t: [*DECODE, "1", "--nodes", "0"], ["nodes must be 1 to 64, got 0"]),
        (lambda t: [*DECODE, "1", "--nodes", "65"], ["nodes must be 1 to 64, got 65"]),
        (lambda t: [*DECODE, "1", "--method", "chain", "--branch", "2"], ["branch must be 1", "got 2"]),
        (lambda t: [*DECODE, "1", "--temperature", "-1"], ["temperature", "-1"]),
        (lambda t: [*DECODE, "1", "--top-p", "0"], ["top_p", "0"]),
        (lambda t: [*DECODE, "1", "--max-new-tokens", "0"], ["max_new_tokens must be 1 or more, got 0"]),
        (lambda t: [*DECODE, "1", "--stop-ids", "96"], ["stop_token_ids", "96"]),
        (lambda t: [*DECODE, "1", "--seed", "-1"], ["seed must be 0 to", "-1"]),
        (lambda t: [*DECODE, "1", "--drafter", "nothing"], ["drafter", "nothing"]),
        (lambda t: [*DECODE, "1", "--drafter", foreign_drafter(t)], ["hidden", "32", "64"]),
        (lambda t: [*DECODE, "1", "--memory-limit", "0.0001"], ["needs", "are free", "fewer prompts"]),
        (lambda t: [*DECODE, "1", "--method", "magic"], ["--method", "magic"]),
        (lambda t: ["decode", "--target", str(GDN / "base")], ["--prompt"]),
        (lambda t: ["decoed"], ["decoed"]),
    ],
)
def test_a_mistake_is_one_line_and_status_2(command, parts: list[str], tmp_path: Path, capsys) -> None:
    status = main(command(tmp_path))
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert len([line for line in err.splitlines() if not line.startswith(("memory:", "read", "note"))]) == 1
    for part in parts:
        assert part in last
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "full").exists() or (tmp_path / "full" / "mine.txt").read_text() == "keep me"


def test_a_converted_folder_decodes_like_its_source(base: Reference, tmp_path: Path, capsys) -> None:
    assert main(["convert", str(GDN / "base"), str(tmp_path / "converted")]) == 0
    command = ["decode", "--target", str(tmp_path / "converted"), "--stop-ids", "", "--max-new-tokens", "8", "--json"]
    assert main([*command, "--prompt-ids", ids(base.prompts[0])]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == base.greedy[0][:8]
    assert load_target(tmp_path / "converted", dtype="float32").config == base.model.config
