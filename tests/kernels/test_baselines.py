"""The baselines of the benchmarks against the float64 recurrence: a wrong one would be measured all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.baselines import paths, replay_recover, replay_verify, walk_verify
from tests.kernels.lowering import TRITON_CALL, lower_for_cuda
from tests.kernels.oracle import error as relative_error
from tests.kernels.oracle import random_inputs, random_tree, run_chain, run_tree

BOUND = 2e-6
ROWS, NODES = 4, 9


def batch(nodes: int = NODES):
    """Inputs and parents: a chain, two trees and a bush."""
    rng = np.random.default_rng(20)
    inputs = random_inputs(rng, ROWS, nodes, decay="weak")
    return inputs, np.stack([random_tree(rng, nodes, bushiness) for bushiness in (0, 0.3, 0.6, 1)])


def test_paths_lead_from_the_root_to_each_leaf():
    parents = jnp.array([[-1, 0, 1, 0, 3], [-1, 0, 1, 2, 3], [-1, -1, 0, 1, 0]], jnp.int32)
    path, count = paths(parents)
    np.testing.assert_array_equal(count, [[0, 0, 3, 0, 3], [0, 0, 0, 0, 5], [0, 0, 2, 2, 2]])
    assert path[0, 2, :3].tolist() == [0, 1, 2]
    assert path[0, 4, :3].tolist() == [0, 3, 4]
    assert path[1, 4].tolist() == [0, 1, 2, 3, 4]
    assert path[2, 3, :2].tolist() == [1, 3]
    _, count = paths(parents, leaves_only=False)
    np.testing.assert_array_equal(count[0], [1, 2, 3, 2, 3])


@pytest.mark.parametrize("keep", [False, True])
def test_walk(keep):
    inputs, parents = batch()
    unset = np.full((ROWS, NODES, *inputs.state.shape[1:]), np.nan, np.float32)
    o, states = walk_verify(*inputs.args(), parents, unset, keep=keep, columns=16, interpret=True)
    for b in range(ROWS):
        true_o, true_states, _ = run_tree(inputs, parents[b], b)
        assert relative_error(o[b], true_o) < BOUND
        assert relative_error(states[b], true_states) < BOUND


def test_walk_refuses_states_beyond_32_bit_offsets():
    inputs, parents = batch()
    states = jax.ShapeDtypeStruct((ROWS, NODES, 1024, 256, 256), jnp.float32)
    with pytest.raises(ValueError, match="states must stay below 2\\^31 elements"):
        jax.eval_shape(walk_verify, *inputs.args(), parents, states)


@pytest.mark.parametrize("leaves_only", [False, True])
def test_replay(leaves_only):
    inputs, parents = batch()
    o = replay_verify(*inputs.args(), *paths(parents, leaves_only), columns=16, interpret=True)
    for b in range(ROWS):
        assert relative_error(o[b], run_tree(inputs, parents[b], b)[0]) < BOUND


def test_one_node():
    inputs, parents = batch(1)
    unset = np.full((ROWS, 1, *inputs.state.shape[1:]), np.nan, np.float32)
    o, _ = walk_verify(*inputs.args(), parents, unset, interpret=True)
    again = replay_verify(*inputs.args(), *paths(parents), interpret=True)
    for b in range(ROWS):
        true_o = run_tree(inputs, parents[b], b)[0]
        assert relative_error(o[b], true_o) < BOUND
        assert relative_error(again[b], true_o) < BOUND


def test_replay_recovers_scattered_paths_in_all_layers():
    rng = np.random.default_rng(21)
    inputs = [random_inputs(rng, 3, NODES, decay="weak") for _ in range(2)]
    k, v, log_decay, beta, state = (np.stack(x) for x in zip(*(x.args()[1:] for x in inputs), strict=True))
    path = np.array([[0, 2, 5, 8], [0, 1, 0, 0], [0, 0, 0, 0]], np.int32)
    count = np.array([4, 2, 0], np.int32)
    after = replay_recover(k, v, log_decay, beta, state, path, count, interpret=True)
    for layer, x in enumerate(inputs):
        for b in range(2):
            accepted = path[b, : count[b]]
            chain = type(x)(*(part[:, accepted] for part in x.args()[:5]), x.state)
            assert relative_error(after[layer, b], run_chain(chain, b)[1]) < BOUND
        np.testing.assert_array_equal(after[layer, 2], state[layer, 2])


@pytest.mark.parametrize(("columns", "warps"), [(8, 1), (16, 2), (32, 4), (64, 8)])
def test_baselines_lower_for_a_gpu(columns, warps):
    layers, rows, nodes, heads, dk, dv = 2, 2, 17, 2, 256, 256
    tile = {"columns": columns, "warps": warps}

    def spec(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    keys, values = (spec(rows, nodes, heads, d, dtype=jnp.bfloat16) for d in (dk, dv))
    gate, state = spec(rows, nodes, heads), spec(rows, heads, dk, dv)
    args = keys, keys, values, gate, gate, state
    parents = spec(rows, nodes, dtype=jnp.int32)
    for keep in (False, True):
        states = spec(rows, nodes, heads, dk, dv)
        text = lower_for_cuda(lambda *x, keep=keep: walk_verify(*x, keep=keep, **tile), *args, parents, states)
        assert TRITON_CALL in text
    text = lower_for_cuda(lambda p, *x: replay_verify(*x, *paths(p), **tile), parents, *args)
    assert TRITON_CALL in text

    stacked = [spec(layers, *x.shape, dtype=x.dtype) for x in args[1:]]
    path, count = spec(rows, 8, dtype=jnp.int32), spec(rows, dtype=jnp.int32)
    assert TRITON_CALL in lower_for_cuda(lambda *x: replay_recover(*x, **tile), *stacked, path, count)
