"""What ``make demo`` shows."""

import re

from specla_jax.demo import PROMPTS, demo


def test_demo_streams_three_texts_that_equal_plain_decoding(capsys) -> None:
    assert demo() == 0
    out = capsys.readouterr().out
    for prompt in PROMPTS:
        assert prompt in out
    rows = re.findall(r"^ +\d +(\d+) +[\d.]+ tok/s +[\d.]+ tok/s +[\d.]+ +([\d.]+)  equal$", out, re.MULTILINE)
    assert len(rows) == 3
    for tokens, accepted_length in rows:
        assert int(tokens) > 20
        assert float(accepted_length) > 1
