"""What ``make demo`` shows, and the bundled drafter behind it."""

import hashlib
import json
import re

import pytest

import specla_jax.decode
import specla_jax.demo
from reference import GDN
from specla_jax.cli import main
from specla_jax.decode import bundled_drafter, bundled_target
from specla_jax.demo import DRAFTS, PROMPTS, demo
from specla_jax.errors import UserError


def test_demo_shows_trees_above_chains_and_texts_that_equal_plain_decoding(capsys, monkeypatch) -> None:
    monkeypatch.setattr(specla_jax.demo, "REPEATS", 1)
    assert demo() == 0
    out = capsys.readouterr().out
    for prompt in PROMPTS:
        assert prompt in out
    pattern = r"^ +(\d) +(ar|chain|tree) +(\d+) +(\d+) +[\d.]+ +[\d.]+ +([\d.]+)  equal$"
    rows = re.findall(pattern, out, re.MULTILINE)
    assert [row[:2] for row in rows] == [(number, method) for number in "123" for method in DRAFTS]
    for start in range(0, 9, 3):
        plain, chain, tree = rows[start : start + 3]
        assert int(plain[3]) > 20
        assert chain[2:4] == (tree[2], plain[3])  # as many nodes, as many tokens
        assert float(plain[4]) == 1
        assert float(tree[4]) > float(chain[4]) >= 2.5


def test_the_bundled_drafter_belongs_to_the_bundled_model() -> None:
    """Loading checks the shapes; the hash is what tells two models of one shape apart."""
    config = json.loads((bundled_drafter() / "config.json").read_text())
    tokenizer = (bundled_target() / "tokenizer.json").read_bytes()
    assert config["target_vocabulary_hash"] == hashlib.sha256(tokenizer).hexdigest()
    files = [path.stat() for path in bundled_drafter().iterdir()]
    assert sum(file.st_size for file in files) <= 6e6
    assert all(file.st_mode & 0o444 == 0o444 for file in files)


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        (["--prompt", "a"], str(bundled_drafter())),
        (["--prompt", "a", "--drafter", "ngram"], "ngram"),
        (["--prompt-ids", "1", "--target", str(GDN / "base")], "ngram"),
    ],
)
def test_the_bundled_drafter_is_the_default_of_the_bundled_model_alone(options, drafter, capsys, monkeypatch) -> None:
    def generate(*args, **options):
        raise UserError(str(options["drafter"]))

    monkeypatch.setattr(specla_jax.decode, "generate", generate)
    assert main(["decode", *options]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {drafter}"
