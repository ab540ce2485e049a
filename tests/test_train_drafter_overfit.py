"""A drafter that knows a few texts by heart: what teacher forcing predicts is what decoding does."""

import numpy as np
import pytest

import specla_jax
from drafter_training import DRAFTS, documents, metrics
from reference import GDN, Reference
from specla_jax.config import DraftConfig
from specla_jax.drafters import ScriptedDrafter, script_chain
from specla_jax.generate import generate
from specla_jax.model import GatedDeltaNetLM
from train_drafter import evaluation
from train_drafter.calibration import calibrate
from train_drafter.drafter import DrafterTraining, train
from train_drafter.drafter_cli import default_config
from train_drafter.evaluation import Evaluation, rounds_of
from train_drafter.generated import self_generated
from train_drafter.objective import Frozen, Objective
from train_drafter.packing import RowSampler, pack


@pytest.fixture(scope="module")
def drafts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "DRAFTS", DRAFTS)
        yield DRAFTS


class Greedy(Evaluation):
    """Decodes by the chain at temperature 0 whatever it is asked for: of four programs, the one looked at here."""

    def _request(self, params, method, temperature, draft=None):
        return super()._request(params, "chain", 0.0)


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory, drafts):
    """A drafter that has learned the greedy texts of a target, and the prompts of these."""
    target = specla_jax.load_target(GDN / "base", dtype="float32")
    out = tmp_path_factory.mktemp("overfit")
    prompts = documents(8, seed=4, size=8)
    texts = self_generated(
        prompts,
        target,
        out / "data",
        share=1,
        longest_prompt=4,
        new_tokens=24,
        temperature=0,
        seed=0,
        fingerprint="",
        progress=False,
    )
    training = DrafterTraining(
        steps=300, batch=4, length=64, unroll=4, step_weight=1, learning_rate=1e-2, warmup=5, eval_every=300
    )
    config = default_config(target, intermediate_size=64)
    decoding = Greedy(target, config, [tokens[:4].tolist() for tokens, _ in texts], 24)
    sampler = RowSampler(pack(texts, training.length), training.batch, 0)
    result = train(target, config, training, sampler, decoding, out, settings={}, progress=False, log_every=50)
    return target, config, texts, decoding, result, out


def test_an_overfitted_drafter_reaches_its_teacher_forced_prediction(overfitted):
    target, _, _, decoding, result, out = overfitted
    report = result.best
    predicted = report["predicted_accepted_length_chain_t0"]
    assert report["accepted_length_chain_t0"] == pytest.approx(predicted, rel=0.05)
    assert predicted > 3.5
    last = [line for line in metrics(out) if "loss" in line][-1]
    assert last["acceptance_by_depth"][0] > 0.8
    # The file decodes as the drafter in training did, but for its rounding to bf16.
    options = {"method": "chain", "draft": DRAFTS["chain"], "max_new_tokens": 24}
    decoded = generate(target, decoding.prompts, drafter=out / "drafter", **options)
    assert decoded.tokens == generate(target, decoding.prompts, method="ar", max_new_tokens=24).tokens
    assert sum(map(len, decoded.tokens)) / sum(decoded.rounds) == pytest.approx(predicted, rel=0.05)


def test_texts_written_by_the_target_are_its_own_and_kept(overfitted):
    target, _, texts, decoding, _, out = overfitted
    plain = generate(target, decoding.prompts, method="ar", max_new_tokens=24)
    assert [tokens.tolist() for tokens, _ in texts] == [
        [*prompt, *tokens] for prompt, tokens in zip(decoding.prompts, plain.tokens)
    ]
    prompts = documents(8, seed=4, size=8)
    options = {"longest_prompt": 4, "new_tokens": 24, "temperature": 0, "seed": 0, "progress": False}
    kept = self_generated(prompts, target, out, share=0, fingerprint="", **options)
    assert kept is prompts
    (file,) = (out / "data").glob("*-tokens.npy")
    np.save(file, np.load(file)[::-1])  # what is there is not made again
    again = self_generated(prompts, target, out / "data", share=1, fingerprint="", **options)
    np.testing.assert_array_equal(again.tokens, texts.tokens[::-1])


def test_calibration_says_what_the_fitted_temperature_does(overfitted):
    """A drafter with its logits divided by that temperature is, at temperature 1, what was foretold."""
    target, config, _, _, result, _ = overfitted
    objective = Objective(model=GatedDeltaNetLM(target.config, "float32"), config=config, steps=2)
    rows = pack(documents(8, seed=9, size=24), 24)  # unknown texts, of which it is far too sure
    found = calibrate(objective, result.params, Frozen(target.params), rows)
    assert found.temperature > 1.3
    assert found.nll_fitted < found.nll
    assert found.ece_greedy_fitted < found.ece_greedy
    cooled = {**result.params, "norm": {"scale": result.params["norm"]["scale"] / found.temperature}}
    then = calibrate(objective, cooled, Frozen(target.params), rows)
    assert then.nll == pytest.approx(found.nll_fitted, rel=1e-4)
    assert then.ece_greedy == pytest.approx(found.ece_greedy_fitted, abs=1e-4)
    assert then.ece_sampled == pytest.approx(found.ece_sampled_fitted, abs=1e-4)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_perfect_drafter_of_depth_d_commits_exactly_d_plus_1_tokens_a_round(base: Reference, depth):
    """When decoding, and in what teacher forcing predicts."""
    target, prompts, size = base.model, [[5, 17, 3], [8, 1]], 20
    plain = generate(target, prompts, method="ar", max_new_tokens=size).tokens
    script = script_chain(plain, depth)
    drafter = ScriptedDrafter(draft=DraftConfig(depth=depth, nodes=depth + 1))
    result = generate(
        target, prompts, drafter=(drafter, script), method="chain", draft=drafter.draft, max_new_tokens=size
    )
    assert result.tokens == plain
    assert result.accepted_length == [depth + 1, depth + 1]
    assert rounds_of(np.ones((depth, size), bool), 0) == size // (depth + 1)
