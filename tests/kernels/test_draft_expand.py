"""The children of a level of drafting: both versions against float64, lowered for a GPU, and on one."""

import itertools
import re
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_weights import weights
from kernels_pallas import draft_expand
from kernels_pallas.draft_expand import Expansion, reference, triton
from kernels_pallas.draft_expand.tiles import MAX_CHUNKS, TABLE, Tile, pick
from kernels_pallas.tiles import TUNED_ON
from specla_jax.drafters import EagleConfig
from specla_jax.drafters.eagle_layer import pair_input
from tests.kernels.lowering import TRITON_CALL, beside_kernels, lower_for_cuda
from tests.kernels.oracle import error

LOG_PROB_BOUND = 3e-6  # of log-probabilities between -40 and 0, absolute
PAIR_BOUND = {"float32": 1e-6, "bfloat16": 4e-3}  # relative
DTYPES = tuple(PAIR_BOUND)
EPS = 1e-3
SMALL = Tile(chunk=128, warps=1, child_warps=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A level of drafting. ``values``: of so many different logits, the same for all nodes of a row; 0 for any."""

    rows: int = 1
    branch: int = 4
    level: int = 2
    depth: int = 4
    vocabulary: int = 300
    target: int = 300
    width: int = 24
    target_width: int = 40
    temperature: float = 0.7
    values: int = 0

    @property
    def nodes(self) -> int:
        return self.branch if self.level else 1

    def arguments(self, dtype: str) -> list[jax.Array]:
        rng = np.random.default_rng(self.rows + self.level)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32))

        logits = 3 * normal(self.rows, self.nodes, self.vocabulary)
        log_prob = -jnp.abs(normal(self.rows, self.nodes))
        if self.values:
            whole = rng.integers(0, self.values, (self.rows, 1, self.vocabulary))
            logits = jnp.asarray(np.broadcast_to(whole, logits.shape), jnp.float32)
            log_prob = jnp.zeros_like(log_prob)
        ancestors = jnp.asarray(rng.random((self.rows, self.nodes, self.depth * self.branch)) < 0.5)
        table = normal(min(self.target, 997), self.target_width)  # of a large vocabulary tokens share rows: time
        norms = table[jnp.arange(self.target) % len(table)], normal(self.target_width), normal(self.width)
        arguments = [logits, normal(self.rows, self.nodes, self.width).astype(dtype), log_prob, ancestors]
        arguments += [jnp.int32(self.level), jnp.float32(self.temperature), *(x.astype(dtype) for x in norms)]
        mapping = np.sort(rng.permutation(self.target)[: self.vocabulary])
        return [*arguments, None if self.vocabulary == self.target else jnp.asarray(mapping, jnp.int32)]

    @property
    def options(self) -> dict:
        return {"branch": self.branch, "eps": EPS}


CASES = {
    "the root": Case(level=0),
    "the root of three rows, reduced": Case(rows=3, level=0, branch=8, vocabulary=129, target=500),
    "the first level": Case(level=1),
    "a chain": Case(branch=1, level=4),
    "a chain from its root, three rows": Case(rows=3, branch=1, level=0, vocabulary=1000, target=1000),
    "two children": Case(rows=3, branch=2, level=3),
    "three children": Case(branch=3, vocabulary=257, target=257, width=33, target_width=7),
    "eight children, reduced": Case(branch=8, level=4, depth=9, vocabulary=383, target=384),
    "a vocabulary as small as a branch": Case(branch=5, vocabulary=5, target=5),
    "equal logits": Case(rows=3, values=100),
    "equal logits, reduced": Case(branch=8, values=3, vocabulary=290),
    "all logits equal": Case(branch=3, values=1, vocabulary=129, target=129),
    "a low temperature": Case(rows=3, temperature=0.1),
}
REAL = Case(vocabulary=32000, target=32000, width=2048, target_width=2048, depth=6)


def truth(case: Case, arguments: list[jax.Array]) -> list[np.ndarray]:
    """All children of every node, sorted one by one."""
    logits, hidden, log_prob, ancestors, _, temperature, embedding, *scales, mapping = (
        None if x is None else np.asarray(x).astype(np.float64) for x in arguments
    )
    dtype = arguments[1].dtype
    results = []
    for b in range(case.rows):
        tokens, values = [], []
        for t in range(case.nodes):
            z = logits[b, t] / temperature
            z = log_prob[b, t] + z - z.max() - np.log(np.exp(z - z.max()).sum())
            best = sorted(range(case.vocabulary), key=lambda i, b=b, t=t: (-logits[b, t, i], i))[: case.branch]
            tokens += [i if mapping is None else int(mapping[i]) for i in best]
            values += [z[i] for i in best]
        # Nodes of equal logits have children of equal values, which sums in another order may not be.
        keys = np.round(values, 9)
        chosen = sorted(range(len(values)), key=lambda i, keys=keys: (-keys[i], i))[: case.branch]
        frontier = []
        for i in chosen:
            parent = i // case.branch
            seen = ancestors[b, parent].astype(bool)
            if case.level:
                seen[(case.level - 1) * case.branch + parent] = True
            embedded = embedding[tokens[i]].astype(dtype).astype(np.float64)
            pair = [
                x / np.sqrt((x * x).mean() + EPS) * scale
                for x, scale in zip((embedded, hidden[b, parent]), scales, strict=True)
            ]
            frontier.append((tokens[i], values[i], hidden[b, parent], seen, np.concatenate(pair)))
        results.append([np.array(tokens), np.array(values), np.array(chosen), *(np.stack(x) for x in zip(*frontier))])
    return [np.stack(x) for x in zip(*results)]


def check(result: Expansion, wanted: list[np.ndarray], dtype: str) -> None:
    tokens, log_prob, chosen, frontier = result
    *exact, pair = (tokens, chosen, frontier.tokens, frontier.feature, frontier.ancestors), frontier.pair
    wanted_exact = [wanted[i] for i in (0, 2, 3, 5, 6)]
    for got, want in zip(exact[0], wanted_exact, strict=True):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64))
    for got, want in ((log_prob, wanted[1]), (frontier.log_prob, wanted[4])):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=LOG_PROB_BOUND)
    assert error(pair, np.asarray(wanted[7], np.float64)) < PAIR_BOUND[dtype]
    kinds = [tokens.dtype, chosen.dtype, frontier.tokens.dtype, log_prob.dtype, frontier.log_prob.dtype]
    assert kinds == [jnp.int32] * 3 + [jnp.float32] * 2
    assert frontier.feature.dtype == pair.dtype == jnp.dtype(dtype)
    assert frontier.ancestors.dtype == jnp.bool_


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_reference(name, dtype):
    case = CASES[name]
    arguments = case.arguments(dtype)
    check(jax.jit(partial(draft_expand, **case.options))(*arguments), truth(case, arguments), dtype)


@pytest.mark.parametrize(("name", "dtype"), [*zip(CASES, itertools.cycle(DTYPES))])
def test_interpreted(name, dtype):
    case = CASES[name]
    arguments = case.arguments(dtype)
    run = jax.jit(partial(triton.draft_expand, **case.options, tile=SMALL, interpret=True))
    check(run(*arguments), truth(case, arguments), dtype)


@pytest.mark.parametrize("branch", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("level", [0, 3])
def test_interpreted_equals_the_reference(level, rows, branch):
    """With the tile of the table; the last chunk holds one logit."""
    case = Case(level=level, rows=rows, branch=branch, vocabulary=4097, target=5000)
    arguments = case.arguments("bfloat16")
    wanted = jax.tree.leaves(jax.jit(partial(reference.draft_expand, **case.options))(*arguments))
    result = jax.jit(partial(triton.draft_expand, **case.options, interpret=True))(*arguments)
    check(result, wanted, "bfloat16")


def test_the_best_logits_may_lie_anywhere():
    """All in one chunk, one in each, and in the last place."""
    case = Case(branch=4, level=1, vocabulary=513, target=513)
    arguments = case.arguments("float32")
    places = [[130, 131, 200, 255], [0, 128, 256, 512], [512, 511, 384, 383], [127, 128, 129, 1]]
    logits = np.array(arguments[0])
    for node, of_node in enumerate(places):
        logits[0, node, of_node] = [40, 39, 39, 38]
    arguments[0] = jnp.asarray(logits)
    wanted = truth(case, arguments)
    assert sorted(wanted[0][0]) == sorted(np.ravel(places))
    for run in (reference.draft_expand, partial(triton.draft_expand, tile=SMALL, interpret=True)):
        check(jax.jit(partial(run, **case.options))(*arguments), wanted, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pair_is_that_of_the_drafter(dtype):
    config = EagleConfig(
        **{"hidden_size": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24},
        **{"target_hidden_size": 40, "target_num_hidden_layers": 2, "target_vocab_size": 300, "norm_eps": EPS},
    )
    case, network = Case(width=40), weights(config)
    arguments = case.arguments("float32")
    arguments[1] = arguments[1].astype(dtype)  # the target's embedding may be wider than the drafter's hidden states
    arguments[7:9] = (network[f"{name}_norm"]["scale"] for name in ("embedding", "hidden"))
    for run in (reference.draft_expand, partial(triton.draft_expand, interpret=True)):
        frontier = jax.jit(partial(run, **case.options))(*arguments).frontier
        embedded = arguments[6][frontier.tokens].astype(dtype)
        wanted = jax.jit(partial(pair_input, network, config))(embedded, frontier.feature)
        assert wanted.dtype == frontier.pair.dtype
        assert error(frontier.pair, np.asarray(wanted, np.float64)) < PAIR_BOUND[dtype]
        if dtype == "bfloat16":  # of an embedding that is not rounded first, half of the elements would differ
            assert (frontier.pair != wanted).mean() < 0.02


def test_what_is_not_finite_reads_what_exists():
    """Interpretation would not crash: the tokens and places are what counts."""
    case = Case(rows=3, level=1)
    arguments = case.arguments("float32")
    arguments[0] = arguments[0].at[0].set(jnp.nan).at[1, 2].set(-jnp.inf)
    arguments[2] = arguments[2].at[2].set(jnp.nan)
    result = jax.jit(partial(triton.draft_expand, **case.options, tile=SMALL, interpret=True))(*arguments)
    for tokens in (result.tokens, result.frontier.tokens):
        assert bool(((tokens >= 0) & (tokens < case.vocabulary)).all())
    assert bool(((result.chosen >= 0) & (result.chosen < case.branch**2)).all())


def test_the_best_children_are_found_without_sorting_the_vocabulary():
    text = jax.jit(partial(draft_expand, branch=4)).lower(*Case().arguments("float32")).compile().as_text()
    assert "TopK" in text
    assert not re.search(r"\[[\d,]*300\]\S* sort\(", text)


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("branch", [1, 4])
def test_lowers_to_two_launches(branch, rows, dtype):
    case = replace(REAL, level=3, branch=branch, rows=rows)
    arguments = [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.arguments(dtype)]
    for tile in (pick(rows * case.nodes, case.vocabulary, on=TUNED_ON), SMALL):
        text = lower_for_cuda(partial(triton.draft_expand, **case.options, tile=tile), *arguments)
        assert text.count(TRITON_CALL) == 2
        assert beside_kernels(text) <= {"reshape", "broadcast_in_dim"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_odd_shapes_lower(name, dtype):
    case = CASES[name]
    assert TRITON_CALL in lower_for_cuda(partial(triton.draft_expand, **case.options), *case.arguments(dtype))


def test_a_large_vocabulary_has_no_more_chunks():
    shipped = [rule.tile for rules in TABLE.values() for rule in rules]
    for vocabulary in (1, 32000, 151936, 262144, 10**6):
        for nodes in (1, 4, 8, 256):
            tile = pick(nodes, vocabulary, on=TUNED_ON)
            assert tile.chunk * MAX_CHUNKS >= vocabulary
            assert vocabulary > 10**5 or tile in shipped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 1000}, "chunk must be a power of two of 128 or more, got 1000"),
        ({"chunk": 64}, "chunk must be a power of two of 128 or more, got 64"),
        ({"warps": 3}, r"warps must be one of \(1, 2, 4, 8\), got 3"),
        ({"child_warps": 16}, r"child_warps must be one of \(1, 2, 4, 8\), got 16"),
    ],
)
def test_tiles_check_themselves(options, message):
    with pytest.raises(ValueError, match=message):
        Tile(**options)


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": spec(2, 50)}, "logits must be [B, T, V], got [2, 50]"),
        ({"logits": spec(2, 3, 50)}, "logits must hold 1 node or branch=4 nodes a row, got 3"),
        ({"logits": spec(2, 4, 61)}, "logits must have at most embedding's 60 tokens, got 61"),
        ({"logits": spec(2, 4, 50, dtype="bfloat16")}, "logits must be float32, got bfloat16"),
        ({"hidden": spec(2, 4)}, "hidden must be [B, T, D], got [2, 4]"),
        ({"hidden": spec(2, 3, 16)}, "hidden must be [B, T, D] = [2, 4, 16], got [2, 3, 16]"),
        ({"hidden": spec(2, 4, 16, dtype="float16")}, "hidden must be bfloat16 or float32, got float16"),
        ({"log_prob": spec(2, 1)}, "log_prob must be [B, T] = [2, 4], got [2, 1]"),
        ({"log_prob": spec(2, 4, dtype="bfloat16")}, "log_prob must be float32, got bfloat16"),
        ({"ancestors": spec(2, 12, dtype="bool")}, "ancestors must be [B, T, S], got [2, 12]"),
        ({"ancestors": spec(1, 4, 12, dtype="bool")}, "ancestors must be [B, T, S] = [2, 4, 12], got [1, 4, 12]"),
        ({"ancestors": spec(2, 4, 0, dtype="bool")}, "ancestors must have 1 slot or more, got 0"),
        ({"ancestors": spec(2, 4, 12)}, "ancestors must be bool, got float32"),
        ({"level": spec(2, dtype="int32")}, "level must be [] = [], got [2]"),
        ({"level": spec()}, "level must be int32, got float32"),
        ({"level": 4}, "level must be 0 to 3, as ancestors has 12 slots, got 4"),
        ({"level": -1}, "level must be 0 to 3, as ancestors has 12 slots, got -1"),
        ({"level": 0}, "logits must hold the root alone at level 0, and branch=4 nodes below it"),
        ({"temperature": spec(1)}, "temperature must be [] = [], got [1]"),
        ({"temperature": spec(dtype="bfloat16")}, "temperature must be float32, got bfloat16"),
        ({"embedding": spec(60)}, "embedding must be [Vt, Dt], got [60]"),
        ({"embedding": spec(60, 20, dtype="int8")}, "embedding must be bfloat16 or float32, got int8"),
        ({"embedding_scale": spec(16)}, "embedding_scale must be [Dt] = [20], got [16]"),
        ({"hidden_scale": spec(20)}, "hidden_scale must be [D] = [16], got [20]"),
        ({"draft_to_target": spec(60, dtype="int32")}, "draft_to_target must be [V] = [50], got [60]"),
        ({"draft_to_target": spec(50)}, "draft_to_target must be int32, got float32"),
        ({"branch": 0}, "branch must be 1 to 8, got 0"),
        ({"branch": 9}, "branch must be 1 to 8, got 9"),
        ({"branch": 4, "logits": spec(2, 4, 3)}, "branch must be 1 to 3, got 4"),
        ({"implementation": "mosaic_gpu"}, "implementation 'mosaic_gpu' is not written for draft_expand yet"),
    ],
)
def test_errors_name_the_argument(changes, message):
    arrays = {"logits": spec(2, 4, 50), "hidden": spec(2, 4, 16), "log_prob": spec(2, 4), "temperature": spec()}
    arrays |= {"ancestors": spec(2, 4, 12, dtype="bool"), "embedding": spec(60, 20), "embedding_scale": spec(20)}
    options = {"level": spec(dtype="int32"), "hidden_scale": spec(16), "branch": 4} | changes
    arrays |= {name: value for name, value in options.items() if isinstance(value, jax.ShapeDtypeStruct)}
    options = {name: value for name, value in options.items() if name not in arrays}
    with pytest.raises(ValueError) as raised:
        jax.eval_shape(lambda arrays: draft_expand(**arrays, **options), arrays)
    assert message in str(raised.value)


@pytest.mark.parametrize("level", [0, 3])
def test_a_level_may_be_a_number(level):
    case = Case(level=level)
    arguments = case.arguments("float32")
    run = jax.jit(lambda *x: draft_expand(*x[:4], level, *x[5:], **case.options))
    check(run(*arguments), truth(case, arguments), "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("branch", [1, 4, 8])
@pytest.mark.parametrize("level", [0, 3])
def test_on_a_gpu(level, branch, rows, dtype):
    """Parity with the reference for every tile, and the same bits in every run."""
    case = replace(REAL, level=level, branch=branch, rows=rows)
    arguments = case.arguments(dtype)
    wanted = jax.tree.leaves(jax.jit(partial(reference.draft_expand, **case.options))(*arguments))
    shipped = {rule.tile for rules in TABLE.values() for rule in rules} | {Tile(chunk=4096, warps=8, child_warps=8)}
    for tile in shipped:
        run = jax.jit(partial(triton.draft_expand, **case.options, tile=tile))
        result = run(*arguments)
        check(result, wanted, dtype)
        for _ in range(3):
            for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(run(*arguments)), strict=True):
                assert (x == y).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_odd_shapes_on_a_gpu(name, dtype):
    case = CASES[name]
    arguments = case.arguments(dtype)
    for tile in (None, SMALL):
        run = jax.jit(partial(triton.draft_expand, **case.options, tile=tile))
        check(run(*arguments), truth(case, arguments), dtype)
