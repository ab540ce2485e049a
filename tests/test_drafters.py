"""The drafters without weights, and the choice of a drafter."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specla_jax.config import DraftConfig
from specla_jax.drafters import (
    Context,
    NgramDrafter,
    NoneDrafter,
    ScriptedDrafter,
    get_drafter,
    script_chain,
    script_trees,
)
from specla_jax.errors import UserError
from specla_jax.tree import DraftTree

CAPACITY = 24


@partial(jax.jit, static_argnums=0)
def propose(drafter, params, context):
    return drafter.propose(params, drafter.init(params, context, None), context)[0]


def context_of(texts: list[list[int]], stale: int = 0, prompt_lengths: list[int] | None = None) -> Context:
    tokens = np.full((len(texts), CAPACITY), stale, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = [len(text) for text in texts]
    return Context(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(lengths, jnp.int32),
        prompt_length=jnp.asarray(prompt_lengths or lengths, jnp.int32),
        active=jnp.ones(len(texts), bool),
    )


def paths(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """Tokens below the root on the path of each real node, with its log-probability, in the order of the nodes."""
    found: list[tuple[int, ...]] = []
    for node in range(int(tree.num_nodes[row])):
        parent = int(tree.parents[row, node])
        found.append(() if node == 0 else (*found[parent], int(tree.tokens[row, node])))
    assert len(set(found)) == len(found)
    return {path: float(tree.log_prob[row, node]) for node, path in enumerate(found)}


def ngram_reference(text: list[int], drafter: NgramDrafter) -> dict[tuple[int, ...], float]:
    """All nodes of the pool: path and log-probability."""
    matches = []
    for end in range(len(text) - 1):
        agreed = 0
        while agreed < drafter.max_ngram and agreed <= end and text[end - agreed] == text[-1 - agreed]:
            agreed += 1
        if agreed >= drafter.min_ngram:
            matches.append((agreed, end))
    matches.sort(reverse=True)
    branch, depth = drafter.draft.branch, drafter.draft.depth
    kept: dict[tuple[int, ...], int] = {}
    for agreed, end in matches[: 1 if branch == 1 else 4 * branch]:
        longer = list(text)
        for _ in range(depth):
            longer.append(longer[len(longer) - (len(text) - 1 - end)])
        if len(kept) < branch:
            kept.setdefault(tuple(longer[len(text) :]), agreed)
    nodes: dict[tuple[int, ...], float] = {(): 0.0}
    for rank, (drafts, agreed) in enumerate(kept.items()):
        for level in range(1, depth + 1):
            q = level * np.log(agreed / (agreed + 1)) + rank * np.log(0.9)
            nodes[drafts[:level]] = max(q, nodes.get(drafts[:level], -np.inf))
    return nodes


def ngram_texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    texts = [[3], [3, 4], [3, 3], [1, 2, 3, 4, 5], [0] * 9, [1, 2, 1, 2, 1], [5, 6, 7, 5, 6, 7, 5]]
    texts += [rng.integers(0, 3, rng.integers(1, CAPACITY + 1)).tolist() for _ in range(40)]
    return [*texts, rng.integers(0, 2, CAPACITY).tolist()]


@pytest.mark.parametrize(
    "drafter",
    [
        NgramDrafter(draft=DraftConfig(depth=5, branch=1, nodes=6)),
        NgramDrafter(draft=DraftConfig(depth=5, branch=1, nodes=4), max_ngram=3, min_ngram=2),
        NgramDrafter(draft=DraftConfig(depth=4, branch=3, nodes=9)),
    ],
)
def test_ngram_equals_reference(drafter):
    texts = ngram_texts()
    tree = propose(drafter, (), context_of(texts))
    # What lies beyond a row's length must not matter, whatever matches it would give.
    for stale in (1, 2):
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(propose(drafter, (), context_of(texts, stale)))):
            np.testing.assert_array_equal(a, b)
    nothing = 0
    for row, text in enumerate(texts):
        found, pool = paths(tree, row), ngram_reference(text, drafter)
        assert int(tree.tokens[row, 0]) == text[-1]
        for path, q in found.items():
            assert q == pytest.approx(pool[path], abs=1e-5)
        best = sorted(pool.values(), reverse=True)[: drafter.draft.nodes]
        np.testing.assert_allclose(sorted(found.values(), reverse=True), best, atol=1e-5)
        nothing += len(found) == 1
    assert 3 <= nothing < len(texts) // 2  # rows without a match are among them, and not only those


def test_ngram_loops_are_drafted_to_full_depth():
    drafter = NgramDrafter(draft=DraftConfig(depth=5, branch=1, nodes=6))
    tree = propose(drafter, (), context_of([[9, 4, 4], [8, 1, 2, 3, 1, 2, 3], [1, 2, 3], [7]]))
    assert np.asarray(tree.num_nodes).tolist() == [6, 6, 1, 1]
    assert np.asarray(tree.tokens[:2, 1:]).tolist() == [[4, 4, 4, 4, 4], [1, 2, 3, 1, 2]]


def test_ngram_prunes_by_confidence():
    draft = DraftConfig(depth=5, branch=1, nodes=6, prune_tau=1.0)
    tree = propose(NgramDrafter(draft=draft), (), context_of([[9, 4, 4]]))
    assert int(tree.num_nodes[0]) == 3  # a match of one token: ln 2 a level, so one more level is within 1 nat


def test_none_and_single_node_propose_the_root():
    single = DraftConfig(depth=0, branch=1, nodes=1)
    for drafter in (NoneDrafter(draft=DraftConfig(nodes=8)), NoneDrafter(draft=single), NgramDrafter(draft=single)):
        tree = propose(drafter, (), context_of([[4, 4], [5]]))
        assert tree.tokens.shape == (2, drafter.draft.nodes)
        assert np.asarray(tree.tokens[:, 0]).tolist() == [4, 5]
        assert np.asarray(tree.num_nodes).tolist() == [1, 1]


def test_scripted_proposes_by_tokens_produced_and_merges():
    script = script_trees([[[(5, 0)], [(5, 0), (6, 0), (5, 0), (7, 3), (7, 1)]], [[(8, 0), (9, 1)]]])
    drafter = ScriptedDrafter(draft=DraftConfig(depth=2, branch=2, nodes=8))
    at_prompt = propose(drafter, script, context_of([[1, 2], [1, 2, 3]]))
    assert list(paths(at_prompt, 0)) == [(), (5,)]
    assert list(paths(at_prompt, 1)) == [(), (8,), (8, 9)]
    later = propose(drafter, script, context_of([[1, 2], [1, 2, 3]], prompt_lengths=[1, 2]))
    assert list(paths(later, 0)) == [(), (5,), (6,), (5, 7)]
    assert list(paths(later, 1)) == [()]
    beyond = propose(drafter, script, context_of([[1, 2, 3], [1, 2, 3]], prompt_lengths=[1, 1]))
    assert np.asarray(beyond.num_nodes).tolist() == [1, 1]


def test_script_chain_is_wrong_where_asked():
    script = script_chain([[4, 0, 6, 7]], depth=3, wrong_at=[3, 0, 1])
    tokens, counts = np.asarray(script.tokens[0]), np.asarray(script.num_nodes[0])
    assert tokens.tolist() == [[4, 0, 6], [1, 6, 7], [6, 6, 0], [7, 0, 0], [0, 0, 0]]
    assert counts.tolist() == [4, 4, 3, 2, 1]
    assert np.asarray(script.parents[0, 0]).tolist() == [0, 1, 2]


def test_scripted_refuses_what_does_not_fit():
    drafter = ScriptedDrafter(draft=DraftConfig(depth=1, nodes=2))
    with pytest.raises(UserError, match="trees of 3 nodes, but nodes=2"):
        drafter.init(script_chain([[1, 2, 3]], depth=2), context_of([[1]]), None)
    with pytest.raises(UserError, match="1 rows, the batch 2"):
        drafter.init(script_chain([[1, 2, 3]], depth=1), context_of([[1], [2]]), None)
    with pytest.raises(UserError, match="parent of node 2 must be 0 to 1, got 2"):
        script_trees([[[(5, 0), (6, 2)]]])


def test_get_drafter(tmp_path):
    draft = DraftConfig(depth=2, nodes=3)
    assert get_drafter(None, draft, None) == (NoneDrafter(draft=draft), ())
    assert get_drafter("none", draft, None) == (NoneDrafter(draft=draft), ())
    assert get_drafter("ngram", draft, None) == (NgramDrafter(draft=draft), ())
    wrong: Any = 3
    pair = (ScriptedDrafter(draft=draft), script_chain([[1]], depth=2))
    assert get_drafter(pair, draft, None) == pair
    with pytest.raises(UserError, match=r"'none', 'ngram' or a drafter folder, and .*absent' is no folder"):
        get_drafter(tmp_path / "absent", draft, None)
    with pytest.raises(UserError, match=r"config.json does not exist; a drafter folder holds"):
        get_drafter(str(tmp_path), draft, None)
    with pytest.raises(UserError, match="pair, got 3"):
        get_drafter(wrong, draft, None)
    with pytest.raises(UserError, match="min_ngram must be 1 to max_ngram=2, got 3"):
        NgramDrafter(draft=draft, max_ngram=2, min_ngram=3)
