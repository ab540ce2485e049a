"""Verification and recovery of trees against the float64 recurrence.

Few shapes, so that few programs are compiled: 6 rows of 1 or 5 nodes, 12 rows of 17, 32 rows of 64.
"""

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import Factors, gdn_prefill, gdn_recover, gdn_verify
from tests.kernels.oracle import Inputs, error, random_inputs, random_tree, run_chain, run_tree

BOUND = 2e-6  # relative, of outputs and states in fp32
DECAYS = ("none", "weak", "strong", "mixed")
ROWS = {1: 6, 5: 6, 17: 12, 64: 32}

_verify = jax.jit(gdn_verify)
_recover = jax.jit(gdn_recover)


def verify(inputs: Inputs, parents: np.ndarray, num_nodes: np.ndarray) -> tuple[np.ndarray, Factors]:
    return jax.tree.map(np.asarray, _verify(*inputs.args(), parents, num_nodes))


def recover(state: np.ndarray, factors: Factors, parents: np.ndarray, last: np.ndarray) -> np.ndarray:
    return np.asarray(_recover(state, factors, parents, last))


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def every_row(nodes: int, *parents: int) -> tuple[np.ndarray, np.ndarray]:
    """The same tree for all rows of ``nodes`` places (a chain if none is given), and num_nodes."""
    rows, tree = ROWS[nodes], np.array(parents or range(-1, nodes - 1))
    padded = np.concatenate([tree, np.full(nodes - len(tree), -1)])
    return np.tile(padded, (rows, 1)).astype(np.int32), np.full(rows, len(tree), np.int32)


def random_batch(rng: np.random.Generator, nodes: int, decay: str) -> tuple[Inputs, np.ndarray, np.ndarray]:
    """Inputs, parents and num_nodes of a batch: from chains to bushes, the first row a full chain."""
    rows = ROWS[nodes]
    inputs = random_inputs(rng, rows, nodes, decay=decay)
    num_nodes = rng.integers(1, nodes + 1, rows).astype(np.int32)
    num_nodes[0] = nodes
    parents = np.full((rows, nodes), -1, np.int32)
    for b in range(rows):
        parents[b, : num_nodes[b]] = random_tree(rng, num_nodes[b], (0, 0.1, 0.5, 1)[b % 4])
    return inputs, parents, num_nodes


def errors_of_batch(
    rng: np.random.Generator, inputs: Inputs, parents: np.ndarray, num_nodes: np.ndarray, *, low: bool = True
) -> tuple[float, float]:
    """The largest errors of a row's outputs, and of its states recovered at the last node and at a random one."""
    o, factors = verify(inputs, parents, num_nodes)
    if not low:
        factors = replace(factors, log_decay_low=None)
    ends = (num_nodes - 1, rng.integers(0, num_nodes).astype(np.int32))
    recovered = [recover(inputs.state, factors, parents, last) for last in ends]
    output_errors, state_errors = [], []
    for b, n in enumerate(num_nodes):
        true_o, true_states, true_u = run_tree(inputs, parents[b], b, n)
        output_errors.append(error(o[b, :n], true_o))
        state_errors += [error(state[b], true_states[last[b]]) for state, last in zip(recovered, ends)]
        assert error(factors.value[b, :n], true_u) < 2 * BOUND
        for field in (o, *jax.tree.leaves(factors)):
            assert not field[b, n:].any()
    return max(output_errors), max(state_errors)


def test_200_random_trees():
    rng = np.random.default_rng(0)
    trees = 0
    for decay in DECAYS:
        for nodes in (5, 17, 64):
            output_error, state_error = errors_of_batch(rng, *random_batch(rng, nodes, decay))
            assert max(output_error, state_error) < BOUND, (decay, nodes)
            trees += ROWS[nodes]
    assert trees == 200


def test_bound_catches_a_series_over_all_nodes(monkeypatch):
    """Doubling the powers of A over 64 rows is exact on paper; with correlated keys it must miss the bound."""

    def neumann(lower):
        power, inverse = -lower, jnp.eye(lower.shape[-1]) - lower
        for _ in range(5):
            power = power @ power
            inverse += inverse @ power
        return inverse

    inputs = random_inputs(np.random.default_rng(1), 1, 64, decay="weak")
    chain = np.arange(-1, 63, dtype=np.int32)[None]
    monkeypatch.setattr(sys.modules["kernels_pallas.gdn_verify.reference"], "unit_lower_inverse", neumann)
    o, _ = jax.jit(lambda *args: gdn_verify(*args))(*inputs.args(), chain)
    assert not error(o[0], run_tree(inputs, chain[0])[0]) < 1e-3


def test_bound_catches_path_sums_alone():
    """Under mixed decay the path sum in a single fp32 number is too coarse: hence log_decay_low."""
    rng = np.random.default_rng(2)
    output_error, state_error = errors_of_batch(rng, *random_batch(rng, 64, "mixed"), low=False)
    assert output_error < BOUND < state_error < 1e-4


@pytest.mark.parametrize(("heads", "value_heads", "dk", "dv", "max_beta"), [(1, 1, 24, 8, 1.0), (2, 6, 8, 12, 2.0)])
def test_other_sizes(heads, value_heads, dk, dv, max_beta):
    """Sizes that are no power of two, the keyword ``scale``, and every node real without ``num_nodes``."""
    rng = np.random.default_rng(3)
    inputs = random_inputs(
        rng, 4, 11, heads=heads, value_heads=value_heads, dk=dk, dv=dv, decay="weak", max_beta=max_beta
    )
    parents = np.stack([random_tree(rng, 11, x) for x in (0, 0.2, 0.5, 1)])
    o, factors = jax.jit(partial(gdn_verify, scale=0.5))(*inputs.args(), parents)
    state = recover(inputs.state, factors, parents, int32(10, 10, 10, 10))
    for b in range(4):
        true_o, true_states, _ = run_tree(inputs, parents[b], b)
        assert error(o[b], true_o * 0.5 * dk**0.5) < BOUND
        assert error(state[b], true_states[10]) < BOUND


def test_path_sums_are_what_they_say():
    inputs, parents, num_nodes = random_batch(np.random.default_rng(4), 64, "mixed")
    _, factors = verify(inputs, parents, num_nodes)
    for b in range(4):
        n = num_nodes[b]
        path_sum = np.zeros((n, 4))
        for t in range(n):
            above = path_sum[parents[b, t]] if parents[b, t] >= 0 else 0
            path_sum[t] = above + inputs.log_decay[b, t].astype(np.float64)
        np.testing.assert_allclose(factors.log_decay[b, :n], path_sum.astype(np.float32), rtol=2e-7)
        both = factors.log_decay[b, :n].astype(np.float64) + factors.log_decay_low[b, :n]
        np.testing.assert_allclose(both, path_sum, rtol=0, atol=1e-7)


def test_one_token_is_the_first_node_of_many():
    inputs, _, _ = random_batch(np.random.default_rng(5), 5, "weak")
    chain, count = every_row(5)
    single, one = every_row(1)
    first = inputs.tokens(slice(0, 1))
    o, factors = verify(inputs, chain, count)
    o_one, factors_one = verify(first, single, one)
    np.testing.assert_allclose(o_one[:, 0], o[:, 0], rtol=1e-6, atol=1e-6)
    state = recover(inputs.state, factors, chain, 0 * count)
    state_one = recover(inputs.state, factors_one, single, 0 * count)
    np.testing.assert_allclose(state_one, state, rtol=1e-6, atol=1e-6)
    for b in range(ROWS[1]):
        true_o, true_states, _ = run_tree(first, single[b], b)
        assert error(o_one[b], true_o) < BOUND
        assert error(state_one[b], true_states[0]) < BOUND


def test_one_token_padding():
    """A row with no node at all: zero output, zero factors, the same state."""
    inputs, parents, _ = random_batch(np.random.default_rng(6), 1, "weak")
    o, factors = verify(inputs, parents, int32(1, 0, 1, 1, 1, 0))
    for field in (o, *jax.tree.leaves(factors)):
        assert not field[[1, 5]].any()
    assert o[0].any()
    state = recover(inputs.state, factors, parents, int32(0, -1, 0, 0, 0, -1))
    np.testing.assert_array_equal(state[[1, 5]], inputs.state[[1, 5]])


def test_steps_of_one_token_equal_a_chain():
    """A plain decode (recover after each node) and one verification of the chain end in the same state."""
    inputs, _, _ = random_batch(np.random.default_rng(7), 5, "strong")
    single, one = every_row(1)
    state = inputs.state
    for t in range(5):
        _, factors = verify(replace(inputs.tokens(slice(t, t + 1)), state=state), single, one)
        state = recover(state, factors, single, one - 1)
    chain, count = every_row(5)
    _, factors = verify(inputs, chain, count)
    assert error(recover(inputs.state, factors, chain, count - 1), state.astype(np.float64)) < BOUND


def test_verify_after_prefill():
    """Known fault A11: five tokens on a filled state, not on a zero one."""
    whole = random_inputs(np.random.default_rng(8), 6, 25, decay="weak")
    _, state = jax.jit(gdn_prefill)(*whole.tokens(slice(0, 20)).args())
    o, _ = verify(replace(whole.tokens(slice(20, 25)), state=np.asarray(state)), *every_row(5))
    for b in range(6):
        assert error(o[b], run_chain(whole, b)[0][20:]) < BOUND


def test_no_sibling_leakage():
    """Known fault C5: whatever node 1 holds, its sibling 2 and the child of 2 do not change by a bit."""
    inputs, _, _ = random_batch(np.random.default_rng(9), 5, "weak")
    parents, count = every_row(5, -1, 0, 0, 2, 1)
    k, v = inputs.k.copy(), inputs.v.copy()
    k[:, 1] *= -100
    v[:, 1] = 1e30
    o, factors = verify(inputs, parents, count)
    o_loud, factors_loud = verify(replace(inputs, k=k, v=v), parents, count)
    quiet = [0, 2, 3]
    np.testing.assert_array_equal(o_loud[:, quiet], o[:, quiet])
    np.testing.assert_array_equal(factors_loud.value[:, quiet], factors.value[:, quiet])
    for last in quiet:
        loud, soft = (recover(inputs.state, f, parents, 0 * count + last) for f in (factors_loud, factors))
        np.testing.assert_array_equal(loud, soft)
    assert (o_loud[:, [1, 4]] != o[:, [1, 4]]).all()


def test_path_of_scattered_nodes():
    """Known faults C1, C2: breadth-first order, the accepted path is nodes 0, 2, 5, 9."""
    inputs = random_inputs(np.random.default_rng(10), 12, 17, decay="weak")
    parents, count = every_row(17, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
    o, factors = verify(inputs, parents, count)
    state = recover(inputs.state, factors, parents, np.full(12, 9, np.int32))
    path = [0, 2, 5, 9]
    chain = Inputs(*(x[:, path] for x in inputs.args()[:5]), inputs.state)
    for b in range(12):
        true_o, true_state = run_chain(chain, b)
        assert error(o[b, path], true_o) < BOUND
        assert error(state[b], true_state) < BOUND


@pytest.mark.parametrize("filler", [1e30, np.nan])
def test_padding_neither_reads_nor_writes(filler):
    """Known fault B6: nodes beyond num_nodes, and rows without any, change nothing whatever they hold."""
    inputs, parents, _ = random_batch(np.random.default_rng(11), 17, "weak")
    num_nodes = np.tile(int32(17, 6, 1, 0), 3)
    padding = np.arange(17) >= num_nodes[:, None]
    dirty = replace(inputs, **{name: getattr(inputs, name).copy() for name in ("q", "k", "v", "log_decay", "beta")})
    for field in dirty.args()[:5]:
        field[padding] = filler
    dirty_parents = np.where(padding, 3, parents).astype(np.int32)
    o, factors = verify(inputs, parents, num_nodes)
    o_dirty, factors_dirty = verify(dirty, dirty_parents, num_nodes)
    for clean, other in zip(jax.tree.leaves((o, factors)), jax.tree.leaves((o_dirty, factors_dirty)), strict=True):
        np.testing.assert_array_equal(clean, other)
        assert not clean[padding].any()
    last = num_nodes - 1
    state = recover(inputs.state, factors, parents, last)
    np.testing.assert_array_equal(state, recover(inputs.state, factors_dirty, dirty_parents, last))
    np.testing.assert_array_equal(state[3::4], inputs.state[3::4])


def test_a_row_does_not_depend_on_its_batch():
    """Known faults A5, A10: one row accepts all, one some, one nothing; each equals its own batch of one."""
    inputs, parents, num_nodes = random_batch(np.random.default_rng(12), 17, "strong")
    last = (num_nodes - 1).astype(np.int32)
    last[1], last[2] = last[1] // 2, -1
    o, factors = verify(inputs, parents, num_nodes)
    state = recover(inputs.state, factors, parents, last)
    for b in range(3):
        one = slice(b, b + 1)
        o_one, factors_one = verify(inputs.row(b), parents[one], num_nodes[one])
        np.testing.assert_allclose(o_one[0], o[b], rtol=1e-6, atol=1e-6)
        state_one = recover(inputs.state[one], factors_one, parents[one], last[one])
        np.testing.assert_allclose(state_one[0], state[b], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(state[2], inputs.state[2])


def test_recover_all_layers_at_once():
    rng = np.random.default_rng(13)
    _, parents, num_nodes = random_batch(rng, 17, "mixed")
    inputs = [random_inputs(rng, ROWS[17], 17, decay="mixed") for _ in range(3)]
    layers = [(x.state, verify(x, parents, num_nodes)[1]) for x in inputs]
    states, factors = jax.tree.map(lambda *x: np.stack(x), *layers)
    last = np.where(np.arange(ROWS[17]) == 1, -1, num_nodes - 1).astype(np.int32)
    together = recover(states, factors, parents, last)
    for i, (state, one) in enumerate(layers):
        np.testing.assert_allclose(together[i], recover(state, one, parents, last), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(together[i, 1], state[1])


def test_extremes():
    """Known fault H12: g = 0 and -50, one key for all nodes, beta 1 and 2.

    At beta 2 a repeated key is a reflection: nothing ever fades, and the rounding of k.k adds up over all 64 nodes.
    """
    inputs = random_inputs(np.random.default_rng(14), ROWS[64], 64, correlation=1.0, decay="none")
    cases = ((0.0, 1.0, BOUND), (0.0, 2.0, 2e-5), (-50.0, 1.0, BOUND), (-50.0, 2.0, BOUND))
    for b, (log_decay, beta, _) in enumerate(cases):
        inputs.log_decay[b], inputs.beta[b] = log_decay, beta
    chain, count = every_row(64)
    o, factors = verify(inputs, chain, count)
    state = recover(inputs.state, factors, chain, count - 1)
    for b, (_, _, bound) in enumerate(cases):
        true_o, true_states, _ = run_tree(inputs, chain[b], b)
        assert error(o[b], true_o) < bound
        assert error(state[b], true_states[63]) < bound


def test_gradients_are_finite():
    inputs = random_inputs(np.random.default_rng(15), 4, 17, correlation=1.0, decay="none")
    inputs.log_decay[2:] = -50
    inputs.beta[::2], inputs.beta[1::2] = 1, 2
    parents = np.tile(np.arange(-1, 16, dtype=np.int32), (4, 1))

    def loss(*args):
        o, factors = gdn_verify(*args, parents, int32(17, 17, 17, 9))
        return jnp.sum(o**2) + jnp.sum(gdn_recover(args[-1], factors, parents, int32(16, 16, 16, 8)) ** 2)

    for gradient in jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*inputs.args()):
        assert np.isfinite(gradient).all()


def test_bf16_inputs():
    """bf16 q, k, v are taken as they are: the same numbers in fp32 give the same result, rounded once at the end."""
    inputs, parents, num_nodes = random_batch(np.random.default_rng(16), 17, "weak")
    narrow = replace(inputs, **{name: getattr(inputs, name).astype(jnp.bfloat16) for name in ("q", "k", "v")})
    wide = replace(narrow, **{name: getattr(narrow, name).astype(np.float32) for name in ("q", "k", "v")})
    o, factors = verify(narrow, parents, num_nodes)
    o_wide, factors_wide = verify(wide, parents, num_nodes)
    assert o.dtype == factors.key.dtype == jnp.bfloat16
    assert factors.value.dtype == factors.log_decay.dtype == np.float32
    np.testing.assert_array_equal(o, o_wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(factors.value, factors_wide.value)
    state, state_wide = (recover(inputs.state, f, parents, num_nodes - 1) for f in (factors, factors_wide))
    np.testing.assert_array_equal(state, state_wide)


def test_wrong_arguments_are_named():
    inputs = random_inputs(np.random.default_rng(17), 2, 3)
    q, k, v, log_decay, beta, state = inputs.args()
    parents = np.tile(np.arange(-1, 2, dtype=np.int32), (2, 1))
    args = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state, "parents": parents}
    for name, wrong, message in (
        ("k", k[:, :2], r"k must be \[B, N, H, dk\]"),
        ("v", v[:, :, :3], "v must have a multiple of q's 2 heads, got 3"),
        ("log_decay", log_decay[..., :1], "log_decay must be"),
        ("beta", beta.astype(jnp.bfloat16), "beta must be float32"),
        ("state", state[:, :, :, :7], r"state must be \[B, HV, dk, dv\]"),
        ("parents", parents.astype(np.int8), "parents must be int32"),
        ("parents", parents[:1], r"parents must be \[B, N\]"),
    ):
        with pytest.raises(ValueError, match=message):
            gdn_verify(**args | {name: wrong})
    with pytest.raises(ValueError, match=r"num_nodes must be \[B\]"):
        gdn_verify(**args, num_nodes=int32(1))
    many = random_inputs(np.random.default_rng(17), 1, 65)
    with pytest.raises(ValueError, match="1 to 64 nodes a row, got 65"):
        gdn_verify(*many.args(), np.arange(-1, 64, dtype=np.int32)[None])
    factors = Factors(k, v, log_decay)
    with pytest.raises(ValueError, match="factors.value must be"):
        gdn_recover(state, replace(factors, value=v[:, :2]), parents, int32(2, 2))
    with pytest.raises(ValueError, match="last must be"):
        gdn_recover(state, factors, parents, int32(2))
