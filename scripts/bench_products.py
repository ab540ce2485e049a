"""The loops over products that ``bench_kernels.py`` times: each of a layer and the head alone, and a layer's at once.

Every launch reads weights of its own, more of them together than a cache holds. What a launch makes is tied to what the
next one reads, so that they stay in order and no two become one. Tokens are filled up to a multiple of 8 rows, as the
kernel takes them; the plain version multiplies all rows.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from bench_loops import Setup, Shape, normal, zeros
from benching import Loop
from jax import lax

from kernels_pallas import stream_matmul
from kernels_pallas.stream_matmul import Product, fill_up, no_arrivals, pack, pack_gate_up
from kernels_pallas.stream_matmul.reference import Ends

FAR_MORE = 2**28  # bytes, than a cache holds
EPS = 1e-6
CHAIN = "o", "gate_up", "down", "in"  # a launch of a layer; "in" is of the layer after it


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """K columns, M features, and what stands around the product."""

    depth: int
    features: int
    ends: Ends = "plain"
    normed: bool = False

    @property
    def moved(self) -> int:
        """Bytes of the weights, without what fills them up."""
        return 2 * self.depth * self.features * (2 if self.ends == "swiglu" else 1)

    @property
    def copies(self) -> int:
        """Matrices in a loop."""
        return max(2, min(24, -(-FAR_MORE // self.moved)))

    def random(self, seed: Any) -> jax.Array:
        """Packed random weights."""
        if self.ends == "swiglu":
            gate, up = (0.02 * normal(seed + 500 * i, self.depth, self.features) for i in range(2))
            return pack_gate_up(gate, up)
        return pack(0.02 * normal(seed, self.depth, self.features))

    def product(self, weights: jax.Array) -> Product:
        """With packed weights."""
        return Product(weights, self.ends, self.normed, self.features)


def matrices(shape: Shape) -> dict[str, Matrix]:
    """Those of a layer, in order, and the head."""
    hidden, values = shape.hidden, shape.value_heads * shape.dv
    return {
        "in": Matrix(depth=hidden, features=shape.channels + values + 2 * shape.value_heads, normed=True),
        "o": Matrix(depth=values, features=hidden, ends="residual"),
        "gate_up": Matrix(depth=hidden, features=shape.mlp, ends="swiglu", normed=True),
        "down": Matrix(depth=shape.mlp, features=hidden, ends="residual"),
        "head": Matrix(depth=hidden, features=shape.vocabulary, normed=True),
    }


@functools.cache
def packed(matrix: Matrix, i: int) -> jax.Array:
    """The ith random weights, kept: a layer's loop reads what the loops of its products read."""
    return jax.jit(matrix.random)(i)


def chains(shape: Shape) -> list[list[jax.Array]]:
    """The weights of every layer's launch; after the last layer comes the first one again."""
    named = matrices(shape)
    return [[packed(named[name], (i + (name == "in")) % shape.layers) for name in CHAIN] for i in range(shape.layers)]


def filled(tokens: int) -> int:
    """Rows of that many tokens."""
    return -(-tokens // 8) * 8


def product_loop(setup: Setup, matrix: Matrix, tokens: int, implementation: Any = None) -> Loop:
    """A product with each of its matrices, a launch each."""
    rows = filled(tokens)
    run = functools.partial(stream_matmul, tokens=tokens, eps=EPS, implementation=implementation)

    def step(carry: Any, fixed: Any) -> Any:
        x, made = carry[0], []
        every, residual = fixed
        for weights in every:
            x, (out,) = lax.optimization_barrier((x, run(x, [matrix.product(weights)], residual=residual)))
            made.append(out)
        # Always x, which no compiler can know.
        return jnp.where(made[-1][0, 0] > 1e30, 0, x).astype(x.dtype), made

    x = normal(12, rows, matrix.depth)
    residual = normal(13, rows, matrix.features) if matrix.ends == "residual" else None
    fixed = [packed(matrix, i) for i in range(matrix.copies)], residual
    blank = zeros(lambda: step((x,), fixed)[1])
    moved, launches = matrix.moved * matrix.copies, matrix.copies
    return Loop(step, (x, blank), fixed, moved=moved, launches=launches, timing=setup.timing)


def layer_loop(setup: Setup, tokens: int, implementation: Any = None) -> Loop:
    """The four products of every layer, from what the mixer made on: o, gate_up, down, and in of the layer after it.

    A layer is one launch, and a small one of XLA's, which is timed with it: where a model has its mixer, the first
    features of the projection are cast and filled up to the rows, as x of the launch after. The counters of all
    launches are zeroed once a step.
    """
    named = matrices(setup.shape)
    chain, rows = [named[name] for name in CHAIN], filled(tokens)
    run = functools.partial(stream_matmul, tokens=tokens, eps=EPS, implementation=implementation)

    def step(carry: Any, fixed: Any) -> Any:
        mixed, hidden, made = carry[0], carry[1], []
        arrivals = no_arrivals(len(fixed))
        for i, layer in enumerate(fixed):
            products = [matrix.product(weights) for matrix, weights in zip(chain, layer, strict=True)]
            *_, hidden, projected = run(mixed, products, residual=hidden, arrivals=(arrivals, i))
            made.append(projected)
            mixed = fill_up(projected[:, : mixed.shape[1]].astype(mixed.dtype))
        return mixed, hidden, made

    mixed, hidden = normal(14, rows, named["o"].depth), normal(12, rows, setup.shape.hidden)
    fixed = chains(setup.shape)
    blank = zeros(lambda: step((mixed, hidden), fixed)[2])
    moved = len(fixed) * sum(matrix.moved for matrix in chain)
    return Loop(step, (mixed, hidden, blank), fixed, moved=moved, launches=2 * len(fixed), timing=setup.timing)
