"""Greedy generation equals the reference's greedy tokens, whatever is drafted and accepted."""

import jax
import numpy as np
import pytest

from reference import GDN, Reference, scripted_trees
from specla_jax.checkpoint import load_target
from specla_jax.config import DraftConfig
from specla_jax.drafters import EagleConfig, EagleDrafter, ScriptedDrafter, init_eagle, script_chain, script_trees
from specla_jax.generate import generate, stream

DEPTH = 5
CHAIN = DraftConfig(depth=DEPTH, branch=1, nodes=DEPTH + 1)
TREE = DraftConfig(depth=DEPTH, branch=3, nodes=16)


def by_every_method(reference: Reference, batch: int) -> None:
    prompts, greedy = reference.prompts[:batch], reference.greedy[:batch]
    for method, draft in (("ar", None), ("chain", CHAIN), ("tree", TREE)):
        result = generate(reference.model, prompts, method=method, draft=draft, max_new_tokens=64)
        assert result.tokens == greedy, method
        assert result.finish_reasons == ["length"] * batch
        # What was counted adds up to what came out.
        for row in range(batch):
            assert result.accepted[row] + result.rounds[row] >= 64
            assert sum(result.accepted_at_depth[row]) == result.accepted[row] <= result.drafted[row]


def at_every_accepted_length(reference: Reference, batch: int) -> None:
    prompts, greedy = reference.prompts[:batch], reference.greedy[:batch]
    chain, tree = ScriptedDrafter(draft=CHAIN), ScriptedDrafter(draft=TREE)
    for right in range(DEPTH + 1):
        script = script_chain(greedy, DEPTH, right)
        result = generate(reference.model, prompts, method="chain", drafter=(chain, script), max_new_tokens=64)
        assert result.tokens == greedy, f"chain, {right} accepted"
        assert result.rounds == [-(-64 // (right + 1))] * batch

        script = scripted_trees(greedy, DEPTH, right, reference.model.config.vocab_size)
        result = generate(reference.model, prompts, method="tree", drafter=(tree, script), max_new_tokens=64)
        assert result.tokens == greedy, f"tree, {right} accepted"
        assert result.rounds == [-(-64 // (right + 1))] * batch


def test_greedy_tokens_by_every_method(reference: Reference) -> None:
    by_every_method(reference, 2)


def test_greedy_tokens_at_every_accepted_length(reference: Reference) -> None:
    at_every_accepted_length(reference, 2)


def test_greedy_tokens_of_one_row(base: Reference) -> None:
    """A batch of one is a matter of the loop, not of the checkpoint."""
    by_every_method(base, 1)
    at_every_accepted_length(base, 1)


def test_accepted_length_may_change_every_round(base: Reference) -> None:
    """Also a round without drafts between rounds with them, and rows that accept all beside rows that accept none."""
    pattern = [3, -1, 3, 0, 0, 0, 5, 1, 2, 4] * 7
    vocabulary = base.model.config.vocab_size
    trees = []
    for row, output in enumerate(base.greedy):
        trees.append([])
        for step in range(len(output)):
            right = (pattern[step], 5 * ((step + row) % 2))[row]
            drafts = output[step : step + DEPTH]
            if right < 0:
                drafts = []
            elif right < len(drafts):
                drafts = [*drafts[:right], (drafts[right] + 1) % vocabulary]
            trees[-1].append([(token, node) for node, token in enumerate(drafts)])
    drafter = (ScriptedDrafter(draft=CHAIN), script_trees(trees))
    result = generate(base.model, base.prompts, method="chain", drafter=drafter, max_new_tokens=64)
    assert result.tokens == base.greedy


def test_a_perfect_drafter_of_depth_d_commits_d_plus_one(base: Reference) -> None:
    drafter = (ScriptedDrafter(draft=CHAIN), script_chain(base.greedy, DEPTH))
    result = generate(base.model, base.prompts, method="chain", drafter=drafter, max_new_tokens=60)
    assert result.accepted_length == [DEPTH + 1] * 2


@pytest.mark.parametrize("place", range(DEPTH + 1))
def test_a_stop_token_ends_the_text_wherever_it_falls(base: Reference, place: int) -> None:
    """First, in the middle, last draft and bonus token of an accepted span; the tokens behind it are dropped."""
    output = base.greedy[0]
    at = next(
        i for i in range(DEPTH + 1 + place, 64, DEPTH + 1) if output[i] not in output[:i]
    )  # the token at this place of a later round is new to the text
    drafter = (ScriptedDrafter(draft=CHAIN), script_chain(base.greedy[:1], DEPTH))
    options = {"max_new_tokens": 64, "stop_token_ids": [output[at]]}
    plain = generate(base.model, base.prompts[:1], method="ar", **options)
    drafted = generate(base.model, base.prompts[:1], method="chain", drafter=drafter, **options)
    for result in (plain, drafted):
        assert result.tokens == [output[: at + 1]]
        assert result.finish_reasons == ["stop"]
    assert drafted.rounds == [at // (DEPTH + 1) + 1]
    assert drafted.accepted == [at + 1 - drafted.rounds[0] + (place < DEPTH)]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_never_more_than_max_new_tokens(base: Reference, limit: int) -> None:
    drafter = (ScriptedDrafter(draft=CHAIN), script_chain(base.greedy, DEPTH))
    result = generate(base.model, base.prompts, method="chain", drafter=drafter, max_new_tokens=limit)
    assert result.tokens == [output[:limit] for output in base.greedy]
    assert result.finish_reasons == ["length"] * 2


def test_a_finished_row_leaves_the_others_alone(base: Reference) -> None:
    """The middle row stops at once; its neighbours go on for 60 tokens."""
    prompts = [base.prompts[0], base.prompts[1], base.prompts[0][:9]]
    stop = base.greedy[1][0]
    options = {"method": "tree", "draft": TREE, "max_new_tokens": 60, "stop_token_ids": [stop]}
    together = generate(base.model, prompts, **options)
    assert together.tokens[1] == [stop]
    alone = [generate(base.model, [prompt], **options).tokens[0] for prompt in prompts]
    assert together.tokens == alone
    assert max(map(len, alone)) == 60


def test_logprobs_are_those_of_plain_decoding(base: Reference) -> None:
    logits = base.expected["logits"].astype(np.float64)
    plain = generate(base.model, base.prompts, method="ar", max_new_tokens=24)
    drafter = (ScriptedDrafter(draft=CHAIN), script_chain(base.greedy, DEPTH))
    drafted = generate(base.model, base.prompts, method="chain", drafter=drafter, max_new_tokens=24)
    np.testing.assert_allclose(plain.logprobs, drafted.logprobs, atol=1e-4)
    first = logits[:, 19] - np.log(np.exp(logits[:, 19]).sum(-1, keepdims=True))
    np.testing.assert_allclose([row[0] for row in plain.logprobs], first.max(-1), atol=1e-3)
    assert np.ptp(plain.logprobs) > 0.1


def test_stream_yields_what_generate_returns(base: Reference) -> None:
    options = {"method": "tree", "draft": TREE, "max_new_tokens": 40, "stop_token_ids": [base.greedy[0][30]]}
    rows: list[list[int]] = [[], []]
    pieces = stream(base.model, base.prompts, **options)
    with pytest.raises(AttributeError):
        _ = pieces.result
    for delta in pieces:
        rows[delta.row] += delta.tokens
    result = pieces.result
    expected = generate(base.model, base.prompts, **options)
    assert rows == result.tokens == expected.tokens
    assert result.finish_reasons == expected.finish_reasons
    assert result.rounds == expected.rounds


def test_prompts_of_one_to_three_tokens(base: Reference) -> None:
    prompts = [[7], [7, 3], [7, 3, 9]]
    together = generate(base.model, prompts, method="tree", draft=TREE, max_new_tokens=12)
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        assert generate(base.model, [prompt], method="ar", max_new_tokens=12).tokens == [tokens]


def test_ten_lengths_compile_no_more_than_their_buckets() -> None:
    model = load_target(GDN / "base", dtype="float32")
    lines: list[str] = []
    lengths = [1, 5, 20, 40, 64, 65, 66, 100, 128, 129]  # buckets of 64 and 128 tokens before the root
    for length in lengths:
        generate(model, [[3] * length], method="chain", draft=CHAIN, max_new_tokens=4, report=lines.append)
    assert model.programs.count == 2
    assert sum("compiled" in line for line in lines) == 2
    assert all("memory: weights" in line for line in lines if "compiled" not in line)


def test_512_tokens_do_not_drift(base: Reference) -> None:
    """Hundreds of recoveries, most of them of several nodes, leave the text of plain decoding."""
    plain = generate(base.model, base.prompts, method="ar", max_new_tokens=512)
    drafter = (ScriptedDrafter(draft=CHAIN), script_chain(plain.tokens, DEPTH, [5, 3, 0, 4, 2, 1] * 86))
    drafted = generate(base.model, base.prompts, method="chain", drafter=drafter, max_new_tokens=512)
    assert drafted.tokens == plain.tokens
    assert sum(drafted.rounds) < 2 * 512 * 0.5
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=1e-3)


def test_an_eagle_drafter_changes_nothing_but_the_rounds(base: Reference) -> None:
    """Random weights draft badly, but features, cache and tree run their full course in the loop."""
    config = EagleConfig(
        hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64, target_hidden_size=64,
        target_num_hidden_layers=2, target_vocab_size=96, window=24,
    )  # fmt: skip
    drafter = EagleDrafter(draft=TREE, config=config, dtype="float32")
    params = drafter.bind(init_eagle(jax.random.key(0), config), base.model.params)
    options = {"max_new_tokens": 64, "temperature": 1.0, "seed": 2}
    plain = generate(base.model, base.prompts, method="ar", **options)
    drafted = generate(base.model, base.prompts, method="tree", drafter=(drafter, params), **options)
    assert drafted.tokens == plain.tokens
    assert drafted.drafted == [15 * rounds for rounds in drafted.rounds]
    assert sum(drafted.accepted) > 0
