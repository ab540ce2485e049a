"""Draft trees against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specla_jax.tree import DraftTree, merge_duplicates, node_depth, root_only, select_nodes

ROWS, SIZE = 48, 21


def random_pool(seed: int, vocabulary: int = 3) -> DraftTree:
    """Random trees of 1 to SIZE nodes; log-probabilities are coarse, so that many are equal along a path."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, (ROWS, SIZE)).astype(np.int32)
    parents = np.full((ROWS, SIZE), -1, np.int32)
    log_prob = np.zeros((ROWS, SIZE), np.float32)
    num_nodes = rng.integers(1, SIZE + 1, ROWS).astype(np.int32)
    num_nodes[:3] = (1, 2, SIZE)
    for row in range(ROWS):
        reach = rng.choice([1, 3, SIZE])  # 1 makes a chain
        for node in range(1, num_nodes[row]):
            parents[row, node] = rng.integers(max(0, node - reach), node)
            log_prob[row, node] = log_prob[row, parents[row, node]] - 0.5 * rng.integers(0, 3)
    log_prob[5, 1:] = -np.inf
    beyond = np.arange(SIZE) >= num_nodes[:, None]
    tokens[beyond], log_prob[beyond] = 0, -np.inf
    return DraftTree(jnp.asarray(tokens), jnp.asarray(parents), jnp.asarray(num_nodes), jnp.asarray(log_prob))


def rows(tree: DraftTree) -> list[list[tuple[int, int, float]]]:
    """(token, parent, log-probability) of the real nodes, after a check of the padding."""
    tokens, parents, counts, log_prob = (
        np.asarray(x) for x in (tree.tokens, tree.parents, tree.num_nodes, tree.log_prob)
    )
    beyond = np.arange(tokens.shape[1]) >= counts[:, None]
    assert counts.min() >= 1
    assert (tokens[beyond] == 0).all()
    assert (parents[beyond] == -1).all()
    assert (log_prob[beyond] == -np.inf).all()
    return [
        list(zip(tokens[row, :count].tolist(), parents[row, :count].tolist(), log_prob[row, :count].tolist()))
        for row, count in enumerate(counts)
    ]


def select_reference(nodes: list[tuple[int, int, float]], budget: int, tau: float | None):
    floor = -np.inf
    if tau is not None and len(nodes) > 1:
        floor = max(q for _, _, q in nodes[1:]) - tau
    kept = [node for node in range(1, len(nodes)) if nodes[node][2] >= floor]
    best = sorted(kept, key=lambda node: (-nodes[node][2], node))[: budget - 1]
    order = [0, *sorted(best)]
    return [(nodes[n][0], -1 if n == 0 else order.index(nodes[n][1]), nodes[n][2]) for n in order]


def merge_reference(nodes: list[tuple[int, int, float]]):
    seen: dict[tuple[int, int], int] = {}
    merged: list[tuple[int, int, float]] = []
    new_index: list[int] = []
    for token, parent, q in nodes:
        key = (new_index[parent] if parent >= 0 else -1, token)
        if key in seen:
            at = seen[key]
            merged[at] = (*merged[at][:2], max(merged[at][2], q))
        else:
            at = seen[key] = len(merged)
            merged.append((token, key[0], q))
        new_index.append(at)
    return merged


@pytest.mark.parametrize(("nodes", "tau"), [(1, 0.5), (8, None), (8, 1.0), (8, 0.0), (30, None)])
def test_select_nodes_equals_brute_force(nodes, tau):
    pools = [random_pool(seed) for seed in range(4)]
    select = jax.jit(select_nodes, static_argnums=(1, 2))
    for pool in pools:
        chosen = select(pool, nodes, tau)
        assert chosen.tokens.shape == (ROWS, nodes)
        found = rows(chosen)
        assert found == [select_reference(row, nodes, tau) for row in rows(pool)]
        assert all(parent < node for row in found for node, (_, parent, _) in enumerate(row))


def test_select_nodes_keeps_ancestors_of_a_child_that_outranks_its_parent():
    # Rounding may put a child above its parent; the child may not be kept alone.
    pool = DraftTree(
        tokens=jnp.array([[9, 1, 2, 3]], jnp.int32),
        parents=jnp.array([[-1, 0, 0, 1]], jnp.int32),
        num_nodes=jnp.array([4], jnp.int32),
        log_prob=jnp.array([[0.0, -2.0, -1.0, -0.5]], jnp.float32),
    )
    assert [node[0] for node in rows(select_nodes(pool, 2, None))[0]] == [9, 2]
    assert [node[:2] for node in rows(select_nodes(pool, 4, None))[0]] == [(9, -1), (1, 0), (2, 0), (3, 1)]


def test_merge_duplicates_equals_a_trie():
    merge = jax.jit(merge_duplicates, static_argnums=1)
    smaller = 0
    for seed in range(6):
        pool = random_pool(seed, vocabulary=1 + seed % 3)
        merged = rows(merge(pool, SIZE - 1))
        assert merged == [merge_reference(row) for row in rows(pool)]
        smaller += sum(len(row) for row in merged) < int(pool.num_nodes.sum())
    assert smaller == 6


def test_node_depth():
    pool = random_pool(0)
    expected = np.zeros((ROWS, SIZE), np.int32)
    for row, nodes in enumerate(rows(pool)):
        for node, (_, parent, _) in enumerate(nodes[1:], start=1):
            expected[row, node] = expected[row, parent] + 1
    assert expected.max() == SIZE - 1  # a chain over all nodes is among them
    np.testing.assert_array_equal(node_depth(pool.parents, pool.num_nodes), expected)


def test_root_only():
    assert rows(root_only(jnp.array([7, 0]), 3)) == [[(7, -1, 0.0)], [(0, -1, 0.0)]]
