"""The command: from token files to a drafter that decodes, fine-tuning, and mistakes."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import specla_jax
from drafter_training import DRAFTS, VOCAB
from reference import GDN
from specla_jax.cli import main as specla
from specla_jax.drafters import load_drafter
from train_drafter import evaluation
from train_drafter.drafter_cli import main


def test_command_trains_and_fine_tunes_with_the_same_vocabulary(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "DRAFTS", DRAFTS)
    # Evaluations decode at temperature 0 where they ask for 1, too: half of the programs.
    decode = evaluation.Evaluation.decode
    monkeypatch.setattr(
        evaluation.Evaluation, "decode", lambda self, params, method, temperature: decode(self, params, method, 0.0)
    )
    rng = np.random.default_rng(0)
    np.save(tmp_path / "first.npy", rng.integers(0, 40, (30, 20)))
    np.save(tmp_path / "other.npy", rng.integers(40, VOCAB, (30, 20)))
    options = ["--target", str(GDN / "base"), "--held-out-fraction", "0.2", "--steps", "2", "--batch", "2"]
    options += ["--length", "24", "--unroll", "2", "--warmup", "0", "--eval-every", "2", "--eval-prompts", "2"]
    options += ["--eval-tokens", "4", "--dtype", "float32", "--log-every", "1"]
    shape = ["--draft-vocab-size", "30", "--feature-layers", "1", "--window", "16", "--num-heads", "2"]
    command = [*options, "--data", str(tmp_path / "first.npy"), "--out", str(tmp_path / "run"), *shape]

    assert specla(["train-drafter", *command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "fc.kernel [64, 64]" in printed
    assert "lm_head.kernel [64, 30]" in printed
    assert "tokens an epoch" in printed
    assert not (tmp_path / "run" / "run.json").exists()

    assert specla(["train-drafter", *command]) == 0
    printed = capsys.readouterr().out
    assert "accepted_length_tree_t0" in printed
    assert (tmp_path / "run" / "training.png").read_bytes().startswith(b"\x89PNG")
    target = specla_jax.load_target(GDN / "base", dtype="float32")
    config, params = load_drafter(tmp_path / "run" / "drafter", target)
    assert (config.draft_vocab_size, config.feature_layers, config.window) == (30, (1,), 16)
    mapping = np.asarray(params["draft_to_target"])
    assert (np.diff(mapping) > 0).all()

    tuned = [*options, "--data", str(tmp_path / "other.npy"), "--out", str(tmp_path / "tuned")]
    tuned += ["--init", str(tmp_path / "run" / "drafter")]
    lengths = {f"accepted_length_{method}_t{t}": 1.0 for method in DRAFTS for t in (0, 1)}
    monkeypatch.setattr(evaluation.Evaluation, "__call__", lambda self, params: lengths)
    assert main(tuned) == 0
    _, after = load_drafter(tmp_path / "tuned" / "drafter", target)
    np.testing.assert_array_equal(after["draft_to_target"], mapping)
    assert (np.asarray(after["lm_head"]["kernel"]) != np.asarray(params["lm_head"]["kernel"])).any()
    capsys.readouterr()
    assert main([*tuned, "--window", "8"]) == 2
    assert "--window cannot be given with --init" in capsys.readouterr().err
    changed = [part if part != "30" else "20" for part in command]
    assert main(changed) == 2
    assert "draft_vocab_size 30, now 20" in capsys.readouterr().err

    prompt = [
        "decode",
        "--target",
        str(GDN / "base"),
        "--prompt-ids",
        "5,17,3",
        "--max-new-tokens",
        "4",
        "--depth",
        "2",
    ]
    assert specla([*prompt, "--drafter", str(tmp_path / "run" / "drafter"), "--method", "chain"]) == 0
    capsys.readouterr()
    assert specla(["decode", "--prompt", "a", "--drafter", str(tmp_path / "run" / "drafter")]) == 2
    assert "is a drafter for another target (hidden size 64, not 256; " in capsys.readouterr().err


def test_script_is_the_command(monkeypatch, capsys):
    """It has the name of the package that it runs."""
    monkeypatch.setattr("sys.argv", ["train_drafter.py", "--help"])
    monkeypatch.setattr("sys.path", ["scripts", *sys.path])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path("scripts/train_drafter.py", run_name="__main__")
    assert "usage: train_drafter.py" in capsys.readouterr().out
    done = subprocess.run([sys.executable, "scripts/train_drafter.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the following arguments are required: --data, --out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--loss", "mse"], "loss must be one of kl, lk, got 'mse'"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--warmup", "9"], "warmup must be 0 to steps - 1 = 1, got 9"),
        (["--unroll", "30"], "unroll must be at most length, 24, got 30"),
        (["--draft-vocab-size", "97"], "draft_vocab_size must be at most 96, got 97"),
        (["--feature-layers", "2"], "feature_layers must be layers 0 to 1 of the target, got [2]"),
        (["--self-generated", "2"], "--self-generated must be 0 to 1, got 2"),
        (["--generated-tokens", "0"], "--generated-tokens must be at least 1, got 0"),
        (["--init", "{tmp}/none"], "config.json does not exist"),
        (["--data", "{tmp}/none.jsonl"], "none.jsonl does not exist"),
        (["--out", "{tmp}"], "is not empty and holds no run"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--seed", "-1"], "seed must be 0 to 4294967295, got -1"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(change, message, tmp_path: Path, capsys):
    np.save(tmp_path / "a.npy", np.arange(80).reshape(10, 8))
    command = ["--target", str(GDN / "base"), "--data", str(tmp_path / "a.npy"), "--out", str(tmp_path / "run")]
    command += ["--steps", "2", "--warmup", "0", "--length", "24", "--batch", "2", "--held-out-fraction", "0.3"]
    assert main([*command, *(part.format(tmp=tmp_path) for part in change)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
