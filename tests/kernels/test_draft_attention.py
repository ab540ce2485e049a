"""The attention of a level of drafting: both versions against float64, lowered for a GPU, and on one."""

import re
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_weights import weights
from kernels_pallas import draft_attention
from kernels_pallas.draft_attention import reference, triton
from kernels_pallas.draft_attention.tiles import TABLE, Tile, pick
from kernels_pallas.norm import rms_norm
from kernels_pallas.tiles import TUNED_ON
from specla_jax.config import DraftConfig
from specla_jax.drafters import EagleConfig, EagleDrafter, eagle
from specla_jax.drafters.eagle_layer import _dense, pair_input
from tests.kernels.lowering import TRITON_CALL, beside_kernels, lower_for_cuda
from tests.kernels.oracle import error

BOUND = {"float32": 1e-5, "bfloat16": 4e-3}  # relative
DTYPES = tuple(BOUND)
THETA = 1e4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A level of drafting; ``lengths`` has a number for each row, ``depth`` is the number of levels with slots."""

    lengths: tuple[int, ...] = (40,)
    nodes: int = 4
    level: int = 1
    depth: int = 5
    heads: int = 4
    key_heads: int = 2
    size: int = 64
    window: int = 64

    @property
    def first(self) -> int:
        """The first of the level's slots."""
        return (self.level - 1) * self.nodes

    @property
    def slots(self) -> int:
        return self.depth * self.nodes

    def arguments(self, dtype: str) -> list[np.ndarray | jax.Array]:
        """Random ones. What must not be looked at is large: slots that hold nothing, and drafts from the level on."""
        rng = np.random.default_rng(sum(self.lengths) + self.level)
        rows = len(self.lengths)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        ring = [normal(rows, self.window, self.key_heads, self.size) for _ in "kv"]
        drafts = [normal(rows, self.slots, self.key_heads, self.size) for _ in "kv"]
        for row, length in enumerate(self.lengths):
            for x in ring:
                x[row, length:] = 30
        for x in drafts:
            x[:, self.first :] = 30
        ancestors = np.zeros((rows, self.nodes, self.slots), bool)
        for level in range(self.level - 1):  # one of every level above
            chosen = rng.integers(0, self.nodes, (rows, self.nodes))
            ancestors[:, :, level * self.nodes :][np.arange(rows)[:, None], np.arange(self.nodes), chosen] = True
        ancestors[:, :, self.first :] = rng.random((rows, self.nodes, self.slots - self.first)) < 0.5
        qkv = jnp.asarray(normal(rows, self.nodes, (self.heads + 2 * self.key_heads) * self.size), jnp.float32)
        narrow = [jnp.asarray(x, dtype) for x in (*ring, *drafts)]
        return [qkv, *narrow, ancestors, np.asarray(self.lengths, np.int32), np.int32(self.level)]

    @property
    def options(self) -> dict:
        return {"num_heads": self.heads, "theta": THETA}


CASES = {
    "the root alone": Case(lengths=(1,)),
    "the root alone, one node, three rows": Case(lengths=(1, 1, 1), nodes=1, level=3),
    "a ring filled in part": Case(lengths=(3, 63, 30), level=2),
    "a full ring": Case(lengths=(64,), level=4),
    "a wrapped ring": Case(lengths=(65, 100, 191), level=5),
    "one query a key head": Case(lengths=(7, 64, 130), level=2, heads=2),
    "one node": Case(lengths=(90,), nodes=1, level=4),
    "8 nodes of 4 heads a key head": Case(lengths=(50,), nodes=8, level=3, heads=8),
    "3 nodes, heads of 128": Case(lengths=(20, 200), nodes=3, level=4, heads=3, key_heads=1, size=128, window=192),
    "more slots than a tile, past the window": Case(lengths=(1, 70), nodes=1, level=70, depth=80, heads=1, key_heads=1),
}
NARROW = {  # for the reference
    f"a window of {window}, {length} tokens, level {level}": Case(lengths=(length,), window=window, level=level, size=6)
    for window in (1, 2, 5)
    for length in (1, 2, 5, 6, 17)
    for level in (1, 2, 5)
}
REAL = Case(lengths=(300,), nodes=4, level=3, heads=16, key_heads=8, size=128, window=512)


def turned(x: np.ndarray, position: int) -> np.ndarray:
    half = x.shape[-1] // 2
    turn = np.exp(1j * position * THETA ** (-np.arange(half) / half))
    y = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([y.real, y.imag], axis=-1)


def truth(case: Case, arguments, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each node attends to, gathered position by position; rounded where tensor cores round."""

    def narrow(x: np.ndarray) -> np.ndarray:
        return np.asarray(x).astype(np.float32).astype(dtype).astype(np.float64)

    qkv, ring_key, ring_value, draft_key, draft_value, ancestors = (np.asarray(x) for x in arguments[:6])
    rows, group = len(case.lengths), case.heads // case.key_heads
    heads = narrow(qkv).reshape(rows, case.nodes, -1, case.size)
    mixed = np.zeros((rows, case.nodes, case.heads, case.size))
    new_key, new_value = (x.astype(np.float64) for x in (draft_key, draft_value))
    for b, length in enumerate(case.lengths):
        position = length - 1 + case.level
        for t in range(case.nodes):
            new_key[b, case.first + t] = narrow(turned(heads[b, t, case.heads : case.heads + case.key_heads], position))
            new_value[b, case.first + t] = heads[b, t, case.heads + case.key_heads :]
        for t in range(case.nodes):
            for j in range(case.heads):
                h, seen = j // group, []
                for p in range(max(0, position - case.window + 1), length):
                    seen.append((ring_key[b, p % case.window, h], ring_value[b, p % case.window, h]))
                for s in range(case.first):
                    if ancestors[b, t, s] and length + s // case.nodes > position - case.window:
                        seen.append((new_key[b, s, h], new_value[b, s, h]))
                seen.append((new_key[b, case.first + t, h], new_value[b, case.first + t, h]))
                keys, values = (np.stack(x).astype(np.float64) for x in zip(*seen))
                scores = keys @ narrow(turned(heads[b, t, j], position)) / np.sqrt(case.size)
                weight = np.exp(scores - scores.max())
                mixed[b, t, j] = weight @ values / weight.sum()
    return mixed.reshape(rows, case.nodes, -1), new_key, new_value


def check(result, case: Case, arguments, dtype: str) -> None:
    mixed, *drafts = (np.asarray(x) for x in result)
    wanted, *wanted_drafts = truth(case, arguments, dtype)
    assert mixed.dtype == drafts[0].dtype == drafts[1].dtype == jnp.dtype(dtype)
    assert error(mixed, wanted) < BOUND[dtype]
    own = slice(case.first, case.first + case.nodes)
    for new, old, wanted in zip(drafts, arguments[3:5], wanted_drafts, strict=True):
        assert error(new[:, own], wanted[:, own]) < BOUND[dtype]
        for rows in (slice(0, case.first), slice(case.first + case.nodes, None)):
            np.testing.assert_array_equal(new[:, rows], np.asarray(old)[:, rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CASES, *NARROW])
def test_reference(name, dtype):
    case = CASES.get(name) or NARROW[name]
    arguments = case.arguments(dtype)
    check(jax.jit(partial(draft_attention, **case.options))(*arguments), case, arguments, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name, dtype):
    case = CASES[name]
    arguments = case.arguments(dtype)
    run = jax.jit(partial(triton.draft_attention, **case.options, interpret=True))
    check(run(*arguments), case, arguments, dtype)


TILES = sorted({rule.tile for rules in TABLE.values() for rule in rules} | {Tile(slots=16, warps=1, stages=2)}, key=str)


@pytest.mark.parametrize("tile", [*TILES, Tile(slots=32)], ids=str)
def test_every_tile_interpreted(tile):
    case = Case(lengths=(100, 33), level=3, window=128)
    arguments = case.arguments("bfloat16")
    run = jax.jit(partial(triton.draft_attention, **case.options, tile=tile, interpret=True))
    check(run(*arguments), case, arguments, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_projections_in_the_dtype_of_the_ring(dtype):
    case = CASES["a wrapped ring"]
    arguments = case.arguments(dtype)
    arguments[0] = arguments[0].astype(dtype)
    run = jax.jit(partial(triton.draft_attention, **case.options, interpret=True))
    check(run(*arguments), case, arguments, dtype)


def test_unseen_tiles_of_the_ring_are_not_read():
    """Zero weights would not hide this."""
    case = Case(lengths=(64, 10), level=2, window=192)
    arguments = case.arguments("float32")
    arguments[2] = jnp.asarray(arguments[2]).at[:, 64:].set(jnp.nan)
    result = jax.jit(partial(triton.draft_attention, **case.options, interpret=True))(*arguments)
    check(result, case, arguments, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interpreted", [False, True])
def test_a_level_of_the_drafter(interpreted, dtype, monkeypatch):
    """The same hidden states as the drafter's, level after level, from the op's own drafts."""
    config = EagleConfig(
        **{"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 24},
        **{"target_hidden_size": 16, "target_num_hidden_layers": 2, "target_vocab_size": 32, "window": 64},
    )
    drafter = EagleDrafter(draft=DraftConfig(depth=4, branch=3, nodes=12), config=config, dtype=dtype)
    rng = np.random.default_rng(0)
    network = weights(config)
    embedding = jnp.asarray(rng.standard_normal((32, 16), np.float32))
    params = drafter.bind(network, {"embeddings": {"embedding": embedding}})
    ring = [jnp.asarray(rng.standard_normal((2, 64, 2, 64), np.float32), dtype) for _ in "kv"]
    carry = eagle.EagleCarry(*ring, jnp.zeros((2, 16), dtype))
    length = jnp.array([9, 77], jnp.int32)
    hidden = []

    def recorded(*args):
        hidden.append(layer(*args))
        return hidden[-1]

    layer = eagle.eagle_layer
    monkeypatch.setattr(eagle, "eagle_layer", recorded)
    drafts = [jnp.zeros((2, 9, 2, 64), dtype) for _ in "kv"]
    frontier = eagle._Frontier(
        **{"tokens": jnp.array([[1, 2, 3], [4, 5, 6]]), "log_prob": jnp.zeros((2, 3)), "key": drafts[0]},
        **{"feature": jnp.asarray(rng.standard_normal((2, 3, 16), np.float32), dtype), "value": drafts[1]},
        **{"pool_index": jnp.ones((2, 3), int), "ancestors": jnp.zeros((2, 3, 9), bool)},
    )
    attend = partial(draft_attention, implementation="reference")
    if interpreted:
        attend = partial(triton.draft_attention, interpret=True)
    for level in (1, 2, 3):
        grown, _ = drafter._grow(params, carry, length, frontier, jnp.int32(level))
        pair = pair_input(network, config, embedding[frontier.tokens].astype(dtype), frontier.feature)
        qkv = jnp.concatenate([_dense(pair, network["attn"][f"{n}_proj"]["kernel"]) for n in "qkv"], axis=-1)
        where = frontier.ancestors, length, jnp.int32(level)
        mixed, *drafts = attend(qkv, *ring, *drafts, *where, num_heads=4, theta=config.rope_theta)
        ours = frontier.feature + _dense(mixed, network["attn"]["o_proj"]["kernel"])
        normed = rms_norm(ours, network["mlp_norm"]["scale"], config.norm_eps).astype(dtype)
        gate, up = jnp.split(_dense(normed, network["mlp"]["gate_up_proj"]["kernel"]), 2, axis=-1)
        ours += _dense(jax.nn.silu(gate) * up, network["mlp"]["down_proj"]["kernel"])
        bound = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
        assert error(ours, np.asarray(hidden[-1], np.float64)) < bound
        assert error(drafts[0], np.asarray(grown.key, np.float64)) < bound
        np.testing.assert_array_equal(np.asarray(drafts[1]), np.asarray(grown.value))
        frontier = grown


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("size", [64, 128])
def test_lowers_to_one_launch_in_place(size, rows, dtype):
    case = replace(REAL, lengths=(300,) * rows, size=size)
    tiles = {pick(rows * case.key_heads, jnp.dtype(dtype), on=TUNED_ON), Tile(slots=16, warps=1, stages=2)}
    for tile in tiles:
        text = lower_for_cuda(partial(triton.draft_attention, **case.options, tile=tile), *case.arguments(dtype))
        assert text.count(TRITON_CALL) == 1
        assert re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text) == [("1", "8"), ("2", "9")]
        assert beside_kernels(text) <= {"reshape", "broadcast_in_dim"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_odd_shapes_lower(name, dtype):
    case = CASES[name]
    assert TRITON_CALL in lower_for_cuda(partial(triton.draft_attention, **case.options), *case.arguments(dtype))


def test_a_tile_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"tile of draft_attention must fit .* use fewer stages"):
        triton.draft_attention(*REAL.arguments("float32"), **REAL.options, tile=Tile(stages=8), interpret=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 48}, r"slots must be one of \(16, 32, 64\), got 48"),
        ({"warps": 3}, r"warps must be one of \(1, 2, 4, 8\), got 3"),
        ({"stages": 0}, r"stages must be one of \(1, .*\), got 0"),
    ],
)
def test_tiles_check_themselves(options, message):
    with pytest.raises(ValueError, match=message):
        Tile(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 32}, "head sizes must be 64 or 128, got 32"),
        ({"window": 65}, "ring_key must have a multiple of 64 slots, got 65"),
        ({"nodes": 5, "heads": 32}, "at most 64 queries a key head, got 80"),
    ],
)
def test_what_the_kernel_cannot_take_is_said(changes, message):
    """The op takes it all the same."""
    case = replace(Case(), **changes)
    arguments = case.arguments("float32")
    with pytest.raises(ValueError, match=message):
        triton.draft_attention(*arguments, **case.options, interpret=True)
    assert draft_attention(*arguments, **case.options)[0].shape == (1, case.nodes, case.heads * case.size)


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": spec(2, 512)}, "qkv must be [B, T, (H+2K)dh], got [2, 512]"),
        ({"qkv": spec(2, 9, 512)}, "qkv must hold 1 to 8 nodes a row, got 9"),
        ({"qkv": spec(2, 4, 500)}, "qkv must be [B, T, (H+2K)dh] = [2, 4, 512], got [2, 4, 500]"),
        ({"qkv": spec(2, 4, 512, dtype="float16")}, "qkv must be bfloat16 or float32, got float16"),
        ({"ring_key": spec(2, 64, 128)}, "ring_key must be [B, W, K, dh], got [2, 64, 128]"),
        ({"ring_key": spec(2, 0, 2, 64)}, "ring_key must have 1 slot or more, got 0"),
        ({"ring_key": spec(2, 64, 2, 63)}, "ring_key must have heads of even size, got 63"),
        ({"ring_key": spec(2, 64, 2, 64, dtype="float16")}, "ring_key must be bfloat16 or float32, got float16"),
        ({"ring_value": spec(2, 32, 2, 64)}, "ring_value must be [B, W, K, dh] = [2, 64, 2, 64], got [2, 32, 2, 64]"),
        ({"draft_key": spec(2, 12, 1, 64)}, "draft_key must be [B, S, K, dh] = [2, 12, 2, 64], got [2, 12, 1, 64]"),
        ({"draft_value": spec(2, 12, 2, 64, dtype="bfloat16")}, "draft_value must have the dtype of ring_key"),
        ({"ancestors": spec(2, 4, 11, dtype="bool")}, "ancestors must be [B, T, S] = [2, 4, 12], got [2, 4, 11]"),
        ({"ancestors": spec(2, 4, 12, dtype="int32")}, "ancestors must be bool, got int32"),
        ({"length": spec(3, dtype="int32")}, "length must be [B] = [2], got [3]"),
        ({"length": spec(2)}, "length must be int32, got float32"),
        ({"level": spec(1, dtype="int32")}, "level must be [] = [], got [1]"),
        ({"level": spec()}, "level must be int32, got float32"),
        ({"level": 0}, "level must be 1 to 3, as draft_key has 12 slots, got 0"),
        ({"level": 4}, "level must be 1 to 3, as draft_key has 12 slots, got 4"),
        ({"num_heads": 3}, "num_heads must be a multiple of ring_key's 2 heads, got 3"),
        ({"theta": 0.0}, "theta must be positive, got 0.0"),
        ({"implementation": "mosaic_gpu"}, "implementation 'mosaic_gpu' is not written for draft_attention yet"),
    ],
)
def test_errors_name_the_argument(changes, message):
    ring, drafts = spec(2, 64, 2, 64), spec(2, 12, 2, 64)
    arrays = {"qkv": spec(2, 4, 512), "ring_key": ring, "ring_value": ring, "draft_key": drafts, "draft_value": drafts}
    arrays |= {"ancestors": spec(2, 4, 12, dtype="bool"), "length": spec(2, dtype="int32")}
    options = {"level": spec(dtype="int32"), "num_heads": 4, "theta": THETA} | changes
    arrays |= {name: value for name, value in options.items() if isinstance(value, jax.ShapeDtypeStruct)}
    options = {name: value for name, value in options.items() if name not in arrays}
    with pytest.raises(ValueError) as raised:
        jax.eval_shape(lambda arrays: draft_attention(**arrays, **options), arrays)
    assert message in str(raised.value)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_level_may_be_a_number(implementation):
    case = Case(level=3)
    arguments = case.arguments("float32")
    result = draft_attention(*arguments[:7], 3, **case.options, implementation=implementation)
    check(result, case, arguments, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1,), (300,), (700,), (1, 64, 512, 513, 900) * 4], ids=len)
@pytest.mark.parametrize("level", [1, 5])
def test_on_a_gpu(level, lengths, dtype):
    """Parity with the reference for every tile that fits, and the same bits in every run."""
    case = replace(REAL, lengths=lengths, level=level)
    arguments = [jnp.asarray(x) for x in case.arguments(dtype)]
    wanted = jax.jit(partial(reference.draft_attention, **case.options))(*arguments)
    shipped = {pick(len(lengths) * case.key_heads, jnp.dtype(dtype))} | ({*TILES} if dtype == "bfloat16" else set())
    for tile in shipped:
        run = jax.jit(partial(triton.draft_attention, **case.options, tile=tile))
        result = run(*arguments)
        for x, y in zip(result, wanted, strict=True):
            assert error(x, np.asarray(y, np.float64)) < BOUND[dtype]
        for _ in range(3):
            for x, y in zip(result, run(*arguments), strict=True):
                assert (x == y).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_odd_shapes_on_a_gpu(name, dtype):
    case = CASES[name]
    arguments = [jnp.asarray(x) for x in case.arguments(dtype)]
    run = jax.jit(partial(draft_attention, **case.options, implementation="triton"))
    check(run(*arguments), case, arguments, dtype)


@pytest.mark.gpu
def test_donated_drafts_are_reused():
    arguments = [jnp.asarray(x) for x in REAL.arguments("bfloat16")]
    wanted = jax.jit(partial(reference.draft_attention, **REAL.options))(*arguments)
    places = [x.unsafe_buffer_pointer() for x in arguments[3:5]]
    run = jax.jit(partial(draft_attention, **REAL.options, implementation="triton"), donate_argnums=(3, 4))
    result = run(*arguments)
    assert [x.unsafe_buffer_pointer() for x in result[1:]] == places
    for x, y in zip(result, wanted, strict=True):
        assert error(x, np.asarray(y, np.float64)) < BOUND["bfloat16"]
