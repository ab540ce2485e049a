"""The recovery kernel: interpreted against the float64 recurrence, lowered for every tile, run where there is a GPU.

The factors are made from the recurrence itself, so the bound is on recovery alone.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.factors import Factors
from kernels_pallas.gdn_recover import api, reference, triton
from kernels_pallas.gdn_recover.tiles import TABLE
from kernels_pallas.pallas_triton import matmul
from kernels_pallas.tiles import Tile
from tests.kernels.lowering import TRITON_CALL, lower_for_cuda
from tests.kernels.oracle import Inputs, error, random_inputs, random_tree, run_tree

BOUND = 1e-6  # relative, of a state in fp32
FOLDS = {"updates": 64, "product": 0}  # rank_one: the largest tree that is folded by updates
TILES = sorted({rule.tile for rules in TABLE.values() for rule in rules}, key=repr)
SMALL = Tile(columns=32, rows=16)


def recover(*args, fold: str, tile: Tile = SMALL, **options):
    run = partial(triton.gdn_recover, tile=tile, rank_one=FOLDS[fold], interpret=True, **options)
    return jax.tree.map(np.asarray, jax.jit(run)(*args))


def truth(inputs: Inputs, parents: np.ndarray, dtype=np.float32) -> tuple[Factors, list[np.ndarray]]:
    """Exact factors of all nodes, each rounded once, and the states after every node, a row each [N, HV, dk, dv].

    The keys of ``inputs`` must be numbers of ``dtype``.
    """
    states, us, totals = [], [], np.zeros(inputs.log_decay.shape)
    for b, row in enumerate(parents):
        _, all_states, u = run_tree(inputs, row, b)
        states.append(all_states)
        us.append(u)
        for t, parent in enumerate(row):
            totals[b, t] = inputs.log_decay[b, t].astype(np.float64) + (totals[b, parent] if parent >= 0 else 0)
    high = totals.astype(np.float32)
    low = (totals - high).astype(np.float32)
    return Factors(jnp.asarray(inputs.k, dtype), np.stack(us).astype(np.float32), high, low), states


def path_mask(parents: np.ndarray, last: np.ndarray) -> np.ndarray:
    mask = np.zeros(parents.shape, bool)
    for b, node in enumerate(last):
        while node >= 0:
            mask[b, node] = True
            node = parents[b, node]
    return mask


def spoil(factors: Factors, parents: np.ndarray, last: np.ndarray) -> Factors:
    """NaN in every factor of every node off the path."""
    off = ~path_mask(parents, last)

    def spoiled(x):
        return jnp.where(off.reshape(*off.shape, *[1] * (x.ndim - 2)), jnp.nan, x)

    return jax.tree.map(spoiled, factors)


def case(nodes: int, *, heads: int = 2, value_heads: int = 4, dk: int = 32, dv: int = 64, decay: str = "mixed", seed=0):
    """Four rows: a chain with everything accepted, a bush, a row that accepts nothing, and an inner node."""
    rng = np.random.default_rng(1000 * seed + nodes)
    inputs = random_inputs(rng, 4, nodes, heads=heads, value_heads=value_heads, dk=dk, dv=dv, decay=decay)
    parents = np.stack([random_tree(rng, nodes, bushiness) for bushiness in (0, 0.5, 0.1, 0.1)])
    last = np.array([nodes - 1, nodes - 1, -1, nodes // 2], np.int32)
    return inputs, parents, last


def check(new: np.ndarray, inputs: Inputs, states: list[np.ndarray], last: np.ndarray) -> None:
    for b, node in enumerate(last):
        if node < 0:
            np.testing.assert_array_equal(new[b], inputs.state[b])
        else:
            assert error(new[b], states[b][node]) < BOUND, (b, node)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("nodes", [1, 5, 17, 33, 64])
@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_trees(fold, nodes, decay):
    """Grouped heads, unequal sizes, correlated keys, chains up to 64, decays from 0 to -50; NaN off the path."""
    inputs, parents, last = case(nodes, decay=decay)
    factors, states = truth(inputs, parents)
    new, window = recover(inputs.state, spoil(factors, parents, last), parents, last, fold=fold)
    assert window is None
    check(new, inputs, states, last)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize(("heads", "value_heads", "dk", "dv"), [(1, 1, 16, 16), (1, 3, 64, 16), (2, 2, 16, 128)])
def test_head_sizes(fold, heads, value_heads, dk, dv):
    inputs, parents, last = case(9, heads=heads, value_heads=value_heads, dk=dk, dv=dv)
    factors, states = truth(inputs, parents)
    check(recover(inputs.state, factors, parents, last, fold=fold)[0], inputs, states, last)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("step", [1, 3, 64])
def test_steps_of_the_walk(fold, step):
    inputs, parents, last = case(10)
    factors, states = truth(inputs, parents)
    check(recover(inputs.state, factors, parents, last, fold=fold, step=step)[0], inputs, states, last)


@pytest.mark.parametrize("fold", FOLDS)
def test_strong_decay_above_weak_ones(fold):
    """G is large and its differences are small: both parts of G are needed, and one alone misses the bound."""
    inputs, parents, last = case(16, decay="weak")
    inputs.log_decay[:, :2] = -50
    factors, states = truth(inputs, parents)
    check(recover(inputs.state, factors, parents, last, fold=fold)[0], inputs, states, last)
    alone, _ = recover(inputs.state, replace(factors, log_decay_low=None), parents, last, fold=fold)
    assert BOUND < error(alone[0], states[0][15]) < 1e-4


@pytest.mark.parametrize("fold", FOLDS)
def test_bf16_keys(fold):
    inputs, parents, last = case(9)
    inputs = replace(inputs, k=np.asarray(jnp.asarray(inputs.k, jnp.bfloat16).astype(jnp.float32)))
    factors, states = truth(inputs, parents, jnp.bfloat16)
    assert factors.key.dtype == jnp.bfloat16
    check(recover(inputs.state, factors, parents, last, fold=fold)[0], inputs, states, last)


@pytest.mark.parametrize("fold", FOLDS)
def test_path_of_scattered_nodes(fold):
    """Known faults C1, C2: breadth-first order, the accepted path is nodes 0, 2, 5, 9."""
    inputs = random_inputs(np.random.default_rng(1), 1, 11, decay="weak")
    parents = np.array([[-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]], np.int32)
    factors, states = truth(inputs, parents)
    last = np.array([9], np.int32)
    check(recover(inputs.state, factors, parents, last, fold=fold)[0], inputs, states, last)


@pytest.mark.parametrize("fold", FOLDS)
def test_broken_parents_end_the_path(fold):
    """A parent that is not before its node counts as -1, as in ``ancestor_mask``: there is no cycle to follow."""
    inputs = random_inputs(np.random.default_rng(2), 2, 6, decay="weak")
    parents = np.array([[-1, 0, 2, 2, 3, 3], [-1, 0, 5, 2, 3, 4]], np.int32)
    factors, _ = truth(inputs, np.where(parents < np.arange(6), parents, -1))
    last = np.array([5, 5], np.int32)
    new, _ = recover(inputs.state, factors, parents, last, fold=fold)
    wanted, _ = reference.gdn_recover(inputs.state, factors, parents, last)
    assert error(new, np.asarray(wanted, np.float64)) < BOUND


@pytest.mark.parametrize("fold", FOLDS)
def test_all_layers_in_one_call(fold):
    """With the window in the same launch; each layer has the bits of a call of its own."""
    rng = np.random.default_rng(3)
    cases = [case(9, seed=i) for i in range(2)]
    parents, last = cases[0][1:]
    made = [truth(inputs, parents) for inputs, _, _ in cases]
    states, factors = jax.tree.map(lambda *x: np.stack(x), *[(c[0].state, m[0]) for c, m in zip(cases, made)])
    window = rng.standard_normal((2, 4, 3, 48)).astype(np.float32)
    x = rng.standard_normal((2, 4, 9, 48)).astype(np.float32)
    new, new_window = recover(states, factors, parents, last, window, x, fold=fold)
    for i, (inputs, _, _) in enumerate(cases):
        check(new[i], inputs, made[i][1], last)
        alone = recover(inputs.state, made[i][0], parents, last, window[i], x[i], fold=fold)
        np.testing.assert_array_equal(new[i], alone[0])
        np.testing.assert_array_equal(new_window[i], alone[1])
    np.testing.assert_array_equal(new_window, reference.gdn_recover(states, factors, parents, last, window, x)[1])


def test_the_bound_catches_a_dropped_part_of_u(monkeypatch):
    """A product with u rounded to bf16 must miss the bound."""
    inputs, parents, last = case(17)
    factors, states = truth(inputs, parents)
    monkeypatch.setattr(triton, "matmul", lambda a, b: matmul(a, b.astype(jnp.bfloat16)))
    new, _ = recover(inputs.state, factors, parents, last, fold="product")
    assert not error(new[0], states[0][16]) < 100 * BOUND


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_interpreted(fold, tile):
    inputs = random_inputs(np.random.default_rng(4), 1, 9, heads=1, value_heads=1, dk=256, dv=256)
    parents = random_tree(np.random.default_rng(4), 9, 0.3)[None]
    factors, states = truth(inputs, parents)
    last = np.array([8], np.int32)
    check(recover(inputs.state, factors, parents, last, fold=fold, tile=tile)[0], inputs, states, last)


def real_specs(layers: int, rows: int, nodes: int, dtype: str, channels: int = 6144):
    def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    lead = (layers, rows, nodes, 8)
    factors = Factors(spec(*lead, 256, dtype=dtype), spec(*lead, 256), spec(*lead), spec(*lead))
    tree = (spec(rows, nodes, dtype="int32"), spec(rows, dtype="int32"))
    conv = (spec(layers, rows, 3, channels, dtype=dtype), spec(layers, rows, nodes, channels, dtype=dtype))
    return spec(layers, rows, 8, 256, 256), factors, *tree, *conv


@pytest.mark.parametrize("nodes", [1, 6, 17, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_lowers(tile, nodes, dtype):
    """One launch in place: state and window alias the results."""
    specs = real_specs(24, 2, nodes, dtype)
    for rank_one in FOLDS.values():
        op = partial(triton.gdn_recover, tile=tile, rank_one=rank_one)
        text = lower_for_cuda(op, *specs)
        assert text.count(TRITON_CALL) == 1
        aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text)
        assert aliases == [("0", "6"), ("1", "8")]
        text = lower_for_cuda(op, *specs[:4])
        assert text.count(TRITON_CALL) == 1
        assert re.findall(r"output_tuple_indices = \[(\d?)\], operand_index = (\d)", text)[0][1] == "6"


def test_more_than_four_gigabytes_lower():
    """Offsets need 64 bits there."""
    assert TRITON_CALL in lower_for_cuda(triton.gdn_recover, *real_specs(24, 128, 16, "bfloat16", channels=6128))


def test_a_tile_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="tile of gdn_recover must fit"):
        lower_for_cuda(partial(triton.gdn_recover, tile=Tile(columns=256)), *real_specs(1, 1, 64, "float32"))


def test_cannot_run_here():
    inputs, parents, last = case(1)
    factors, _ = truth(inputs, parents)
    if jax.default_backend() != "gpu":
        with pytest.raises(ValueError, match="'triton' of gdn_recover cannot run: it needs an NVIDIA GPU"):
            api.gdn_recover(inputs.state, factors, parents, last, implementation="triton")


def real_case(layers: int, rows: int, nodes: int, dtype: str):
    """Random arrays of the shape of a real model; a chain, bushes, and (from four rows on) a row with -1."""
    rng = np.random.default_rng(nodes)

    def fill(spec: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.standard_normal(spec.shape, np.float32), spec.dtype)

    state, factors, _, _, window, x = jax.tree.map(fill, real_specs(layers, rows, nodes, dtype))
    key = (factors.key.astype(jnp.float32) / 16).astype(dtype)
    factors = replace(factors, key=key, log_decay=-jnp.abs(factors.log_decay), log_decay_low=1e-7 * factors.log_decay)
    parents = np.stack([random_tree(rng, nodes, 0.3 * (b % 3)) for b in range(rows)])
    last = np.where(np.arange(rows) == 3, -1, nodes - 1 - np.arange(rows) % nodes).astype(np.int32)
    return state, factors, jnp.asarray(parents), jnp.asarray(last), window, x


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("nodes", [1, 6, 16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_on_a_gpu(tile, fold, dtype, nodes, rows):
    """24 layers of 8 heads of 256 x 256: parity, the same bits every time, rows that accept nothing kept."""
    args = real_case(24, rows, nodes, dtype)
    state, factors, parents, last, window, x = args
    off = ~jnp.asarray(path_mask(np.asarray(parents), np.asarray(last)))
    spoiled = jax.tree.map(lambda f: jnp.where(off.reshape(*off.shape, *[1] * (f.ndim - 3)), jnp.nan, f), factors)
    run = jax.jit(partial(triton.gdn_recover, tile=tile, rank_one=FOLDS[fold]))
    new, new_window = run(state, spoiled, parents, last, window, x)
    wanted, wanted_window = jax.jit(reference.gdn_recover)(*args)
    assert jnp.linalg.norm(new - wanted) < 2 * BOUND * jnp.linalg.norm(wanted)
    assert jnp.max(jnp.abs(new - wanted)) < 50 * BOUND
    assert (new_window == wanted_window).all()
    for _ in range(3):
        again, again_window = run(state, spoiled, parents, last, window, x)
        assert (again == new).all()
        assert (again_window == new_window).all()
    if rows > 3:
        assert (new[:, 3] == state[:, 3]).all()
        assert (new_window[:, 3] == window[:, 3]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 16])
def test_donated_buffers_are_reused(nodes):
    """Known fault J6: one state, not two, and a row that accepts nothing is not even touched."""
    state, *rest, window, x = real_case(24, 4, nodes, "bfloat16")
    run = jax.jit(
        lambda state, window, *rest: api.gdn_recover(state, *rest[:3], window, rest[3], implementation="triton"),
        donate_argnums=(0, 1),
    )
    wanted = jax.jit(reference.gdn_recover)(state, *rest, window, x)
    compiled = run.lower(state, window, *rest, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
    places = [a.unsafe_buffer_pointer() for a in (state, window)]
    results = compiled(state, window, *rest, x)
    assert [a.unsafe_buffer_pointer() for a in results] == places
    assert state.is_deleted()
    assert window.is_deleted()
    assert jnp.linalg.norm(results[0] - wanted[0]) < 2 * BOUND * jnp.linalg.norm(wanted[0])
    assert (results[1] == wanted[1]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("taps", [2, 4, 5])
def test_window_in_place_on_a_gpu(taps):
    """Every accepted count, below and above the reach of the convolution, with a donated window of odd width."""
    rng = np.random.default_rng(taps)
    rows, nodes, channels = 10, 9, 1040
    inputs = random_inputs(rng, rows, nodes, heads=1, value_heads=1, dk=16, dv=16)
    factors = Factors(inputs.k, inputs.v, inputs.log_decay)
    parents = np.stack([random_tree(rng, nodes, 0.2 * (b % 3)) for b in range(rows)])
    last = np.arange(-1, nodes, dtype=np.int32)
    window = rng.standard_normal((rows, taps - 1, channels)).astype(np.float32)
    x = rng.standard_normal((rows, nodes, channels)).astype(np.float32)
    wanted = np.asarray(jax.jit(reference.gdn_recover)(inputs.state, factors, parents, last, window, x)[1])
    run = jax.jit(triton.gdn_recover, donate_argnums=(0, 4))
    for _ in range(5):
        _, new = run(jnp.array(inputs.state), factors, parents, last, jnp.array(window), x)
        np.testing.assert_array_equal(new, wanted)
