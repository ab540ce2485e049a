"""The decode path on a GPU, against what the reference implementation computed. Run with ``-m gpu``."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import GDN, Reference, load_reference
from specla_jax.checkpoint import load_target
from specla_jax.cli import main
from specla_jax.config import DraftConfig, SamplingConfig
from specla_jax.decode import bundled_target
from specla_jax.drafters import ScriptedDrafter, script_chain
from specla_jax.generate import generate
from specla_jax.lossless import first_difference
from specla_jax.model import GatedDeltaNetLM, call
from specla_jax.state import RecurrentState
from specla_jax.text import load_tokenizer

pytestmark = pytest.mark.gpu

CHAIN = DraftConfig(depth=5, branch=1, nodes=6)
TREE = DraftConfig(depth=5, branch=3, nodes=16)


@pytest.fixture(autouse=True)
def on_a_gpu() -> None:
    assert jax.default_backend() == "gpu", "these tests were asked for, and there is no GPU"


def test_logits_and_states_in_full_precision(reference: Reference) -> None:
    """Also shows that no product runs in TF32, which would miss the bound by far."""
    model = GatedDeltaNetLM(reference.model.config)

    @jax.jit
    def run(params, tokens):
        state = RecurrentState.zeros(model.config, 2, "float32")
        hidden, _, state = call(model, params, "prefill", tokens, None, state)
        return call(model, params, "head", hidden), state

    logits, state = run(reference.model.params, jnp.asarray(reference.expected["input_ids"]))
    np.testing.assert_allclose(logits, reference.expected["logits"], atol=5e-4, rtol=0)
    for layer in range(model.config.num_hidden_layers):
        np.testing.assert_allclose(state.S[layer], reference.expected[f"recurrent_state.{layer}"], atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["base", "gva", "no-conv"])
def test_greedy_tokens(name: str) -> None:
    reference = load_reference(name)
    for method, draft in (("ar", None), ("chain", CHAIN), ("tree", TREE)):
        result = generate(reference.model, reference.prompts, method=method, draft=draft, max_new_tokens=64)
        assert result.tokens == reference.greedy, method
    for right in (0, 3, 5):
        drafter = (ScriptedDrafter(draft=CHAIN), script_chain(reference.greedy, 5, right))
        result = generate(reference.model, reference.prompts, method="chain", drafter=drafter, max_new_tokens=64)
        assert result.tokens == reference.greedy
        assert result.rounds == [-(-64 // (right + 1))] * 2


def test_the_command_writes_the_greedy_tokens(reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [",".join(map(str, prompt)) for prompt in reference.prompts]
    options = ["--method", "tree", "--max-new-tokens", "64", "--stop-ids", "", "--dtype", "float32", "--json"]
    assert main(["decode", "--target", str(GDN / reference.name), "--prompt-ids", *prompts, *options]) == 0
    found = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    assert found == reference.greedy


def test_one_seed_gives_one_text() -> None:
    reference = load_reference("base")
    options = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.02, "max_new_tokens": 48, "seed": [5, 6]}
    plain = generate(reference.model, reference.prompts, method="ar", **options).tokens
    for method, draft in (("chain", CHAIN), ("tree", TREE)):
        assert generate(reference.model, reference.prompts, method=method, draft=draft, **options).tokens == plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_model_differs_from_plain_decoding_at_near_ties_only(dtype, record_property) -> None:
    folder = bundled_target()
    model = load_target(folder, dtype=dtype)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in ("Question: Tom has 5 boxes of pencils.", "def read_lines(path):\n")]
    plain = generate(model, prompts, method="ar", max_new_tokens=512)
    drafted = generate(model, prompts, method="tree", max_new_tokens=512)
    for row, prompt in enumerate(prompts):
        found = first_difference(model, prompt, plain.tokens[row], drafted.tokens[row], SamplingConfig(), 0)
        print(dtype, "row", row, "first difference:", found)
        assert found is None or found.near_tie
        assert found is None or dtype == "bfloat16"


def test_no_fixture_is_left_out() -> None:
    assert len(list(GDN.iterdir())) == 10
