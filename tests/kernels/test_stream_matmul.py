"""The streaming product: its Mosaic GPU kernel interpreted against float64, lowered, and on a GPU if there is one."""

import functools
import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import stream_matmul
from kernels_pallas.stream_matmul import mosaic_gpu, pack, pack_gate_up
from kernels_pallas.stream_matmul.tiles import TABLE, Tile, pick, within
from kernels_pallas.tiles import TUNED_ON
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.oracle import error

EPS = 0.1  # large, so that it shows
ON_CARD = 1e-5
needs_jax_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")


@dataclass(frozen=True)
class Product:
    """K columns, M features, and what stands around the product."""

    depth: int
    features: int
    normed: bool = False
    residual: bool = False
    swiglu: bool = False


# Of m-a-p/1.3B-100B-GatedDeltaNet-pure, and one whose depth two programs share.
LARGE = {
    "in": Product(2048, 8208, normed=True),
    "o": Product(2048, 2048, residual=True),
    "gate_up": Product(2048, 5632, normed=True, swiglu=True),
    "down": Product(5632, 2048, residual=True),
    "head": Product(2048, 32000, normed=True),
    "middle": Product(2048, 4096, residual=True),
}
SMALL = {
    "plain": Product(192, 136),
    "normed": Product(192, 72, normed=True),
    "residual": Product(192, 72, residual=True),
    "swiglu": Product(128, 64, normed=True, swiglu=True),
    "ragged_swiglu": Product(128, 40, swiglu=True),
}
TOKENS = (1, 5, 8, 13, 16, 24, 40, 64)
TINY = Tile(depth=64, stages=2)


@dataclass(frozen=True)
class Inputs:
    """x [N, K], the packed weights, scale [K] and residual [N, M] or None, and the outputs in float64."""

    x: jax.Array
    weights: jax.Array
    scale: jax.Array | None
    residual: jax.Array | None
    truth: np.ndarray

    def first(self, tokens: int) -> "Inputs":
        """The same for the first tokens alone."""
        residual = None if self.residual is None else self.residual[:tokens]
        return replace(self, x=self.x[:tokens], residual=residual, truth=self.truth[:tokens])


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def make(product: Product, tokens: int, *, dtype=jnp.bfloat16, exact: bool = False) -> Inputs:
    """Random inputs. The truth rounds what is multiplied as the kernel does; ``exact``: not at all."""
    rng = np.random.default_rng(product.depth + product.features)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    width = product.features * (2 if product.swiglu else 1)
    kernel = jnp.asarray(normal(product.depth, width) * product.depth**-0.5).astype(jnp.bfloat16)
    x = jnp.asarray(3 * normal(tokens, product.depth)).astype(dtype)
    scale = jnp.asarray(1 + 0.2 * normal(product.depth)) if product.normed else None
    residual = jnp.asarray(normal(tokens, product.features)).astype(jnp.bfloat16) if product.residual else None

    wide = np.asarray(x.astype(jnp.float32), np.float64)
    left = x if scale is None else x.astype(jnp.float32) * scale
    if not exact:
        left = left.astype(jnp.bfloat16)
    y = np.asarray(left.astype(jnp.float32), np.float64) @ np.asarray(kernel.astype(jnp.float32), np.float64)
    if product.normed:
        y = y / rms(wide)
    weights = pack(kernel)
    if product.swiglu:
        weights = pack_gate_up(*jnp.split(kernel, 2, axis=1))
        y = silu(y[:, : product.features]) * y[:, product.features :]
    if residual is not None:
        y = y + np.asarray(residual.astype(jnp.float32), np.float64)
    return Inputs(x, weights, scale, residual, y)


@functools.partial(jax.jit, static_argnames=("product", "tile", "interpret"))
def multiply(x, weights, scale, residual, *, product, tile=None, interpret=False):
    norm = None if scale is None else (scale, EPS)
    return mosaic_gpu.stream_matmul(
        x, weights, norm, residual, product.swiglu, product.features, tile=tile, interpret=interpret
    )


def run(inputs: Inputs, product: Product, tile: Tile | None = None, interpret: bool = True) -> np.ndarray:
    arrays = inputs.x, inputs.weights, inputs.scale, inputs.residual
    out = multiply(*arrays, product=product, tile=tile, interpret=interpret)
    assert out.dtype == (jnp.bfloat16 if product.residual or product.swiglu else jnp.float32)
    return np.asarray(out.astype(jnp.float32))


def check(out: np.ndarray, inputs: Inputs, product: Product, bound: float = 2e-6) -> None:
    """fp32 outputs miss what fp32 sums miss, more on tensor cores, which cut; the others are rounded to bf16."""
    assert out.shape == inputs.truth.shape
    assert error(out, inputs.truth) < (2.5e-3 if product.residual or product.swiglu else bound)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("tokens", [1, 13])
def test_reference_against_float64(name, tokens):
    """In bf16 the reference rounds what is behind the norm, the kernel what is before it: both miss as much."""
    product = SMALL[name]
    inputs = make(product, tokens, exact=True)
    norm = None if inputs.scale is None else (inputs.scale, EPS)
    options = {"norm": norm, "residual": inputs.residual, "swiglu": product.swiglu, "features": product.features}
    out = stream_matmul(inputs.x, inputs.weights, **options, implementation="reference")
    assert error(np.asarray(out.astype(jnp.float32)), inputs.truth) < 4e-3
    wide = dict(options, residual=None if inputs.residual is None else inputs.residual.astype(jnp.float32))
    out = stream_matmul(inputs.x, inputs.weights.astype(jnp.float32), **wide, implementation="reference")
    assert error(np.asarray(out), inputs.truth) < 1e-6


def test_packing_fills_up_whole_blocks():
    kernel = np.arange(64 * 40, dtype=np.float32).reshape(64, 40)
    weights = np.asarray(pack(kernel, jnp.float32))
    np.testing.assert_array_equal(weights[:40], kernel.T)
    assert weights.shape == (64, 64)
    assert not weights[40:].any()
    weights = np.asarray(pack_gate_up(kernel, -kernel, jnp.float32)).reshape(2, 2, 32, 64)
    np.testing.assert_array_equal(weights[:, 0].reshape(64, 64)[:40], kernel.T)
    np.testing.assert_array_equal(weights[:, 1], -weights[:, 0])
    assert pack(kernel).dtype == jnp.bfloat16


@needs_jax_0_11
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SMALL)
def test_against_float64(name, tokens):
    """Fewer stages than steps; a last block of a few features; tokens that fill no tile."""
    product = SMALL[name]
    inputs = make(product, tokens)
    check(run(inputs, product, TINY), inputs, product)


@needs_jax_0_11
@pytest.mark.parametrize("name", ["plain", "normed"])
def test_tokens_in_fp32(name):
    product = SMALL[name]
    inputs = make(product, 8, dtype=jnp.float32)
    check(run(inputs, product, TINY), inputs, product)


@needs_jax_0_11
@pytest.mark.parametrize(("split", "depth", "stages"), [(2, 64, 3), (2, 128, 2), (4, 64, 2), (8, 256, 8)])
def test_parts_of_the_depth(split, depth, stages):
    """Interpreted one after another; a tile too deep for a part is made shallower."""
    product = Product(512, 72, residual=True)
    inputs = make(product, 5)
    check(run(inputs, product, Tile(depth=depth, stages=stages, split=split)), inputs, product)


@needs_jax_0_11
@pytest.mark.parametrize("split", [1, 2, 4])
def test_the_order_of_the_sums(split):
    """Step by step, then part by part, to the bit, for any number of tokens: within a step nothing is rounded here."""
    rng = np.random.default_rng(split)
    product, tile = Product(512, 64), Tile(depth=64, stages=2, split=split)
    steps = 2.0 ** np.repeat(rng.permutation(8) * 4, 64)
    x = rng.integers(-8, 9, (64, 512)) * steps
    kernel = rng.integers(-8, 9, (512, 64)).astype(np.float64)
    wanted = np.zeros((split, 64, 64), np.float32)
    for step in range(8):
        columns = slice(64 * step, 64 * step + 64)
        wanted[step * split // 8] += (x[:, columns] @ kernel[columns]).astype(np.float32)
    total = functools.reduce(np.add, wanted)
    assert (total != x @ kernel).mean() > 0.5
    inputs = Inputs(jnp.asarray(x, jnp.bfloat16), pack(jnp.asarray(kernel)), None, None, total)
    for tokens in (1, 8, 13, 64):
        np.testing.assert_array_equal(run(inputs.first(tokens), product, tile), total[:tokens])


@pytest.mark.parametrize("depth", [512, 1984, 2048, 5632])
@pytest.mark.parametrize("normed", [False, True])
def test_the_order_of_the_sums_does_not_depend_on_the_tokens(depth, normed):
    for blocks in (1, 32, 33, 34, 66, 67, 129, 132, 133, 500):
        splits = {pick(tokens, 64 * blocks, depth, normed, on=TUNED_ON).split for tokens in range(1, 65)}
        assert len(splits) == 1
        assert not normed or splits == {1}


def test_large_products_take_every_tile_of_the_table():
    taken = {
        pick(tokens, inputs_rows(product), product.depth, product.normed, on=TUNED_ON)
        for product in LARGE.values()
        for tokens in TOKENS
    }
    assert taken == {rule.tile for rule in TABLE[TUNED_ON]}


def inputs_rows(product: Product) -> int:
    """Rows of the packed weights."""
    return -(-product.features // 64) * 64 if not product.swiglu else 2 * -(-product.features // 32) * 32


@needs_jax_0_11
@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 32, 40, 64])
@pytest.mark.parametrize("name", LARGE)
def test_lowers(name, tokens):
    """One launch and nothing beside it: no padding, no slice, no transpose."""
    check_lowers(LARGE[name], tokens, None)


@needs_jax_0_11
@pytest.mark.parametrize("name", LARGE)
def test_lowers_overlapping(name):
    product = LARGE[name]
    tile = pick(16, inputs_rows(product), product.depth, product.normed)
    check_lowers(product, 16, replace(tile, overlap=True))


def check_lowers(product: Product, tokens: int, tile: Tile | None) -> None:
    narrow, wide = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
    text = lower_for_cuda(
        functools.partial(multiply, product=product, tile=tile),
        narrow((tokens, product.depth)),
        narrow((inputs_rows(product), product.depth)),
        wide((product.depth,)) if product.normed else None,
        narrow((tokens, product.features)) if product.residual else None,
    )
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo" not in text.replace("stablehlo.custom_call", "")


@needs_jax_0_11
def test_stages_are_what_fits():
    product = LARGE["gate_up"]
    plan = mosaic_gpu.Plan(
        **{"tokens": 16, "depth": product.depth, "x_dtype": jnp.dtype(jnp.bfloat16), "eps": EPS, "swiglu": True},
        **{"features": product.features, "residual": None, "tile": Tile(stages=32, programs=2)},
    )
    fitted = mosaic_gpu.fitted(plan)
    room = 228 * 1024 // 2 - 1024
    deeper = replace(fitted, tile=replace(fitted.tile, stages=fitted.tile.stages + 1))
    assert mosaic_gpu.shared_bytes(fitted) <= room < mosaic_gpu.shared_bytes(deeper)
    assert mosaic_gpu.fitted(replace(plan, depth=384)).tile.stages == 3
    assert mosaic_gpu.fitted(replace(plan, depth=128)).tile.stages == 1


@needs_jax_0_11
def test_a_tile_too_large_is_refused_before_it_is_compiled():
    product = Product(512, 64, normed=True)
    inputs = make(product, 64, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"tile of stream_matmul must fit 232448 bytes .*depth=256.* use less depth"):
        run(inputs, product, Tile(depth=256))


@needs_jax_0_11
def test_what_is_unsupported():
    assert mosaic_gpu.unsupported(jnp.bfloat16, 8, 128, 64) is None
    product = SMALL["plain"]
    inputs = make(product, 8)
    with pytest.raises(ValueError, match="weights must be bfloat16, got float32"):
        run(replace(inputs, weights=inputs.weights.astype(jnp.float32)), product)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="of older versions")
def test_an_older_jax_is_told_so():
    assert "jax 0.11" in mosaic_gpu.unsupported(jnp.bfloat16, 8, 128, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 96}, "depth must be one of"),
        ({"stages": 0}, "stages must be 1 to 32, got 0"),
        ({"split": 3}, "split must be one of"),
        ({"programs": 5}, "programs must be one of"),
    ],
)
def test_tiles_check_themselves(options, message):
    with pytest.raises(ValueError, match=message):
        Tile(**options)


def test_a_tile_is_cut_to_what_divides_the_depth():
    assert within(Tile(depth=256, split=8), 2048, False) == Tile(depth=256, split=8)
    assert within(Tile(depth=256, split=8), 5632, False) == Tile(depth=64, split=8)
    assert within(Tile(depth=128, split=4), 192, False) == Tile(depth=64, split=1)
    assert within(Tile(depth=128, split=4), 2048, True) == Tile(depth=128, split=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (0, 128)}, "x must hold 1 token or more, got 0"),
        ({"x": (128,)}, "x must be [N, K]"),
        ({"weights": (72, 128)}, "weights must be packed, with a multiple of 64 rows, got 72"),
        ({"weights": (64, 192)}, "weights must be [P, K] = [64, 128], got [64, 192]"),
        ({"features": 65}, "features must be 1 to 64, got 65"),
        ({"features": 40, "swiglu": True}, "features must be 1 to 32, got 40"),
        ({"norm": (64,)}, "norm[0] must be [K] = [128], got [64]"),
        ({"residual": (8, 32)}, "residual must be [N, M] = [8, 64], got [8, 32]"),
        ({"residual": (8, 32), "swiglu": True}, "residual must be None with swiglu"),
        ({"dtype": "float16"}, "x must be bfloat16 or float32, got float16"),
        ({"implementation": "triton"}, "implementation 'triton' is not written for stream_matmul yet"),
    ],
)
def test_errors_name_the_argument(changes, message):
    def spec(name: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(changes.get(name, shape), changes.get("dtype", "bfloat16"))

    options = {name: changes[name] for name in ("features", "swiglu", "implementation") if name in changes}
    arrays = {name: spec(name) for name in ("norm", "residual") if name in changes}

    def op(x, weights, norm=None, **arrays):
        return stream_matmul(x, weights, norm=None if norm is None else (norm, EPS), **arrays, **options)

    with pytest.raises(ValueError) as raised:
        jax.eval_shape(op, spec("x", 8, 128), spec("weights", 64, 128), **arrays)
    assert message in str(raised.value)


@needs_jax_0_11
@pytest.mark.parametrize(
    ("tokens", "depth", "features", "message"),
    [(65, 128, 64, "at most 64 tokens, got 65"), (8, 96, 64, "64 columns, got 96"), (8, 128, 60, "of 8, got 60")],
)
def test_what_the_kernel_cannot_take_is_said(tokens, depth, features, message):
    with pytest.raises(ValueError, match=message):
        mosaic_gpu.stream_matmul(
            *(jnp.zeros((tokens, depth), jnp.bfloat16), jnp.zeros((64, depth), jnp.bfloat16)),
            *(None, None, False, features),
        )
    assert stream_matmul(jnp.zeros((tokens, depth)), jnp.zeros((64, depth)), features=features).shape[1] == features


def test_up_must_look_like_gate():
    with pytest.raises(ValueError, match=r"up must have the shape of gate, \[64, 32\], got \[64, 40\]"):
        pack_gate_up(jnp.zeros((64, 32)), jnp.zeros((64, 40)))


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("name", LARGE)
def test_large_products_on_a_gpu(name):
    """Against float64; the same bits in every run, and for a token beside any number of others."""
    product = LARGE[name]
    inputs = make(product, 64)
    whole = run(inputs, product, interpret=False)
    check(whole, inputs, product, ON_CARD)
    for tokens in (1, 8, 13, 16, 32):
        part = inputs.first(tokens)
        first, second = (run(part, product, interpret=False) for _ in range(2))
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, whole[:tokens])


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("name", SMALL)
def test_small_products_on_a_gpu(name):
    product = SMALL[name]
    for tokens, dtype in itertools.product((5, 16, 64), (jnp.bfloat16, jnp.float32)):
        inputs = make(product, tokens, dtype=dtype)
        check(run(inputs, product, TINY, interpret=False), inputs, product, ON_CARD)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("depth", [64, 128, 256])
def test_other_tiles_on_a_gpu(split, depth):
    """The candidates that are timed."""
    product = Product(2048, 1096, residual=True)
    inputs = make(product, 16)
    for programs in (1, 2):
        check(run(inputs, product, Tile(depth=depth, split=split, programs=programs), False), inputs, product)


@pytest.mark.gpu
@needs_jax_0_11
def test_overlapping_launches_on_a_gpu():
    """Each reads what the one before has just written: the same bits as one after the other."""
    up, down = Product(2048, 5632, normed=True, swiglu=True), Product(5632, 2048, residual=True)
    one, other = make(up, 16), make(down, 16)

    @functools.partial(jax.jit, static_argnames="overlap")
    def chained(h, scale, wide_weights, narrow_weights, overlap: bool):
        for _ in range(16):
            tiles = (replace(pick(16, inputs_rows(p), p.depth, p.normed), overlap=overlap) for p in (up, down))
            wide = multiply(h, wide_weights, scale, None, product=up, tile=next(tiles))
            h = multiply(wide, narrow_weights, None, h, product=down, tile=next(tiles))
        return h.astype(jnp.float32)

    arrays = one.x, one.scale, one.weights, other.weights
    expected = np.asarray(chained(*arrays, overlap=False))
    assert np.isfinite(expected).all()
    for _ in range(8):
        np.testing.assert_array_equal(chained(*arrays, overlap=True), expected)


@pytest.mark.gpu
@needs_jax_0_11
def test_the_kernel_by_name_on_a_gpu():
    """It agrees with the reference but for roundings."""
    product = LARGE["in"]
    inputs = make(product, 16)
    run_as = functools.partial(stream_matmul, inputs.x, inputs.weights, norm=(inputs.scale, EPS), features=8208)
    ours, plain = (np.asarray(run_as(implementation=name)) for name in ("mosaic_gpu", "reference"))
    assert error(ours, plain.astype(np.float64)) < 4e-3
