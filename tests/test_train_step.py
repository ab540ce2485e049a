"""The trainer's forward pass against the model's own, its gradient in bf16."""

import re
import runpy
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specla_jax.config import TargetConfig
from specla_jax.model import GatedDeltaNetLM
from train_drafter.target import logits, token_losses

CONFIG = TargetConfig(
    vocab_size=50,
    hidden_size=48,
    num_hidden_layers=2,
    num_heads=2,
    num_v_heads=4,
    head_dim=16,
    head_v_dim=16,
    intermediate_size=72,
)
WINDOWS = np.random.default_rng(0).integers(0, 50, (2, 90)).astype(np.int32)


def setup(**changes):
    """The model in float32 and in bf16, and parameters, which are the same for both."""
    model, narrow = (GatedDeltaNetLM(replace(CONFIG, **changes), dtype) for dtype in ("float32", "bfloat16"))
    return model, narrow, jax.jit(model.init)(jax.random.key(1), WINDOWS[:, :8])["params"]


def error(one, other) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"use_gate": False}, {"use_short_conv": False}],
    ids=["plain", "tied", "no gate", "no conv"],
)
def test_logits_are_those_of_the_model(changes):
    """In float32 the same, in bf16 as near to them as the model's own."""
    model, narrow, params = setup(**changes)

    def run(function):
        return np.asarray(jax.jit(function)(params))

    wanted = run(lambda p: model.apply({"params": p}, WINDOWS))
    np.testing.assert_allclose(run(lambda p: logits(model, p, WINDOWS)), wanted, atol=2e-6)
    own = error(run(lambda p: narrow.apply({"params": p}, WINDOWS)), wanted)
    assert error(run(lambda p: logits(narrow, p, WINDOWS)), wanted) < 1.3 * own


def test_gradient_in_bf16_is_that_in_float32():
    """As near to it as what automatic differentiation makes of the model in bf16."""
    model, narrow, params = setup()

    def own_losses(p):
        return optax.softmax_cross_entropy_with_integer_labels(
            narrow.apply({"params": p}, WINDOWS[:, :-1]), WINDOWS[:, 1:]
        )

    losses = (partial(token_losses, model), partial(token_losses, narrow))
    functions = [lambda p, f=f: f(p, WINDOWS).mean() for f in losses] + [lambda p: own_losses(p).mean()]
    wanted, got, own = (jax.jit(jax.grad(function))(params) for function in functions)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))
    wanted, got, own = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)]) for x in (wanted, got, own))
    assert error(got, wanted) < 1.2 * error(own, wanted)


def test_bf16_projections_have_bf16_gradients():
    """A product of a float32 gradient and a widened operand runs at a third of the speed on a GPU."""
    _, narrow, params = setup()
    loss = jax.grad(lambda p: token_losses(narrow, p, WINDOWS).mean())
    text = jax.jit(loss).lower(params).as_text()
    products = re.findall(r"dot_general.*: \((.*), (.*)\) -> ", text)
    widths = {f"x{n}x" for n in (CONFIG.hidden_size, CONFIG.vocab_size, CONFIG.intermediate_size * 2)}
    ours = [pair for pair in products if any(width in side for side in pair for width in widths)]
    assert len(ours) > 9
    assert all(side.endswith("xbf16>") for pair in ours for side in pair)


def test_the_benchmark_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_train_step.py", "--shape", "tiny", "--steps", "1"])
    runpy.run_path("scripts/bench_train_step.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert printed.rstrip().endswith(", finite")
