"""The Triton verification kernel: interpreted against float64, lowered for a GPU, and on a GPU where there is one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import Factors, gdn_recover
from kernels_pallas.ancestors import ancestor_bits, ancestor_mask
from kernels_pallas.gdn_verify import reference, triton
from kernels_pallas.gdn_verify.tiles import TABLE
from kernels_pallas.tiles import TUNED_ON, Tile, first
from tests.kernels.lowering import TRITON_CALL, lower_for_cuda
from tests.kernels.oracle import Inputs, error, random_inputs, random_tree, rounded, run_tree

RULES = TABLE[TUNED_ON]
TILES = sorted({rule.tile for rule in RULES}, key=repr)
SMALL = Tile(columns=16, rows=16, warps=1, stages=1)


@functools.partial(jax.jit, static_argnames=("layer", "tile", "interpret"))
def verify(*args, layer, tile, interpret):
    scale = args[0].shape[-1] ** -0.5
    return triton.gdn_verify(*args, scale=scale, layer=layer, tile=tile, interpret=interpret)


def run(inputs: Inputs, parents, num_nodes=None, *, interpret=True, tile=SMALL, layer=None):
    o, factors = verify(*inputs.args(), parents, num_nodes, layer=layer, tile=tile, interpret=interpret)
    # NumPy from here on: what JAX does with an array outside jit is a program of its own for every shape.
    return np.asarray(o).astype(np.float32), jax.tree.map(np.asarray, factors)


recover = jax.jit(functools.partial(gdn_recover, implementation="reference"))


def check(inputs: Inputs, truth: Inputs, parents, num_nodes=None, *, bound=1e-6, o_bound=1e-6, **how):
    """Outputs, u and the state recovered at the last node of each row, against the float64 recurrence."""
    o, factors = run(inputs, parents, num_nodes, **how)
    counts = np.full(len(parents), parents.shape[1]) if num_nodes is None else num_nodes
    states = np.asarray(recover(truth.state, factors, parents, (counts - 1).astype(np.int32)))
    for b, nodes in enumerate(counts.tolist()):
        if nodes:
            wanted_o, wanted_states, wanted_u = run_tree(truth, parents[b], b, nodes)
            assert error(o[b, :nodes], wanted_o) < o_bound
            assert error(factors.value[b, :nodes], wanted_u) < bound
            assert error(states[b], wanted_states[-1]) < bound
        for padding in (o[b, nodes:], *(x[b, nodes:] for x in jax.tree.leaves(factors))):
            assert not padding.any()


@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 17, 33, 64])
@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_against_float64(nodes, decay):
    rng = np.random.default_rng(nodes)
    inputs = random_inputs(rng, 2, nodes, heads=1, value_heads=2, dk=32, dv=16, decay=decay)
    parents = np.stack([random_tree(rng, nodes, 0), random_tree(rng, nodes, 0.5)])
    check(inputs, inputs, parents)


@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.parametrize("nodes", [1, 20])
def test_every_tile(tile, nodes):
    """In bf16: u and the states keep fp32 accuracy, outputs are rounded to bf16."""
    rng = np.random.default_rng(0)
    inputs, truth = rounded(random_inputs(rng, 1, nodes, heads=1, value_heads=1, dk=64, dv=64))
    check(inputs, truth, random_tree(rng, nodes, 0.5)[None], tile=tile, o_bound=3e-3)


@pytest.mark.parametrize("nodes", [1, 6])
def test_a_head_smaller_than_the_tile(nodes):
    rng = np.random.default_rng(0)
    inputs = random_inputs(rng, 1, nodes, heads=1, value_heads=1, dk=16, dv=32)
    check(inputs, inputs, random_tree(rng, nodes, 0.5)[None], tile=Tile(columns=64, rows=64))


@pytest.mark.parametrize(("dk", "dv"), [(16, 128), (128, 16), (256, 64)])
def test_unequal_head_sizes_and_grouped_heads(dk, dv):
    rng = np.random.default_rng(1)
    inputs = random_inputs(rng, 2, 6, heads=2, value_heads=6, dk=dk, dv=dv)
    check(inputs, inputs, np.stack([random_tree(rng, 6, 0.5) for _ in range(2)]), tile=Tile(columns=16, rows=0))


@pytest.mark.parametrize("nodes", [1, 18])
def test_padding_is_not_looked_at(nodes):
    """NaN behind ``num_nodes`` reaches nothing; a row may be all padding."""
    rng = np.random.default_rng(3)
    clean = random_inputs(rng, 3, nodes, heads=1, value_heads=2, dk=32, dv=16)
    parents = np.stack([random_tree(rng, nodes, 0.5) for _ in range(3)])
    num_nodes = np.array([nodes, nodes // 2, 0], np.int32)
    padding = np.arange(nodes) >= num_nodes[:, None]
    dirty = [np.where(padding.reshape(*padding.shape, *[1] * (x.ndim - 2)), np.nan, x) for x in clean.args()[:5]]
    check(Inputs(*(x.astype(np.float32) for x in dirty), clean.state), clean, parents, num_nodes)


def test_strong_decay_leaves_no_nan():
    """exp(-50) a token, 64 tokens deep: G is -3200, far below what fp32 can take the exponential of."""
    rng = np.random.default_rng(4)
    inputs = random_inputs(rng, 1, 64, heads=1, value_heads=1, dk=16, dv=16)
    strong = Inputs(*inputs.args()[:3], np.full_like(inputs.log_decay, -50), *inputs.args()[4:])
    check(strong, strong, random_tree(rng, 64, 0)[None])


def test_a_layer_of_a_stack():
    rng = np.random.default_rng(5)
    inputs = random_inputs(rng, 2, 5, heads=1, value_heads=2, dk=16, dv=16)
    stack = np.stack([np.full_like(inputs.state, np.nan), inputs.state, np.full_like(inputs.state, np.nan)])
    parents = np.stack([random_tree(rng, 5, 0.5) for _ in range(2)])
    stacked = Inputs(*inputs.args()[:5], stack)
    for nodes in (1, 5):
        part = stacked.tokens(slice(0, nodes))
        o, factors = run(part, parents[:, :nodes], layer=1)
        wanted_o, wanted = run(inputs.tokens(slice(0, nodes)), parents[:, :nodes])
        np.testing.assert_array_equal(o, wanted_o)
        jax.tree.map(np.testing.assert_array_equal, factors, wanted)


def test_the_bound_notices_a_rounded_state():
    """The bounds above are of use only if a state rounded to bf16 breaks them."""
    rng = np.random.default_rng(6)
    inputs = random_inputs(rng, 1, 4, heads=1, value_heads=1, dk=32, dv=16)
    coarse = np.asarray(jnp.asarray(inputs.state).astype(jnp.bfloat16).astype(jnp.float32))
    with pytest.raises(AssertionError):
        check(Inputs(*inputs.args()[:5], coarse), inputs, random_tree(rng, 4, 0)[None])


def test_ancestor_bits():
    rng = np.random.default_rng(7)
    parents = np.stack([random_tree(rng, 64, bushiness) for bushiness in (0, 0.3, 1)])
    words = np.stack(ancestor_bits(jnp.asarray(parents), jnp.array([64, 40, 1], jnp.int32)), axis=-1)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    for b, nodes in enumerate((64, 40, 1)):
        wanted = np.zeros((64, 64), bool)
        for t in range(nodes):
            i = t
            while i >= 0:
                wanted[t, i] = True
                i = parents[b, i]
        np.testing.assert_array_equal(bits[b], wanted)


@pytest.mark.parametrize("nodes", [1, 2, 31, 33])
def test_ancestor_bits_are_those_of_the_mask(nodes):
    """Also of parents that break the order, and of padding that has parents."""
    rng = np.random.default_rng(nodes)
    parents = jnp.asarray(rng.integers(-2, nodes + 2, (6, nodes)), jnp.int32)
    for counts in (None, jnp.asarray([nodes, *rng.integers(0, nodes + 1, 5)], jnp.int32)):
        words = np.stack(ancestor_bits(parents, counts), axis=-1)
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
        np.testing.assert_array_equal(bits[..., :nodes], ancestor_mask(parents, counts))
        assert not bits[..., nodes:].any()


def test_ancestor_bits_of_many_layers_are_computed_once():
    def gathers(layers: int) -> int:
        def use(parents, x):
            for _ in range(layers):
                low, high = ancestor_bits(parents)
                x = jnp.sin(x) + low + high
            return x

        text = jax.jit(use).lower(jnp.zeros((1, 16), jnp.int32), jnp.zeros((1, 16))).compile().as_text()
        return len(re.findall(r" gather\(", text))

    assert gathers(3) == gathers(1) > 0


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tile_lowers(rule, dtype):
    """One launch, and no slice of the stacked state."""
    nodes, rows = (64 if rule.nodes == -1 else rule.nodes), (32 if rule.heads == -1 else rule.heads // 8)
    narrow = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    wide = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    head = (rows, nodes, 8)
    op = functools.partial(triton.gdn_verify, scale=1.0, layer=1, tile=rule.tile)
    text = lower_for_cuda(
        op,
        *[narrow((*head, 256))] * 3,
        *[wide(head)] * 2,
        wide((2, rows, 8, 256, 256)),
        ints((rows, nodes)),
        ints((rows,)),
    )
    assert text.count(TRITON_CALL) == 1
    assert not re.search(r"stablehlo\.(dynamic_)?slice.*256x256", text)


def test_tiles_are_chosen_by_shape():
    def tile(nodes, heads, on=TUNED_ON):
        return first(TABLE, nodes=nodes, heads=heads, on=on)

    assert tile(16, 8) != tile(16, 256)
    assert tile(64, 8) != tile(16, 8)
    assert tile(16, 8, on="NVIDIA of another kind") == tile(16, 8)


def test_a_tile_too_large_is_refused_before_it_is_compiled(monkeypatch):
    monkeypatch.setattr("kernels_pallas.tiles.card", lambda: "NVIDIA H200")
    rng = np.random.default_rng(8)
    inputs = random_inputs(rng, 1, 64, heads=1, value_heads=1, dk=256, dv=256)
    with pytest.raises(ValueError, match=r"tile of gdn_verify must fit 232448 bytes .* use fewer columns"):
        run(inputs, random_tree(rng, 64, 0)[None], tile=Tile(columns=256, rows=256, stages=4))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tile_on_a_gpu(rule, dtype):
    """Real head sizes: correlated keys, decays from none to exp(-50), full depth, and the same bits every time."""
    rng = np.random.default_rng(9)
    nodes, rows = (64 if rule.nodes == -1 else rule.nodes), 2
    inputs = truth = random_inputs(rng, rows, nodes, heads=2, value_heads=4, dk=256, dv=256)
    if dtype == "bfloat16":
        inputs, truth = rounded(inputs)
    parents = np.stack([random_tree(rng, nodes, bushiness) for bushiness in (0, 0.4)])
    o_bound = 3e-3 if dtype == "bfloat16" else 2e-6
    check(inputs, truth, parents, interpret=False, tile=rule.tile, bound=2e-6, o_bound=o_bound)
    again = [run(inputs, parents, interpret=False, tile=rule.tile) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *again)
    none = random_inputs(rng, rows, nodes, heads=2, value_heads=4, dk=256, dv=256, decay="none")
    check(
        none, none, parents, interpret=False, tile=rule.tile, bound=5e-6, o_bound=5e-6
    ) if dtype == "float32" else None


@pytest.mark.gpu
def test_the_api_takes_the_kernel_on_a_gpu():
    from kernels_pallas import gdn_verify

    rng = np.random.default_rng(10)
    inputs = random_inputs(rng, 1, 7, heads=1, value_heads=1, dk=64, dv=64)
    parents = jnp.asarray(random_tree(rng, 7, 0.5)[None])
    args = (*map(jnp.asarray, inputs.args()), parents)
    assert TRITON_CALL in jax.jit(gdn_verify).lower(*args).as_text()
    o, factors = gdn_verify(*args)
    wanted, _ = reference.gdn_verify(*args, None, 64**-0.5)
    assert error(o, np.asarray(wanted, np.float64)) < 2e-6
    assert isinstance(factors, Factors)
