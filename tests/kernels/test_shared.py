"""What the ops share: ancestor masks, the blocked inverse, the choice of an implementation, and lowering for a GPU."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels_pallas import (
    ancestor_mask,
    draft_attention,
    draft_expand,
    gdn_prefill,
    gdn_recover,
    gdn_verify,
    prefill_conv,
    stream_matmul,
    tree_conv,
)
from kernels_pallas.stream_matmul import Product
from kernels_pallas.unit_lower_inverse import unit_lower_inverse
from tests.kernels.oracle import random_tree


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def all_ops(nodes: int):
    """Each op with abstract arguments: 2 rows, 2 key heads, 4 value heads."""
    tokens = [spec(2, nodes, 2, 16), spec(2, nodes, 2, 16), spec(2, nodes, 4, 32), spec(2, nodes, 4), spec(2, nodes, 4)]
    parents, rows = spec(2, nodes, dtype="int32"), spec(2, dtype="int32")
    state = spec(2, 4, 16, 32)
    _, factors = jax.eval_shape(gdn_verify, *tokens, state, parents, rows)
    layers, all_factors = jax.tree.map(lambda x: spec(3, *x.shape, dtype=str(x.dtype)), (state, factors))
    channels = 2 * 2 * 16 + 4 * 32
    x, window, weight = spec(2, nodes, channels), spec(2, 3, channels), spec(4, channels)
    projected, heads = spec(2, nodes, channels + 2 * 4), spec(4)
    front = functools.partial(tree_conv, key_heads=2, dk=16, dtype="float32")
    level = min(nodes, 8)
    ring, drafts = spec(2, 64, 2, 64), spec(2, 3 * level, 2, 64)
    attend = functools.partial(draft_attention, num_heads=4, theta=1e4)

    def multiply(x, weights, **options):
        return stream_matmul(x, [Product(weights)], **options)

    hidden, path = spec(2, level, 16), (spec(2, level), spec(2, level, 3 * level, dtype="bool"))
    expand = functools.partial(draft_expand, branch=level)
    expanded = spec(2, level, 50), hidden, *path, spec(dtype="int32"), spec(), spec(60, 24), spec(24), spec(16)
    attended = (spec(2, level, 8 * 64), ring, ring, drafts, drafts, spec(2, level, 3 * level, dtype="bool"), rows)
    return {
        "gdn_verify": (gdn_verify, (*tokens, state, parents, rows)),
        "gdn_recover": (gdn_recover, (layers, all_factors, parents, rows)),
        "gdn_prefill": (gdn_prefill, (*tokens, state, rows)),
        "tree_conv": (front, (projected, window, weight, heads, heads, parents, rows)),
        "prefill_conv": (prefill_conv, (x, window, weight, rows)),
        "stream_matmul": (multiply, (spec(nodes, 64), spec(128, 64))),
        "draft_attention": (attend, (*attended, spec(dtype="int32"))),
        "draft_expand": (expand, expanded),
    }


OPS = tuple(all_ops(2))


@pytest.mark.parametrize("nodes", [1, 2, 7, 33, 64])
def test_ancestor_mask(nodes):
    rng = np.random.default_rng(nodes)
    parents = np.stack([random_tree(rng, nodes, bushiness) for bushiness in (0, 0.1, 0.5, 1)])
    num_nodes = np.array([nodes, nodes, nodes // 2, 0], np.int32)
    wanted = np.zeros((2, 4, nodes, nodes), bool)
    for whole in (0, 1):
        for b in range(4):
            for t in range(nodes if whole else num_nodes[b]):
                i = t
                while i >= 0:
                    wanted[whole, b, t, i] = True
                    i = parents[b, i]
    mask = jax.jit(ancestor_mask)
    np.testing.assert_array_equal(mask(parents, num_nodes), wanted[0])
    np.testing.assert_array_equal(mask(parents), wanted[1])


def test_ancestor_mask_of_a_broken_order():
    """A node that is its own parent, or comes before it, has none: there is no cycle to follow."""
    parents = np.array([[0, 2, 1, 1]], np.int32)
    wanted = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]], bool)
    np.testing.assert_array_equal(ancestor_mask(parents)[0], wanted)


@pytest.mark.parametrize(("shape", "message"), [((2, 65), "1 to 64 nodes"), ((2, 0), "1 to 64 nodes"), ((3,), "B, N")])
def test_ancestor_mask_refuses(shape, message):
    with pytest.raises(ValueError, match=message):
        ancestor_mask(np.full(shape, -1, np.int32))


@pytest.mark.parametrize("nodes", [1, 2, 8, 9, 31, 64, 100])
def test_unit_lower_inverse(nodes):
    """Rows of the delta rule's matrix for nearly equal keys: entries up to 2, for which powers of A reach 1e17."""
    rng = np.random.default_rng(nodes)
    lower = np.tril(rng.uniform(1.8, 2, (3, nodes, nodes)), -1).astype(np.float32)
    inverse = np.asarray(jax.jit(unit_lower_inverse)(lower), np.float64)
    wanted = np.linalg.inv(np.eye(nodes) + lower.astype(np.float64))
    np.testing.assert_allclose(inverse, wanted, atol=2e-5 * np.abs(wanted).max())
    assert not np.triu(inverse, 1).any()


@pytest.mark.parametrize("op", OPS)
def test_implementation_names(op):
    function, args = all_ops(2)[op]

    def shape(implementation):
        return jax.eval_shape(lambda *args: function(*args, implementation=implementation), *args)

    assert shape(None) == shape("reference")
    written = op in ("gdn_verify", "gdn_prefill", "stream_matmul")
    missing = "cannot run: it needs an NVIDIA GPU" if written else f"is not written for {op} yet: {op} has"
    with pytest.raises(ValueError, match=rf"'mosaic_gpu' (of {op} )?{missing}"):
        shape("mosaic_gpu")
    with pytest.raises(ValueError, match=r"'cuda' is unknown: .* has .*'reference'.*, or None"):
        shape("cuda")


def lowered_for_h100(function, args) -> str:
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text: str) -> set[str]:
    """What would cut an XLA command buffer, or leave the device."""
    return {name or other for name, other in re.findall(r"custom_call @(\w+)|(triangular_solve|infeed|outfeed)", text)}


@pytest.mark.parametrize("nodes", [1, 17])
@pytest.mark.parametrize("op", OPS)
def test_lowers_for_cuda_without_custom_calls(op, nodes):
    text = lowered_for_h100(*all_ops(nodes)[op])
    assert "stablehlo" in text
    assert not custom_calls(text)
    assert op == "gdn_prefill" or "stablehlo.while" not in text  # no loop over nodes


def test_custom_calls_are_noticed():
    def solve(a, b):
        return jax.scipy.linalg.solve_triangular(a, b, lower=True, unit_diagonal=True)

    assert custom_calls(lowered_for_h100(solve, (spec(8, 8), spec(8, 4))))
