"""The Triton version of ``tree_conv``: interpreted, lowered for a GPU, and on one."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import tree_conv
from kernels_pallas.tree_conv import reference, triton
from kernels_pallas.tree_conv.reference import MixerInputs
from kernels_pallas.tree_conv.tiles import TABLE, Tile, pick
from tests.kernels.lowering import TRITON_CALL, lower_for_cuda
from tests.kernels.test_tree_conv import Case

TABLED = {rule.tile for rules in TABLE.values() for rule in rules}
TILES = sorted(TABLED | {Tile(nodes=1, warps=1), Tile(nodes=4, warps=4)}, key=lambda tile: (tile.nodes, tile.warps))
REAL = {"rows": 1, "nodes": 16, "heads": 8, "value_heads": 8, "dk": 256, "dv": 256, "between": 2048}

CASES = {
    "one node": Case(nodes=1),
    "5 nodes, grouped heads, dk < dv": Case(nodes=5, max_beta=2.0),
    "16 nodes, dk > dv, 2 taps": Case(nodes=16, dk=32, dv=16, taps=2),
    "33 nodes, equal heads": Case(nodes=33, heads=1, value_heads=1, dk=32, dv=32, rows=2),
    "64 nodes, 5 taps": Case(nodes=64, heads=1, value_heads=2, taps=5, between=0),
    "an empty row, 3 taps": Case(nodes=6, rows=4, heads=1, value_heads=2, taps=3),
    "one layer of three": Case(nodes=7, layers=3),
    "no convolution": Case(nodes=6, taps=0),
    "one tap": Case(nodes=6, taps=1, layers=2),
}


def by_name(tile: Tile) -> str:
    return f"{tile.nodes} nodes, {tile.warps} warps"


def ulps_apart(result: MixerInputs, wanted: MixerInputs, ulps: float, rtol: float) -> None:
    """Asserts that two results are within ``ulps`` of bf16, or ``rtol`` where they are fp32; exact for ``inputs``."""
    for name, x, y in zip(result._fields, result, wanted):
        assert x.dtype == y.dtype
        tolerance = ulps * 2.0**-7 if x.dtype == jnp.bfloat16 else rtol
        tolerance, floor = (0, 0) if name == "inputs" else (tolerance, 1e-6)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, atol=floor, rtol=tolerance, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name, dtype):
    case = Case(**{**vars(CASES[name]), "dtype": dtype})
    arguments = case.arguments()
    result = jax.jit(partial(triton.tree_conv, **case.options, interpret=True))(*arguments)
    case.check(result, arguments)
    ulps_apart(result, jax.jit(partial(reference.tree_conv, **case.options))(*arguments), ulps=1, rtol=1e-6)


@pytest.mark.parametrize("tile", TILES, ids=by_name)
def test_every_tile_interpreted(tile):
    case = Case(nodes=11, rows=2, heads=1, value_heads=2, taps=4)
    arguments = case.arguments()
    case.check(jax.jit(partial(triton.tree_conv, **case.options, tile=tile, interpret=True))(*arguments), arguments)


def test_all_nodes_are_real_by_default():
    case = Case(rows=2, nodes=3, heads=1, value_heads=1)
    *arguments, num_nodes = case.arguments()
    assert (num_nodes == 3).all()
    case.check(triton.tree_conv(*arguments, None, **case.options, interpret=True), (*arguments, num_nodes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", TILES, ids=by_name)
@pytest.mark.parametrize("nodes", [16, 33])
def test_lowers_to_one_launch(nodes, tile, dtype):
    """And reads one layer of the window where it lies."""
    case = Case(**{**REAL, "nodes": nodes, "dtype": dtype, "layers": 2})
    text = lower_for_cuda(partial(triton.tree_conv, **case.options, tile=tile), *case.arguments())
    assert text.count(TRITON_CALL) == 1
    assert not re.search(r"\b(dynamic_)?slice\b", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_odd_shapes_lower(name, dtype):
    case = Case(**{**vars(CASES[name]), "dtype": dtype})
    assert TRITON_CALL in lower_for_cuda(partial(triton.tree_conv, **case.options), *case.arguments())


@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 33, 64])
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_tiles_are_no_larger_than_a_tree(rows, nodes):
    tile = pick(rows, nodes, on="NVIDIA H200")
    assert tile.nodes < 2 * nodes
    assert pick(rows, nodes, on="an unknown card") == tile


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tile", TILES, ids=by_name)
def test_every_tile_on_a_gpu(tile, rows, dtype):
    case = Case(**{**REAL, "rows": rows, "dtype": dtype, "layers": 2})
    arguments = [jnp.asarray(x) for x in case.arguments()]
    result = jax.jit(partial(triton.tree_conv, **case.options, tile=tile))(*arguments)
    ulps_apart(result, jax.jit(partial(reference.tree_conv, **case.options))(*arguments), ulps=2, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_odd_shapes_on_a_gpu(name, dtype):
    case = Case(**{**vars(CASES[name]), "dtype": dtype})
    arguments = [None if x is None else jnp.asarray(x) for x in case.arguments()]
    result = jax.jit(partial(tree_conv, **case.options, implementation="triton"))(*arguments)
    ulps_apart(result, jax.jit(partial(reference.tree_conv, **case.options))(*arguments), ulps=2, rtol=2e-6)
