"""The streaming products: the Mosaic GPU kernel interpreted against float64, lowered, and on a GPU if there is one."""

import functools
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic, stream_matmul
from kernels_pallas.stream_matmul import Product, fill_up, mosaic_gpu, pack, pack_gate_up, pack_rows
from kernels_pallas.stream_matmul.mosaic_gpu import COMPILER, COUNTERS, ROOM, make_plan, no_arrivals
from tests.kernels.lowering import beside_kernels, lower_for_cuda
from tests.kernels.oracle import error

EPS = 0.1  # large, so that it shows
ON_CARD = 1e-5
needs_jax_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11")


@dataclass(frozen=True)
class Kind:
    """K columns, M features, and what stands around the product."""

    depth: int
    features: int
    ends: str = "plain"
    normed: bool = False

    @property
    def packed(self) -> int:
        """Rows of the packed weights."""
        return 2 * -(-self.features // 32) * 32 if self.ends == "swiglu" else -(-self.features // 64) * 64

    def of(self, weights) -> Product:
        return Product(weights, self.ends, self.normed, self.features)


# Of m-a-p/1.3B-100B-GatedDeltaNet-pure and its drafter.
O, GATE_UP = Kind(2048, 2048, "residual"), Kind(2048, 5632, "swiglu", True)
DOWN, IN = Kind(5632, 2048, "residual"), Kind(2048, 8208, normed=True)
LAYER = O, GATE_UP, DOWN, IN
LARGE = {
    **{"o": (O,), "gate_up": (GATE_UP,), "down": (DOWN,), "in": (IN,)},
    "head": (Kind(2048, 32000, normed=True),),
    "features": (Kind(6144, 2048),),
    "layer": LAYER,
}
# Blocks for less than one, one, and several rounds of two pairs; one to three steps; last blocks of 8 features.
SMALL = {
    "idle": (Kind(1024, 64),),
    "plain": (Kind(1024, 136),),
    "normed": (Kind(512, 264, normed=True),),
    "residual": (Kind(1024, 256, "residual"),),
    "residual_normed": (Kind(512, 128, "residual", True),),
    "swiglu": (Kind(1536, 64, "swiglu"),),
    "swiglu_normed": (Kind(1024, 160, "swiglu", True),),
}
CHAINS = {
    "small_layer": (
        Kind(1024, 512, "residual"),
        Kind(512, 512, "swiglu", True),
        Kind(512, 512, "residual"),
        Kind(512, 264, normed=True),
    ),
    "residuals": (*(Kind(512, 512, "residual", i > 0) for i in range(3)), Kind(512, 72)),
}
# Tokens and rows, the last of which may be padding.
TOKENS = ((1, 8), (13, 16), (33, 40), (40, 64), (64, 64))
RAGGED = {
    "plain": (Kind(192, 136),),
    "normed": (Kind(192, 72, normed=True),),
    "residual": (Kind(192, 72, "residual"),),
    "residual_normed": (Kind(128, 72, "residual", True),),
    "swiglu": (Kind(128, 40, "swiglu"),),
    "swiglu_normed": (Kind(128, 64, "swiglu", True),),
    "chain": (
        Kind(64, 72, "residual"),
        Kind(72, 40, "swiglu", True),
        Kind(40, 72, "residual"),
        Kind(72, 20, "plain", True),
    ),
}


@dataclass(frozen=True)
class Inputs:
    """x and the first residual, or None, of T rows; packed weights.

    ``kernels``: [K, M], for SwiGLU [K, 2 M], with the scale of the norm, which is not rounded.
    """

    kinds: tuple[Kind, ...]
    tokens: int
    x: jax.Array
    residual: jax.Array | None
    weights: tuple[jax.Array, ...]
    kernels: tuple[np.ndarray, ...]

    @property
    def products(self) -> list[Product]:
        return [kind.of(weights) for kind, weights in zip(self.kinds, self.weights, strict=True)]

    @property
    def options(self) -> dict[str, Any]:
        """Of the op."""
        return {"tokens": self.tokens, "residual": self.residual, "eps": EPS}

    def first(self, tokens: int) -> "Inputs":
        """The same for the first tokens alone, in as few rows as there may be."""
        rows = filled(tokens)
        residual = None if self.residual is None else self.residual[:rows]
        return replace(self, tokens=tokens, x=self.x[:rows], residual=residual)


def filled(tokens: int) -> int:
    """Rows for these tokens."""
    return -(-tokens // 8) * 8


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def make(
    kinds: Sequence[Kind],
    tokens: int,
    rows: int | None = None,
    *,
    dtype=jnp.bfloat16,
    tokens_dtype=jnp.bfloat16,
) -> Inputs:
    """Random inputs, the weights in ``dtype``; x and the residual in ``tokens_dtype``."""
    rng = np.random.default_rng([number for kind in kinds for number in (kind.depth, kind.features)])
    rows = filled(tokens) if rows is None else rows

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    x = jnp.asarray(3 * normal(rows, kinds[0].depth)).astype(tokens_dtype)
    widths = [kind.features for kind in kinds if kind.ends == "residual"]
    residual = jnp.asarray(normal(rows, widths[0])).astype(tokens_dtype) if widths else None
    weights, kernels = [], []
    for kind in kinds:
        kernel = normal(kind.depth, kind.features * (2 if kind.ends == "swiglu" else 1)) * kind.depth**-0.5
        scale = 1 + 0.2 * normal(kind.depth) if kind.normed else None
        parts = jnp.split(jnp.asarray(kernel), 2, axis=1) if kind.ends == "swiglu" else [jnp.asarray(kernel)]
        packing = pack_gate_up if kind.ends == "swiglu" else pack
        weights.append(packing(*parts, dtype, None if scale is None else jnp.asarray(scale)))
        kernels.append(kernel if scale is None else kernel * scale[:, None])
    return Inputs(tuple(kinds), tokens, x, residual, tuple(weights), tuple(kernels))


def truth(inputs: Inputs, outs: Sequence[np.ndarray], dtype=jnp.bfloat16) -> Iterator[np.ndarray]:
    """The tokens of each output in float64, from what came out before it: errors do not add up.

    Operands are rounded to ``dtype``.
    """
    x, h = np.asarray(inputs.x[: inputs.tokens]), inputs.residual
    for kind, kernel, out in zip(inputs.kinds, inputs.kernels, outs, strict=True):
        y = wide(x.astype(dtype)) @ wide(kernel.astype(dtype))
        if kind.normed:
            y = y / rms(wide(x))
        if kind.ends == "swiglu":
            y = silu(y[:, : kind.features]) * y[:, kind.features :]
        if kind.ends == "residual":
            y, h = y + wide(h[: inputs.tokens]), out
        yield y
        x = np.asarray(out[: inputs.tokens])


def check_shapes(outs: Sequence[Any], inputs: Inputs, dtype=jnp.bfloat16) -> None:
    for kind, out in zip(inputs.kinds, outs, strict=True):
        plain = kind.ends == "plain"
        assert out.shape == (inputs.tokens if plain else inputs.x.shape[0], kind.features)
        assert out.dtype == (jnp.float32 if plain else dtype)


@functools.partial(jax.jit, static_argnames=("kinds", "tokens", "programs", "slots", "interpret"))
def launch(x, residual, weights, *, kinds, tokens, programs=None, slots=None, interpret=False):
    inputs = Inputs(kinds, tokens, x, residual, weights, ())
    tiles = {"programs": programs, "slots": slots, "interpret": interpret}
    return mosaic_gpu.stream_matmul(x, inputs.products, **inputs.options, **tiles)


def run(inputs: Inputs, **options: Any) -> list[np.ndarray]:
    """On a GPU."""
    arrays = inputs.x, inputs.residual, inputs.weights
    outs = launch(*arrays, kinds=inputs.kinds, tokens=inputs.tokens, **options)
    return [np.asarray(out) for out in outs]


def interpreted(inputs: Inputs, *, programs=4, slots=2) -> list[np.ndarray]:
    """By one program after another, with as many blocks as a pair has."""
    return run(inputs, programs=programs, slots=slots, interpret=True)


def check(outs: Sequence[np.ndarray], inputs: Inputs, bound: float = 2e-6) -> None:
    """fp32 outputs miss what fp32 sums miss, more on tensor cores, which cut; the others are rounded to bf16."""
    check_shapes(outs, inputs)
    for out, wanted in zip(outs, truth(inputs, outs), strict=True):
        assert error(out[: inputs.tokens], wanted) < (bound if out.dtype == jnp.float32 else 2e-3)


def same(outs: Sequence[np.ndarray], others: Sequence[np.ndarray], tokens: int) -> None:
    """The same bits for the first tokens."""
    for out, other in zip(outs, others, strict=True):
        np.testing.assert_array_equal(wide(out[:tokens]), wide(other[:tokens]))


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (5, 13)])
def test_reference_against_float64(name, tokens, rows):
    """In bf16 it misses what rounding of weights, with the scale in them, and outputs misses."""
    for dtype, bound in ((jnp.bfloat16, 4e-3), (jnp.float32, 1e-6)):
        inputs = make(RAGGED[name], tokens, rows, dtype=dtype, tokens_dtype=dtype)
        outs = stream_matmul(inputs.x, inputs.products, **inputs.options, implementation="reference")
        check_shapes(outs, inputs, dtype)
        for out, wanted in zip(outs, truth(inputs, outs, jnp.float32), strict=True):
            assert error(out[:tokens], wanted) < bound


@pytest.mark.parametrize("ends", ["residual", "swiglu"])
def test_reference_with_tokens_and_weights_in_different_dtypes(ends):
    """Operands are rounded to the dtype of the weights, but not the x whose squares are summed, nor the residual."""
    for dtype, tokens_dtype in itertools.permutations((jnp.bfloat16, jnp.float32)):
        inputs = make([Kind(192, 72, ends, True)], 8, dtype=dtype, tokens_dtype=tokens_dtype)
        (out,) = stream_matmul(inputs.x, inputs.products, **inputs.options, implementation="reference")
        assert out.dtype == (tokens_dtype if ends == "residual" else dtype)
        (wanted,) = truth(inputs, [out], dtype)
        assert error(out, wanted) < (1e-6 if out.dtype == jnp.float32 else 2e-3)


def test_what_is_left_out():
    """All rows of x are tokens, all rows of weights features."""
    weights = jnp.ones((128, 64))
    for ends, width in (("plain", 128), ("swiglu", 64)):
        (out,) = stream_matmul(jnp.ones((3, 64)), [Product(weights, ends)], implementation="reference")
        assert out.shape == (3, width) == (3, Product(weights, ends).width)


def test_packing_fills_up_whole_blocks():
    kernel = np.arange(1, 64 * 40 + 1, dtype=np.float32).reshape(64, 40)
    weights = np.asarray(pack(kernel, jnp.float32))
    np.testing.assert_array_equal(weights[:40], kernel.T)
    assert weights.shape == (64, 64)
    assert not weights[40:].any()
    np.testing.assert_array_equal(pack_rows(jnp.asarray(kernel.T), jnp.float32), weights)
    weights = np.asarray(pack_gate_up(kernel, -kernel, jnp.float32)).reshape(2, 2, 32, 64)
    np.testing.assert_array_equal(weights[:, 0].reshape(64, 64)[:40], kernel.T)
    assert not weights[1, :, 8:].any()
    np.testing.assert_array_equal(weights[:, 1], -weights[:, 0])
    assert pack(kernel).dtype == pack_gate_up(kernel, kernel).dtype == jnp.bfloat16
    assert pack(kernel[:, :0]).shape == (0, 64)
    assert pack(np.ones((64, 128), np.float32)).shape == pack_gate_up(*np.ones((2, 64, 64), np.float32)).shape


def test_the_scale_is_in_the_weights_before_they_are_rounded():
    """Whether the kernel comes in bf16 or fp32: one rounding, which two would often miss."""
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.5, 2, 64).astype(np.float32)
    for dtype in (jnp.bfloat16, jnp.float32):
        gate, up = rng.standard_normal((2, 64, 64), np.float32).astype(dtype)
        wanted, others = ((part.astype(np.float32).T * scale).astype(jnp.bfloat16) for part in (gate, up))
        twice = (gate.T.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)).astype(jnp.bfloat16)
        assert (twice != wanted).mean() > 0.1
        np.testing.assert_array_equal(wide(pack(jnp.asarray(gate), scale=jnp.asarray(scale))), wide(wanted))
        np.testing.assert_array_equal(wide(pack_rows(jnp.asarray(gate.T), scale=jnp.asarray(scale))), wide(wanted))
        both = pack_gate_up(jnp.asarray(gate), jnp.asarray(up), scale=jnp.asarray(scale)).reshape(2, 2, 32, 64)
        np.testing.assert_array_equal(wide(both[:, 0].reshape(64, 64)), wide(wanted))
        np.testing.assert_array_equal(wide(both[:, 1].reshape(64, 64)), wide(others))


def test_up_must_look_like_gate():
    with pytest.raises(ValueError, match=r"up must have the shape of gate, \[64, 32\], got \[64, 40\]"):
        pack_gate_up(jnp.zeros((64, 32)), jnp.zeros((64, 40)))


@needs_jax_0_11
@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (13, 16), (64, 64)])
@pytest.mark.parametrize("name", SMALL)
def test_against_float64(name, tokens, rows):
    """Fewer slots than steps, idle programs, several blocks a program, a last one of a few features, rows left over."""
    inputs = make(SMALL[name], tokens, rows)
    check(interpreted(inputs), inputs)


@needs_jax_0_11
@pytest.mark.parametrize(("name", "tokens", "rows"), [("small_layer", 5, 8), ("residuals", 33, 40)])
def test_chains_against_float64(name, tokens, rows):
    """Each product starts with the program that follows on the last one of the product before."""
    inputs = make(CHAINS[name], tokens, rows)
    check(interpreted(inputs), inputs)


@needs_jax_0_11
def test_rows_beyond_the_tokens_do_not_show():
    inputs = make(SMALL["residual_normed"], 13)
    beyond = jnp.arange(16)[:, None] >= 13
    other = replace(inputs, x=jnp.where(beyond, np.nan, inputs.x), residual=jnp.where(beyond, np.inf, inputs.residual))
    same(interpreted(other), interpreted(inputs), 13)


@needs_jax_0_11
@pytest.mark.parametrize(
    ("kind", "slots"), [(Kind(512, 160, "swiglu", True), (1, 2)), (Kind(1024, 136), (2, 3, 9, None))]
)
def test_any_number_of_slots(kind, slots):
    """One, where a block is one step; as many as a program has steps, and more."""
    inputs = make([kind], 8)
    outs = [interpreted(inputs, programs=4, slots=number) for number in slots]
    check(outs[0], inputs)
    for other in outs[1:]:
        same(other, outs[0], 8)


@needs_jax_0_11
def test_any_number_of_programs():
    inputs = make(SMALL["swiglu_normed"], 8)
    outs = [interpreted(inputs, programs=number) for number in (1, 4, 14)]
    check(outs[0], inputs)
    for other in outs[1:]:
        same(other, outs[0], 8)


@needs_jax_0_11
@pytest.mark.parametrize("tokens", [1, 8, 13, 64])
def test_the_order_of_the_sums(tokens):
    """Step by step of either half, to the bit, for any number of tokens: in 256 columns nothing is rounded here.

    Half of them are zeros, as many tokens take half a step.
    """
    rng = np.random.default_rng(0)
    steps = 2.0 ** np.repeat(rng.permutation(8) * 3, 256)
    x = rng.integers(-64, 65, (64, 2048)) * steps * (np.arange(2048) % 256 < 128)
    kernel = rng.integers(-64, 65, (2048, 64)).astype(np.float64)
    parts = [(x[:, k : k + 256] @ kernel[k : k + 256]).astype(np.float32) for k in range(0, 2048, 256)]
    wanted = sum(parts[:4]) + sum(parts[4:])
    for other in (sum(parts), sum(parts[3::-1]) + sum(parts[:3:-1]), sum(parts[::2]) + sum(parts[1::2])):
        assert (wanted != other).mean() > 0.2
    arrays = jnp.asarray(x, jnp.bfloat16), None, (pack(jnp.asarray(kernel)),)
    inputs = Inputs((Kind(2048, 64),), 64, *arrays, ())
    (out,) = interpreted(inputs.first(tokens), programs=2, slots=3)
    np.testing.assert_array_equal(out, wanted[:tokens])


def as_on_a_card(detect_races: bool) -> None:
    """Interprets a pair of programs, all six warpgroups at a time, and the next pair after it.

    As nothing else runs beside a pair, the counters are plain numbers. To be run in a process of its own, for what it
    changes, and where XLA has threads enough for six that wait.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory

    interpreter = jaxpr_interpret.JaxprInterpreter
    kernel, get, deallocate = plgpu.kernel, interpreter._interpret_get_p, shared_memory.Barrier.deallocate
    params = plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="zero")

    def wait_for(counter, count: int) -> None:
        jax.lax.while_loop(lambda seen: seen < count, lambda _: counter[...], counter[...])

    def arrive(counter) -> None:
        counter[...] = counter[...] + 1

    def load_of(ref, layout, *, axis: int, program: int) -> jax.Array:
        assert (axis, program) == (0, 1)
        return plgpu.load(ref, layout=layout, optimized=True)  # unlike all others: the mark for ``get_of``

    def get_of(self, eqn, token, get_invals):
        def invals():
            key, *others = get_invals()
            return [key.at[2].set(1), *others]  # the third number says whose memory it is

        return get(self, eqn, token, invals if eqn.params.get("optimized") else get_invals)

    def forgiving(barrier) -> None:
        """Nobody waits for the last slots to be free, which the interpreter takes for an error.

        What a pair meets at, which takes two arrivals, must have been waited for.
        """
        if barrier.ref_count == 1 and barrier.num_arrivals == 1:
            barrier.last_observed_phase_by_thread.clear()
        deallocate(barrier)

    mosaic.arrive, mosaic.wait_for, mosaic.load_of = arrive, wait_for, load_of
    plgpu.kernel = lambda *args, **options: kernel(*args, **options | {"interpret": params})
    interpreter._interpret_get_p, shared_memory.Barrier.deallocate = get_of, forgiving

    def multiply(inputs: Inputs, **options: Any) -> None:
        outs = mosaic_gpu.stream_matmul(inputs.x, inputs.products, **inputs.options, **options, slots=3)
        check([np.asarray(out) for out in outs], inputs)

    if detect_races:  # it does not see that a norm has read x before a slot is filled again: with a norm, none is
        normed = Kind(512, 200, normed=True)
        for kind in (Kind(1024, 200), Kind(1024, 256, "residual"), Kind(1024, 128, "swiglu"), normed):
            multiply(make([kind], 8), programs=4)
            assert not gpu_callbacks.get_races().races_found, kind
        return
    for name, tokens, rows in (("small_layer", 5, 8), ("residuals", 40, 40)):
        inputs = make(CHAINS[name], tokens, rows)
        plan = make_plan(inputs.products, tokens, rows, EPS, 2)
        counters = no_arrivals(3)
        multiply(inputs, programs=2, arrivals=(counters, 1))
        wanted = np.zeros((3, COUNTERS), np.int32)
        wanted[1, : len(plan.stages) - 1] = [stage.blocks for stage in plan.stages[:-1]]
        np.testing.assert_array_equal(counters[...], wanted)


@needs_jax_0_11
@pytest.mark.parametrize("detect_races", [False, True])
def test_three_warpgroups(detect_races):
    """Chains in one launch against float64; nothing is overwritten while it is read, nor read before it is there."""
    code = f"from tests.kernels.test_stream_matmul import as_on_a_card; as_on_a_card({detect_races})"
    root, env = Path(__file__).parents[2], os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=env, capture_output=True, timeout=120, text=True
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]


def spec(*shape: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def specs(kinds: Sequence[Kind], tokens: int, rows: int | None = None) -> Inputs:
    """Inputs without numbers."""
    rows = filled(tokens) if rows is None else rows
    residual = next((spec(rows, kind.features) for kind in kinds if kind.ends == "residual"), None)
    weights = tuple(spec(kind.packed, kind.depth) for kind in kinds)
    return Inputs(tuple(kinds), tokens, spec(rows, kinds[0].depth), residual, weights, ())


def plan_of(kinds: Sequence[Kind], rows: int = 16, programs: int = 132, slots: int | None = None) -> mosaic_gpu.Plan:
    return make_plan(specs(kinds, rows).products, rows, rows, EPS, programs, slots)


@pytest.mark.parametrize("programs", [1, 2, 7, 40, 132])
@pytest.mark.parametrize("kinds", [LAYER, *CHAINS.values()])
def test_blocks_are_dealt_out_in_turn(kinds, programs):
    """To pairs of programs, through all products."""
    plan, pairs = plan_of(kinds, 24, programs), max(1, programs // 2)
    assert plan.pairs == pairs
    dealt = itertools.cycle(range(pairs))
    for kind, stage in zip(kinds, plan.stages, strict=True):
        takers = {block: pair for pair in range(pairs) for block in taken(plan, stage, pair)}
        assert [takers.pop(block) for block in range(kind.packed // 64)] == list(itertools.islice(dealt, stage.blocks))
        assert not takers


def taken(plan: mosaic_gpu.Plan, stage: mosaic_gpu.Stage, pair: int) -> range:
    """The blocks of a pair, in the rounds that it makes."""
    own = (pair - stage.first) % plan.pairs
    blocks = range(own, stage.blocks, plan.pairs)
    assert len(blocks) <= plan.rounds(stage)
    return blocks


def test_blocks_are_of_the_features_that_there_are():
    for features, ends, blocks in ((72, "plain", 2), (128, "plain", 2), (128, "residual", 2), (96, "swiglu", 3)):
        plan = make_plan([Product(spec(320, 512), ends, False, features)], 8, 8, EPS, 132)
        assert plan.stages[0].blocks == blocks


def shared_bytes(plan: mosaic_gpu.Plan) -> int:
    """Of all arrays in shared memory, each of which starts at a multiple of 1024 bytes."""
    kind = type(plgpu.SMEM((1,), jnp.int8))
    arrays = [ref for ref in mosaic_gpu._scratch(plan, interpret=False).values() if isinstance(ref, kind)]
    assert len(arrays) >= 3
    return sum(-(-math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize // 1024) * 1024 for ref in arrays) + COMPILER


@pytest.mark.parametrize("rows", range(8, 72, 8))
@pytest.mark.parametrize("kinds", LARGE.values(), ids=LARGE)
def test_slots_are_what_fits(kinds, rows):
    """Two at least: one is read while the other is filled."""
    plan = plan_of(kinds, rows)
    steps = sum(stage.steps * plan.rounds(stage) for stage in plan.stages)
    assert 2 <= plan.slots <= steps
    assert shared_bytes(plan) <= ROOM == 227 * 1024
    assert plan.slots == steps or shared_bytes(replace(plan, slots=plan.slots + 1)) > ROOM


def test_slots_are_no_more_than_asked_for_and_no_more_than_steps():
    assert plan_of(LAYER, slots=3).slots == 3
    assert plan_of(LAYER, slots=99).slots == plan_of(LAYER).slots
    assert plan_of([Kind(512, 64)]).slots == 1
    assert plan_of([Kind(1024, 64)]).slots == 2
    assert plan_of([Kind(1024, 64)], 24).slots == 4
    assert plan_of([Kind(512, 256)], programs=6).slots == 2
    assert plan_of([Kind(512, 64, "swiglu"), Kind(512, 64)], programs=4).slots == 2


def test_one_slot_is_refused_where_blocks_have_more_steps():
    with pytest.raises(ValueError, match="slots must be 2 or more for blocks of several steps, got 1"):
        plan_of([Kind(512, 64, "swiglu"), Kind(1024, 64)], slots=1)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """For lowering: as if there were such a GPU."""
    monkeypatch.setattr(mosaic, "why_not", mosaic.unsupported)


def lowered(inputs: Inputs, *, launches: int = 1, row: Any = 1, **options: Any) -> str:
    """``launches``, one after another in the rows of arrivals from ``row`` on; None: each with its own counters."""

    def op(x, residual, weights):
        given = replace(inputs, x=x, residual=residual, weights=weights)
        counters = None if row is None else no_arrivals(3)
        arrivals = [None if row is None else (counters, row + i) for i in range(launches)]
        return [stream_matmul(x, given.products, arrivals=a, **given.options, **options) for a in arrivals]

    return lower_for_cuda(op, inputs.x, inputs.residual, inputs.weights)


@needs_jax_0_11
@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (13, 16), (32, 32), (64, 64)])
@pytest.mark.parametrize("name", [name for name in LARGE if name != "layer"])
def test_lowers(name, tokens, rows, on_hopper):
    """One launch and nothing beside it: no padding, no slice, no transpose."""
    text = lowered(specs(LARGE[name], tokens, rows))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert not beside_kernels(text)


@needs_jax_0_11
@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (13, 16), (32, 32), (64, 64)])
def test_a_layer_lowers(tokens, rows, on_hopper):
    """One launch, and what makes the counters: nothing that touches x, the weights or what comes out."""
    for row in (1, None) if tokens == 1 else (1,):
        text = lowered(specs(LAYER, tokens, rows), row=row)
        assert text.count("custom_call @mosaic_gpu") == 1
        assert beside_kernels(text) <= {"constant", "broadcast_in_dim"}


@needs_jax_0_11
def test_a_product_for_every_counter_lowers(on_hopper):
    inputs = specs([Kind(512, 512, "residual")] * COUNTERS, 8)
    assert lowered(inputs).count("custom_call @mosaic_gpu") == 1


@needs_jax_0_11
def test_launches_in_other_rows_are_the_same_kernel(on_hopper):
    """Lowered once, so compiled once."""
    text = lowered(specs(LAYER, 13), launches=2)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert len(re.findall(r"func\.func private @_launch", text)) == 1
    calls = re.findall(r"= call @_launch\(.*", text)
    assert len(calls) == 2
    assert all("tensor<3x8xi32>" in call for call in calls)  # the counters that were given


@needs_jax_0_11
def test_the_row_of_arrivals_may_be_traced(on_hopper):
    inputs = specs(LAYER, 13)

    def op(x, residual, weights, row):
        given = replace(inputs, x=x, residual=residual, weights=weights)
        arrivals = no_arrivals(3), row
        return stream_matmul(x, given.products, arrivals=arrivals, **given.options)

    text = lower_for_cuda(op, inputs.x, inputs.residual, inputs.weights, spec(dtype="int32"))
    assert text.count("custom_call @mosaic_gpu") == 1


@needs_jax_0_11
@pytest.mark.parametrize("rest", range(8, 64, 8))
def test_a_last_block_of_any_width_lowers(rest, on_hopper):
    assert lowered(specs([Kind(512, 64 + rest)], 13)).count("custom_call @mosaic_gpu") == 1


@needs_jax_0_11
def test_the_kernel_is_taken_where_it_can_run(monkeypatch):
    fits, does_not = specs([Kind(1024, 136)], 8), specs([Kind(1024, 136)], 13, 13)
    monkeypatch.setattr(mosaic, "why_not", lambda: "there is no GPU")
    assert "mosaic_gpu" not in lowered(fits)
    with pytest.raises(ValueError, match="'mosaic_gpu' of stream_matmul cannot run: there is no GPU"):
        lowered(fits, implementation="mosaic_gpu")
    monkeypatch.setattr(mosaic, "why_not", mosaic.unsupported)
    assert "mosaic_gpu" in lowered(fits)
    assert "mosaic_gpu" in lowered(fits, implementation="mosaic_gpu")
    assert "mosaic_gpu" not in lowered(fits, implementation="reference")
    assert "mosaic_gpu" not in lowered(does_not)
    with pytest.raises(ValueError, match="cannot run: there must be 8, 16, ... or 64 rows, got 13"):
        lowered(does_not, implementation="mosaic_gpu")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
def test_without_a_gpu_it_is_the_reference():
    inputs = make(SMALL["plain"], 8)
    chosen, plain = (stream_matmul(inputs.x, inputs.products, implementation=name) for name in (None, "reference"))
    same(chosen, plain, 8)


WEIGHTS = spec(64, 512)
UP, BACK = Product(spec(1024, 64), "swiglu", True), Product(WEIGHTS, "residual")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": spec(512)}, "x must be [T, K], got [512]"),
        ({"x": spec(8, 192)}, "products[0].weights must be [P, K] = [64, 192], got [64, 512]"),
        ({"x": spec(8, 512, dtype="float16")}, "x must be bfloat16 or float32, got float16"),
        ({"tokens": 0}, "tokens must be 1 to the 8 rows, got 0"),
        ({"tokens": 9}, "tokens must be 1 to the 8 rows, got 9"),
        ({"products": []}, "products must hold one or more, got none"),
        ({"products": Product(spec(512))}, "products[0].weights must be [P, K], got [512]"),
        ({"products": Product(spec(72, 512))}, "[0].weights must be packed, with a multiple of 64 rows, got 72"),
        ({"products": Product(spec(0, 512))}, "[0].weights must be packed, with a multiple of 64 rows, got 0"),
        ({"products": Product(spec(64, 512, dtype="int8"))}, "products[0] must be bfloat16 or float32, got int8"),
        ({"products": Product(WEIGHTS, features=65)}, "products[0].features must be 1 to 64, got 65"),
        ({"products": Product(WEIGHTS, features=0)}, "products[0].features must be 1 to 64, got 0"),
        ({"products": Product(WEIGHTS, "swiglu", features=33)}, "products[0].features must be 1 to 32, got 33"),
        ({"products": Product(WEIGHTS, "gelu")}, "[0].ends must be 'plain', 'residual' or 'swiglu', got 'gelu'"),
        (
            {"products": [Product(WEIGHTS), Product(spec(64, 64))]},
            "products[0].ends must be 'residual' or 'swiglu', as it is not the last, got 'plain'",
        ),
        (
            {"products": [BACK, UP, Product(spec(64, 192), "residual")]},
            "products[2].weights must be [P, K] = [64, 512], got [64, 192]",
        ),
        ({"residual": None, "products": BACK}, "residual must be given for products[0]"),
        ({"residual": spec(8, 32), "products": BACK}, "residual must be [T, D] = [8, 64], got [8, 32]"),
        ({"residual": spec(16, 64), "products": BACK}, "residual must be [T, D] = [8, 64], got [16, 64]"),
        (
            {"products": [BACK, Product(spec(128, 64), "residual")]},
            "residual must be [T, D] = [8, 128], got [8, 64]",
        ),
        ({"residual": spec(8, 64, dtype="int32"), "products": BACK}, "residual must be bfloat16 or float32, got int32"),
        ({"eps": None, "products": [BACK, UP, BACK]}, "eps must be given for products[1]"),
        ({"residual": spec(8, 64)}, "residual must be None where no product ends with one"),
        ({"arrivals": (spec(3, 7, dtype="int32"), 0)}, "arrivals must be those of no_arrivals, int32 [n, 8], got"),
        ({"arrivals": (spec(3, 8), 0)}, "arrivals must be those of no_arrivals, int32 [n, 8], got"),
        ({"arrivals": (spec(8, dtype="int32"), 0)}, "arrivals must be those of no_arrivals, int32 [n, 8], got"),
        ({"arrivals": (spec(3, 8, dtype="int32"), 3)}, "arrivals must name a row of 0 to 2, got 3"),
        ({"arrivals": (spec(3, 8, dtype="int32"), -1)}, "arrivals must name a row of 0 to 2, got -1"),
        ({"implementation": "triton"}, "implementation 'triton' is not written for stream_matmul yet"),
    ],
)
def test_errors_name_the_argument(changes, message):
    products = changes.get("products", Product(WEIGHTS))
    products = [products] if isinstance(products, Product) else products
    residual = spec(8, 64) if any(product.ends == "residual" for product in products) else None
    options = {"x": spec(8, 512), "residual": residual, "eps": EPS} | changes | {"products": products}
    with pytest.raises(ValueError) as raised:
        stream_matmul(options.pop("x"), options.pop("products"), **options)
    assert message in str(raised.value)


@needs_jax_0_11
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": spec(72, 512)}, "there must be 8, 16, ... or 64 rows, got 72"),
        ({"x": spec(12, 512)}, "there must be 8, 16, ... or 64 rows, got 12"),
        ({"x": spec(8, 512, dtype="float32")}, "x must be bfloat16, got float32"),
        ({"residual": spec(8, 64, dtype="float32")}, "residual must be bfloat16, got float32"),
        ({"products": [BACK, Product(spec(64, 512, dtype="float32"))]}, "products[1] must be bfloat16, got float32"),
        ({"products": [Product(spec(512, 512), "residual")] * 9}, "products must hold at most 8, got 9"),
        ({"products": [Product(spec(64, 768))]}, "products[0] must have a multiple of 512 columns, got 768"),
        ({"products": [Product(WEIGHTS, "residual", features=40)]}, "64 features, of 32 for SwiGLU, got 40"),
        ({"products": [Product(WEIGHTS, "swiglu", features=16)]}, "64 features, of 32 for SwiGLU, got 16"),
        ({"products": [Product(WEIGHTS, features=60)]}, "products[0] must have a multiple of 8 features, got 60"),
    ],
)
def test_what_the_kernel_cannot_take_is_said(changes, message):
    options = {"x": spec(8, 512), "products": [Product(WEIGHTS)], "residual": None} | changes
    assert message in mosaic_gpu.unsupported(options["x"].shape[0], **options)
    with pytest.raises(ValueError) as raised:
        mosaic_gpu.stream_matmul(**options, tokens=8, eps=EPS)
    assert str(raised.value).startswith("stream_matmul cannot run as a Mosaic GPU kernel: ")
    assert message in str(raised.value)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="of older versions")
def test_an_older_jax_is_told_so():
    assert "jax 0.11" in mosaic_gpu.unsupported(8, spec(8, 512), [Product(WEIGHTS)], None)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("name", LARGE)
def test_large_products_on_a_gpu(name):
    """Against float64; the same bits in every run, and for a token beside any number of others."""
    inputs = make(LARGE[name], 64)
    whole = run(inputs)
    check(whole, inputs, ON_CARD)
    same(run(inputs), whole, 64)
    for tokens in (1, 8, 13, 16, 32):
        first, second = (run(inputs.first(tokens)) for _ in range(2))
        same(first, second, tokens)
        same(first, whole, tokens)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("name", [*SMALL, *CHAINS])
def test_small_products_on_a_gpu(name):
    """Most programs are idle; the tokens end within a tile; rows are left over."""
    for tokens, rows in TOKENS:
        inputs = make((SMALL | CHAINS)[name], tokens, rows)
        check(run(inputs), inputs, ON_CARD)
        check(run(inputs, programs=6, slots=2), inputs, ON_CARD)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("rest", range(8, 64, 8))
def test_a_last_block_of_any_width_on_a_gpu(rest):
    inputs = make([Kind(512, 64 + rest, normed=True)], 13)
    check(run(inputs), inputs, ON_CARD)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("name", LARGE)
def test_fewer_programs_on_a_gpu(name):
    """Than multiprocessors, and fewer slots than fit: the same bits."""
    inputs = make(LARGE[name], 13)
    whole = run(inputs)
    check(whole, inputs, ON_CARD)
    same(run(inputs, programs=40), whole, 13)
    same(run(inputs, programs=7, slots=2), whole, 13)


@functools.partial(jax.jit, static_argnames=("tokens", "together"))
def layers(x, h, weights, *, tokens: int, together: bool):
    """24 layers, whose x is made from what came out of the one before: each in one launch, or in one a product."""
    inputs = Inputs(LAYER, tokens, x, h, weights, ())
    counters = no_arrivals(24)

    def multiply(x, products, arrivals=None):
        options = inputs.options | {"residual": h, "arrivals": arrivals}
        return stream_matmul(x, products, **options, implementation="mosaic_gpu")

    seen = []
    for i in range(24):
        if together:
            _, inner, h, y = multiply(x, inputs.products, (counters, i))
        else:
            o, gate_up, down, last = inputs.products
            (h,) = multiply(x, [o])
            (inner,) = multiply(h, [gate_up])
            (h,) = multiply(inner, [down])
            (y,) = multiply(h, [last])
        x = fill_up(y[:, : LAYER[0].depth].astype(jnp.bfloat16))
        seen.append([array[:tokens, ::64] for array in (inner, h, y)])
    return seen, h[:tokens], y


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("tokens", [1, 13, 64])
def test_layers_on_a_gpu(tokens):
    """Products that wait for each other, in launches that share their counters, give what launches of one give."""
    inputs = make(LAYER, tokens)
    arrays = inputs.x, inputs.residual, inputs.weights
    expected = [wide(leaf) for leaf in jax.tree.leaves(layers(*arrays, tokens=tokens, together=False))]
    assert all(np.isfinite(leaf).all() for leaf in expected)
    for _ in range(8):
        found = jax.tree.leaves(layers(*arrays, tokens=tokens, together=True))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(wide(one), other)


@pytest.mark.gpu
@needs_jax_0_11
@pytest.mark.parametrize("name", ["in", "layer"])
def test_the_kernel_by_name_on_a_gpu(name):
    """It is what ``None`` takes, outside of ``jit`` too, and agrees with the reference but for roundings."""
    inputs = make(LARGE[name], 13)
    ours, chosen, plain = (
        stream_matmul(inputs.x, inputs.products, **inputs.options, implementation=implementation)
        for implementation in ("mosaic_gpu", None, "reference")
    )
    same(chosen, ours, 13)
    for one, other in zip(ours, plain, strict=True):
        assert error(one[:13], wide(other[:13])) < 4e-3
