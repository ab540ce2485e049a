"""The loops over products that ``bench_kernels.py`` times: each of a layer and the head alone, and a layer's four.

Every launch reads weights of its own, more of them together than a cache holds. What a launch makes is tied to what the
next one reads, so that they stay in order and no two become one.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from bench_loops import Setup, Shape, normal, uniform, zeros
from benching import Loop
from jax import lax

from kernels_pallas import stream_matmul
from kernels_pallas.stream_matmul import mosaic_gpu, pack, pack_gate_up
from kernels_pallas.stream_matmul.tiles import Tile, within

FAR_MORE = 2**28  # bytes, than a cache holds
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Product:
    """K columns, M features, and what stands around the product."""

    name: str
    depth: int
    features: int
    normed: bool = False
    residual: bool = False
    swiglu: bool = False

    @property
    def moved(self) -> int:
        """Bytes of the weights, without what fills them up."""
        return 2 * self.depth * self.features * (2 if self.swiglu else 1)

    @property
    def copies(self) -> int:
        """Matrices in a loop."""
        return max(2, min(24, -(-FAR_MORE // self.moved)))

    def weights(self, seed: Any) -> jax.Array:
        """Packed random weights."""
        if self.swiglu:
            gate, up = (0.02 * normal(seed + 500 * i, self.depth, self.features) for i in range(2))
            return pack_gate_up(gate, up)
        return pack(0.02 * normal(seed, self.depth, self.features))

    def scale(self) -> jax.Array | None:
        """Of the norm."""
        return uniform(11, self.depth, low=0.8, high=1.2) if self.normed else None

    def tiles(self) -> list[Tile]:
        """The candidates of --tune: those that ``within`` leaves as they are."""
        sizes = itertools.product((64, 128, 256), (1, 2, 3), (1, 2, 4, 8), (False, True))
        tiles = (
            Tile(depth=depth, programs=programs, split=split, stages=16, overlap=overlap)
            for depth, programs, split, overlap in sizes
        )
        return [tile for tile in tiles if tile == within(tile, self.depth, self.normed)]


def products(shape: Shape) -> dict[str, Product]:
    """Those of a layer, in order, and the head."""
    hidden, values = shape.hidden, shape.value_heads * shape.dv
    all_of = (
        Product(name="in", depth=hidden, features=shape.channels + values + 2 * shape.value_heads, normed=True),
        Product(name="o", depth=values, features=hidden, residual=True),
        Product(name="gate_up", depth=hidden, features=shape.mlp, normed=True, swiglu=True),
        Product(name="down", depth=shape.mlp, features=hidden, residual=True),
        Product(name="head", depth=hidden, features=shape.vocabulary, normed=True),
    )
    return {product.name: product for product in all_of}


def launcher(product: Product, implementation: Any, tile: Tile | None = None) -> Callable[..., jax.Array]:
    """``run(x, weights, scale, residual)``; with a ``tile``, the kernel as it is cut by that."""

    def run(x: jax.Array, weights: jax.Array, scale: jax.Array | None, residual: jax.Array | None) -> jax.Array:
        norm = None if scale is None else (scale, EPS)
        if tile is not None:
            return mosaic_gpu.stream_matmul(x, weights, norm, residual, product.swiglu, product.features, tile)
        options: dict[str, Any] = {"swiglu": product.swiglu, "features": product.features}
        return stream_matmul(x, weights, norm=norm, residual=residual, implementation=implementation, **options)

    return run


def product_loop(
    setup: Setup,
    product: Product,
    tokens: int,
    weights: Sequence[jax.Array],
    implementation: Any = None,
    tile: Tile | None = None,
) -> Loop:
    """A product with each of the ``weights``."""
    run = launcher(product, implementation, tile)
    residual = normal(13, tokens, product.features) if product.residual else None

    def step(carry: Any, fixed: Any) -> Any:
        x, made = carry[0], []
        weights, scale, residual = fixed
        for matrix in weights:
            x, out = lax.optimization_barrier((x, run(x, matrix, scale, residual)))
            made.append(out)
        # Always x, which no compiler can know.
        return jnp.where(made[-1][0, 0] > 1e30, 0, x).astype(x.dtype), made

    x = normal(12, tokens, product.depth)
    fixed = list(weights), product.scale(), residual
    blank = zeros(lambda: step((x,), fixed)[1])
    moved, launches = product.moved * len(weights), len(weights)
    return Loop(step, (x, blank), fixed, moved=moved, launches=launches, timing=setup.timing)


def layer_loop(setup: Setup, tokens: int, layers: Sequence[Sequence[jax.Array]], implementation: Any = None) -> Loop:
    """The four products of every layer; what stands between the first two is not there."""
    four = list(products(setup.shape).values())[:4]
    into, out_of, gate_up, down = (launcher(product, implementation) for product in four)

    def step(carry: Any, fixed: Any) -> Any:
        hidden, mixed, made = carry[0], carry[1], []
        layers, scale = fixed
        for matrices in layers:
            mixed, projected = lax.optimization_barrier((mixed, into(hidden, matrices[0], scale, None)))
            made.append(projected)
            hidden = out_of(mixed, matrices[1], None, hidden)
            wide = gate_up(hidden, matrices[2], scale, None)
            hidden = down(wide, matrices[3], None, hidden)
        return hidden, mixed, made

    hidden, mixed = normal(12, tokens, four[0].depth), normal(14, tokens, four[1].depth)
    fixed = [list(matrices) for matrices in layers], four[0].scale()
    blank = zeros(lambda: step((hidden, mixed), fixed)[2])
    moved = len(layers) * sum(product.moved for product in four)
    return Loop(step, (hidden, mixed, blank), fixed, moved=moved, launches=4 * len(layers), timing=setup.timing)


@functools.cache
def matrix(product: Product, i: int) -> jax.Array:
    """The ith random weights, kept: a layer's loop reads what the loops of its products read."""
    return jax.jit(product.weights)(i)
