"""Filters, coins, and losslessness of sampling."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specla_jax.loop
from reference import Reference, scripted_trees
from specla_jax.checkpoint import parameter_shapes
from specla_jax.config import DraftConfig, SamplingConfig, TargetConfig
from specla_jax.drafters import ScriptedDrafter, script_chain, script_trees
from specla_jax.errors import UserError
from specla_jax.generate import generate, prepare
from specla_jax.model import GatedDeltaNetLM
from specla_jax.sampling import Sampler, coins, filter_logits
from specla_jax.target import Target

CHAIN = DraftConfig(depth=4, branch=1, nodes=5)
TREE = DraftConfig(depth=4, branch=3, nodes=12)
SMALL_TREE = DraftConfig(depth=3, branch=2, nodes=8)


def filtered_probabilities(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """The filtered distribution in float64, by sorting and walking. Written apart from the code under test."""
    p = np.exp((logits - logits.max()) / config.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), bool)
    if config.top_k:
        keep &= p >= p[order[min(config.top_k, len(p)) - 1]]
    p = np.where(keep, p, 0) / p[keep].sum()
    if config.top_p < 1:
        total, kept = 0.0, set()
        for token in order:
            if total >= config.top_p:
                break
            total += p[token]
            kept.add(token)
        keep &= np.isin(np.arange(len(p)), list(kept))
    keep &= p >= config.min_p * p.max()
    p = np.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=0.7),
        SamplingConfig(temperature=1.0, top_k=3),
        SamplingConfig(temperature=1.3, top_p=0.8),
        SamplingConfig(temperature=1.0, min_p=0.2),
        SamplingConfig(temperature=1.5, top_k=9, top_p=0.7, min_p=0.05),
        SamplingConfig(temperature=1.0, top_k=1000, top_p=1e-6),
    ],
)
def test_filters_against_numpy(config: SamplingConfig) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 3, 40)).astype(np.float32) * 3
    sampler = Sampler.create(config, [0] * 4)
    got = np.asarray(jax.nn.softmax(filter_logits(jnp.asarray(logits), sampler)))
    for index in np.ndindex(4, 3):
        np.testing.assert_allclose(got[index], filtered_probabilities(logits[index], config), atol=2e-6)


def test_a_filter_never_removes_everything() -> None:
    logits = jnp.zeros((1, 1, 8))
    sampler = Sampler.create(SamplingConfig(temperature=0.01, top_k=1, top_p=1e-9, min_p=1.0), [0])
    assert np.isfinite(filter_logits(logits, sampler)).all()  # all tie, and ties are kept


def test_coins_depend_on_seed_position_and_token_alone() -> None:
    together = coins(jnp.asarray([5, 9], jnp.uint32), jnp.asarray([[3, 4, 5], [10, 11, 12]]), 16)
    alone = coins(jnp.asarray([9], jnp.uint32), jnp.asarray([[11]]), 16)
    np.testing.assert_array_equal(together[1, 1], alone[0, 0])
    assert len(np.unique(np.asarray(together))) == together.size


def one_text(reference: Reference, batch: int) -> None:
    """The same tokens by every method, alone and in a batch, in any order, at every temperature, with all filters."""
    prompts = [reference.prompts[0], reference.prompts[1], reference.prompts[0][:11]][:batch]
    seeds = [17, 4, 17][:batch]
    texts = []
    for temperature in (0.5, 1.0, 1.5):
        options = {"temperature": temperature, "top_p": 0.95, "top_k": 40, "min_p": 0.02, "max_new_tokens": 32}
        plain = generate(reference.model, prompts, method="ar", seed=seeds, **options).tokens
        for method, draft in (("chain", CHAIN), ("tree", TREE)):
            for order in (slice(None), slice(None, None, -1)):
                # Drafts that are accepted, by another number in every round; wrong ones stand beside them in a tree.
                texts_in_order = plain[order]
                if method == "chain":
                    script = script_chain(texts_in_order, 4, [2, 4, 0, 1, 3] * 7)
                else:
                    script = scripted_trees(texts_in_order, 3, 2, reference.model.config.vocab_size)
                drafter = (ScriptedDrafter(draft=draft), script)
                drafted = generate(
                    reference.model, prompts[order], method=method, drafter=drafter, seed=seeds[order], **options
                )
                assert drafted.tokens == texts_in_order, (method, temperature)
                assert max(drafted.rounds) < 20
        if batch > 1:
            alone = generate(reference.model, prompts[:1], method="ar", seed=seeds[0], **options).tokens
            assert alone == plain[:1]
        texts.append(plain)
    assert texts[0] != texts[1] != texts[2]


@pytest.mark.parametrize("reference", ["base", "gva", "bf16"], indirect=True)  # greedy texts are by all checkpoints
def test_one_seed_gives_one_text(reference: Reference) -> None:
    one_text(reference, 3)


def test_one_seed_gives_one_text_to_a_batch_of_one(base: Reference) -> None:
    one_text(base, 1)


def test_drafts_are_accepted_at_high_temperature_without_changing_the_text(base: Reference) -> None:
    """Drafting the text that the seed leads to is accepted in full; drafting another is rejected; both give it."""
    options = {"temperature": 1.5, "seed": 3, "max_new_tokens": 30}
    plain = generate(base.model, base.prompts, method="ar", **options)
    drafter = ScriptedDrafter(draft=CHAIN)
    for shift, rounds in ((0, 6), (1, 30)):
        trees = [
            [[((t + shift) % 96, i) for i, t in enumerate(row[step : step + 4])] for step in range(30)]
            for row in plain.tokens
        ]
        drafted = generate(base.model, base.prompts, method="chain", drafter=(drafter, script_trees(trees)), **options)
        assert drafted.tokens == plain.tokens
        assert drafted.rounds == [rounds] * 2
        np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=1e-4)
    # Log-probabilities are the target's own: the temperature is not in them.
    logits = base.expected["logits"][:, 19].astype(np.float64)
    own = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    first = [own[row, tokens[0]] for row, tokens in enumerate(plain.tokens)]
    np.testing.assert_allclose([row[0] for row in plain.logprobs], first, atol=1e-3)


def tiny_target() -> Target:
    """One layer, eight tokens, random distributions that stay spread at temperature 0.5."""
    config = TargetConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_heads=1, num_v_heads=1, head_dim=8, head_v_dim=8,
        intermediate_size=16, conv_size=2,
    )  # fmt: skip
    model = GatedDeltaNetLM(config)
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 1), jnp.int32))["params"]
    params["lm_head"]["kernel"] = 0.3 * jax.random.normal(jax.random.key(2), (16, 8))
    params["embeddings"]["embedding"] = jax.random.normal(jax.random.key(3), (8, 16))
    assert {"embeddings", "layers_0", "norm", "lm_head"} == set(params)
    assert len(parameter_shapes(config)) == len(jax.tree.leaves(params))
    return Target(config=config, params=params, dtype="float32", path=None)


# So many draws are within 0.005 of their distribution.
PROMPT, LENGTH, DRAWS, ROWS = [1, 6], 3, 60_000, 20_000


def exact_marginals(model: Target, config: SamplingConfig) -> np.ndarray:
    """Distribution of each of the first tokens after PROMPT, by summing over all continuations."""
    network = jax.jit(GatedDeltaNetLM(model.config).apply)
    texts, weights, marginals = [PROMPT], np.ones(1), []
    for _ in range(LENGTH):
        logits = np.asarray(network({"params": model.params}, np.asarray(texts)), np.float64)[:, -1]
        p = weights[:, None] * np.stack([filtered_probabilities(row, config) for row in logits])
        marginals.append(p.sum(0))
        texts = [[*text, token] for text in texts for token in range(8)]
        weights = p.reshape(-1)
    return np.stack(marginals)


def sampled_marginals(
    model: Target, config: SamplingConfig, method: str, draws: int = DRAWS
) -> tuple[np.ndarray, float]:
    """Frequencies over texts with different seeds, and the share of tokens that were drafted."""
    if method == "chain":
        draft, tree = CHAIN, [(3, 0), (2, 1), (3, 2), (2, 3)]
    else:
        draft, tree = SMALL_TREE, [(3, 0), (2, 0), (7, 0), (2, 1), (4, 1), (3, 2), (7, 4)]
    # The same tree everywhere: some of its nodes are likely, some are not, and it knows nothing of the coins.
    script = jax.tree.map(lambda x: jnp.repeat(x, ROWS, axis=0), script_trees([[tree] * LENGTH]))
    counts, accepted = np.zeros((LENGTH, 8)), 0
    for start in range(0, draws, ROWS):
        job = prepare(
            model, [PROMPT] * ROWS, method=method, drafter=(ScriptedDrafter(draft=draft), script),
            max_new_tokens=LENGTH, seed=range(start, start + ROWS), temperature=config.temperature,
            top_k=config.top_k, top_p=config.top_p, min_p=config.min_p,
        )  # fmt: skip
        # Thousands of rows: a prefill of the usual 64 places would be most of the work.
        job = replace(job, engine=replace(job.engine, prefill_length=len(PROMPT)), capacity=len(PROMPT) + LENGTH)
        carry = job.carry()
        result = job.result(job.compile("generate", carry)(job.params, carry), seconds=1.0)
        tokens = np.asarray(result.tokens)
        for place in range(LENGTH):
            counts[place] += np.bincount(tokens[:, place], minlength=8)
        accepted += sum(result.accepted)
    return counts / draws, accepted / (draws * LENGTH)


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    return float(0.5 * np.abs(p - q).sum(-1).max())


@pytest.mark.parametrize("method", ["chain", "tree"])
def test_distribution_is_the_targets(method: str) -> None:
    model = tiny_target()
    for config in (
        SamplingConfig(temperature=0.5, top_k=6, top_p=0.9),
        SamplingConfig(temperature=1.0, top_k=6, top_p=0.95),
    ):
        found, accepted = sampled_marginals(model, config, method)
        exact = exact_marginals(model, config)
        assert (np.sort(exact)[:, -2] > 0.1).all()  # something is left to chance at every place
        assert total_variation(found, exact) < 0.01, config
        assert 0.05 < accepted < 0.95  # drafts were both accepted and rejected


@pytest.mark.parametrize("method", ["chain", "tree"])
def test_a_biased_acceptance_fails_that_test(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that also takes a drafted first child when a fair coin says so is caught."""
    fair = specla_jax.loop.accept

    def biased(tree, depth, drawn, *rest):
        lenient = (drawn[:, :1] % 4 == 3) & (tree.num_nodes[:, None] > 1)
        first = jnp.where(lenient, tree.tokens[:, 1:2], drawn[:, :1])
        return fair(tree, depth, drawn.at[:, :1].set(first), *rest)

    monkeypatch.setattr(specla_jax.loop, "accept", biased)
    model = tiny_target()
    config = SamplingConfig(temperature=1.0)
    found, _ = sampled_marginals(model, config, method, draws=ROWS)
    assert total_variation(found, exact_marginals(model, config)) > 0.02


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_k": -1}, "top_k must be 0 (off) or more, got -1"),
        ({"min_p": 1.5}, "min_p must be 0 to 1, got 1.5"),
    ],
)
def test_wrong_values_are_named(wrong: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        SamplingConfig(**wrong)
    assert str(error.value) == message
