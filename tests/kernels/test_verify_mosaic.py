"""The Mosaic GPU verification kernel: interpreted against float64, lowered for a GPU, and on a GPU if there is one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gdn_verify import mosaic_gpu
from kernels_pallas.gdn_verify.tiles import MOSAIC
from kernels_pallas.tiles import TUNED_ON, Tile
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.oracle import Inputs, error, random_inputs, random_tree, rounded, run_tree

SHIPPED = [
    (nodes, rule.tile)
    for rule in MOSAIC[TUNED_ON]
    for nodes in (1, 4, 8, 13, 16, 24, 32, 45, 61, 64)
    if rule.nodes == -1 or nodes <= rule.nodes
]
NARROW, MIDDLE, WIDE = Tile(columns=16, stages=4), Tile(columns=32, stages=2), Tile(columns=64, stages=2)
WIDER, WIDEST = Tile(columns=128, stages=5), Tile(columns=256, stages=3)
needs_jax_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")


def run(inputs: Inputs, parents, num_nodes=None, *, tile=None, layer=None, interpret=True):
    scale = inputs.q.shape[-1] ** -0.5
    op = functools.partial(mosaic_gpu.gdn_verify, scale=scale, layer=layer, tile=tile, interpret=interpret)
    o, factors = jax.jit(op)(*map(jnp.asarray, inputs.args()), jnp.asarray(parents), num_nodes)
    return np.asarray(o.astype(jnp.float32)), factors


def check(inputs: Inputs, truth: Inputs, parents, num_nodes=None, *, bound=4e-6, **how):
    """Outputs, u and the path sums of each row against float64; o is rounded to bf16, the state misses 2^-16."""
    o, factors = run(inputs, parents, num_nodes, **how)
    for b in range(len(parents)):
        nodes = parents.shape[1] if num_nodes is None else int(num_nodes[b])
        if nodes:
            wanted_o, _, wanted_u = run_tree(truth, parents[b], b, nodes)
            assert error(o[b, :nodes], wanted_o) < 3e-3
            assert error(factors.value[b, :nodes], wanted_u) < bound
            log_decay = truth.log_decay[b].astype(np.float64)
            total = np.zeros((nodes, log_decay.shape[1]))
            for t, parent in enumerate(parents[b, :nodes]):
                total[t] = log_decay[t] + (total[parent] if parent >= 0 else 0)
            found = np.asarray(factors.log_decay, np.float64) + np.asarray(factors.log_decay_low, np.float64)
            np.testing.assert_allclose(found[b, :nodes], total, atol=1e-7)
        for padding in (o[b, nodes:], *(x[b, nodes:] for x in jax.tree.leaves(factors))):
            assert not np.asarray(padding.astype(jnp.float32)).any()


@needs_jax_0_11
@pytest.mark.parametrize(
    ("nodes", "tile", "decay"),
    [
        *[(1, NARROW, "mixed"), (16, NARROW, "mixed"), (32, MIDDLE, "none"), (43, MIDDLE, "mixed")],
        *[(5, WIDE, "none"), (16, WIDE, "mixed"), (32, WIDE, "mixed"), (43, WIDE, "none"), (64, WIDE, "mixed")],
    ],
)
def test_against_float64(nodes, tile, decay):
    rng = np.random.default_rng(nodes)
    inputs, truth = rounded(random_inputs(rng, 1, nodes, heads=1, value_heads=1, dk=64, dv=64, decay=decay))
    check(inputs, truth, random_tree(rng, nodes, 0.3)[None], tile=tile)


@needs_jax_0_11
@pytest.mark.parametrize(
    ("tile", "dv"), [(NARROW, 128), (MIDDLE, 128), (WIDE, 128), (WIDER, 256), (WIDEST, 256)], ids=repr
)
def test_all_of_dk_and_grouped_heads(tile, dv):
    """Fewer stages than there are cuts of dk; several programs of a head, and value heads that share a key head."""
    rng = np.random.default_rng(1)
    inputs, truth = rounded(random_inputs(rng, 1, 8, heads=1, value_heads=2, dk=256, dv=dv))
    check(inputs, truth, random_tree(rng, 8, 0.5)[None], tile=tile)


@needs_jax_0_11
@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=repr)
def test_padding_is_not_looked_at(tile):
    """NaN behind ``num_nodes`` reaches nothing; a row may be all padding."""
    rng = np.random.default_rng(3)
    inputs, truth = rounded(random_inputs(rng, 3, 18, heads=1, value_heads=1, dk=64, dv=64))
    parents = np.stack([random_tree(rng, 18, 0.5) for _ in range(3)])
    num_nodes = np.array([18, 9, 0], np.int32)
    padding = np.arange(18) >= num_nodes[:, None]
    dirty = [
        jnp.where(padding.reshape(*padding.shape, *[1] * (x.ndim - 2)), jnp.nan, x).astype(x.dtype)
        for x in inputs.args()[:5]
    ]
    check(Inputs(*dirty, inputs.state), truth, parents, num_nodes, tile=tile)


@needs_jax_0_11
def test_a_layer_of_a_stack():
    rng = np.random.default_rng(5)
    inputs, truth = rounded(random_inputs(rng, 1, 8, heads=1, value_heads=1, dk=64, dv=64))
    stack = np.stack([np.full_like(inputs.state, np.nan), inputs.state, np.full_like(inputs.state, np.nan)])
    check(Inputs(*inputs.args()[:5], stack), truth, random_tree(rng, 8, 0.5)[None], layer=1, tile=WIDE)


@needs_jax_0_11
def test_the_bound_notices_a_rounded_state():
    rng = np.random.default_rng(6)
    inputs, truth = rounded(random_inputs(rng, 1, 4, heads=1, value_heads=1, dk=64, dv=64))
    coarse = np.asarray(jnp.asarray(inputs.state).astype(jnp.bfloat16).astype(jnp.float32))
    with pytest.raises(AssertionError):
        check(Inputs(*inputs.args()[:5], coarse), truth, random_tree(rng, 4, 0)[None], tile=WIDE)


@needs_jax_0_11
@pytest.mark.parametrize(
    ("nodes", "rows", "size"),
    [(16, 1, 256), (16, 32, 256), (32, 32, 256), (45, 1, 128), (61, 32, 256), (64, 1, 256), (1, 1, 64)],
)
def test_lowers(nodes, rows, size):
    """One launch, and no slice of the stacked state."""
    narrow, wide, ints = (
        functools.partial(jax.ShapeDtypeStruct, dtype=x) for x in (jnp.bfloat16, jnp.float32, jnp.int32)
    )
    head = (rows, nodes, 8)
    text = lower_for_cuda(
        functools.partial(mosaic_gpu.gdn_verify, scale=1.0, layer=1),
        *[narrow((*head, size))] * 3,
        *[wide(head)] * 2,
        wide((2, rows, 8, size, size)),
        ints((rows, nodes)),
        ints((rows,)),
    )
    assert text.count("custom_call @mosaic_gpu") == 1
    assert not re.search(rf"stablehlo\.(dynamic_)?slice.*{size}x{size}", text)


@needs_jax_0_11
def test_what_is_unsupported():
    def reason(dk=256, dv=256, dtype="bfloat16", nodes=16):
        return mosaic_gpu.unsupported(dk, dv, dtype, nodes)

    assert reason() is None
    assert "bfloat16" in reason(dtype="float32")
    assert "dk and dv" in reason(dk=32)
    assert "N must be" in reason(nodes=65)
    rng = np.random.default_rng(8)
    inputs = random_inputs(rng, 1, 4, heads=1, value_heads=1, dk=64, dv=64)
    with pytest.raises(ValueError, match="cannot run as a Mosaic GPU kernel: q, k and v must be bfloat16"):
        run(inputs, random_tree(rng, 4, 0)[None])
    with pytest.raises(ValueError, match="16, 32, 64, 128 or 256 columns"):
        run(rounded(inputs)[0], random_tree(rng, 4, 0)[None], tile=Tile(columns=48))


@needs_jax_0_11
def test_a_tile_too_large_is_refused_before_it_is_compiled():
    rng = np.random.default_rng(9)
    inputs = rounded(random_inputs(rng, 1, 61, heads=1, value_heads=1, dk=256, dv=256))[0]
    with pytest.raises(ValueError, match=r"tile of gdn_verify must fit 232448 bytes .* use fewer columns"):
        run(inputs, random_tree(rng, 61, 0)[None], tile=Tile(columns=256, stages=4))


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="of older versions")
def test_an_older_jax_is_told_so():
    assert "jax 0.11" in mosaic_gpu.unsupported(256, 256, jnp.bfloat16, 16)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize(("nodes", "tile"), SHIPPED, ids=repr)
@pytest.mark.parametrize("decay", ["mixed", "none"])
def test_every_tile_on_a_gpu(nodes, tile, decay):
    """Real head sizes, bushy trees and chains, ragged rows, and the same bits every time."""
    rng, rows = np.random.default_rng(nodes), 4
    inputs, truth = rounded(random_inputs(rng, rows, nodes, heads=2, value_heads=4, dk=256, dv=256, decay=decay))
    parents = np.stack([random_tree(rng, nodes, 0.4 * (b % 2)) for b in range(rows)])
    num_nodes = np.array([nodes, nodes // 2, nodes, 0], np.int32)
    how = {"tile": tile, "interpret": False}
    check(inputs, truth, parents, num_nodes, **how)
    first, second = (run(inputs, parents, num_nodes, **how) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize(("dk", "dv"), [(64, 128), (128, 64), (128, 256)])
def test_other_head_sizes_on_a_gpu(dk, dv):
    rng = np.random.default_rng(10)
    inputs, truth = rounded(random_inputs(rng, 2, 16, heads=2, value_heads=2, dk=dk, dv=dv))
    check(inputs, truth, np.stack([random_tree(rng, 16, 0.4)] * 2), interpret=False)
