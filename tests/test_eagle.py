"""The EAGLE drafter against a NumPy network that is run pair by pair from scratch."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_weights import weights
from specla_jax.config import DraftConfig, Dtype
from specla_jax.drafters import Accepted, Context, EagleConfig, EagleDrafter, EagleStep, NgramDrafter
from specla_jax.drafters.eagle_layer import eagle_forward, fuse_features
from specla_jax.errors import UserError

D, V, CAPACITY, DEPTH, NODES = 16, 32, 40, 6, 12
CONFIG = EagleConfig(
    hidden_size=D,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=24,
    target_hidden_size=D,
    target_num_hidden_layers=2,
    target_vocab_size=V,
    window=5,
    rope_theta=50.0,
)
REDUCED = replace(CONFIG, hidden_size=12, draft_vocab_size=10, feature_norm=False, window=64, temperature=0.7)
DRAFT = DraftConfig(depth=DEPTH, branch=1, nodes=NODES)


def build(
    config: EagleConfig, draft: DraftConfig = DRAFT, dtype: Dtype = "float32", tied: bool = False, packed: bool = False
):
    """A drafter and its params."""
    step = EagleStep(config=config, implementation="reference") if packed else None
    drafter = EagleDrafter(draft=draft, config=config, dtype=dtype, step=step)
    eagle = weights(config)
    rng = np.random.default_rng(3)
    target = {"embeddings": {"embedding": jnp.asarray(rng.normal(size=(V, D)), jnp.float32)}}
    if not tied:
        target["lm_head"] = {"kernel": jnp.asarray(rng.normal(size=(D, V)), jnp.float32)}
    return drafter, drafter.bind(eagle, target)


def context_of(tokens: np.ndarray, lengths: list[int]) -> Context:
    known = np.arange(CAPACITY) < np.asarray(lengths)[:, None]
    return Context(
        tokens=jnp.asarray(np.where(known, tokens, V - 1), jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        prompt_length=jnp.asarray(lengths, jnp.int32),
        active=jnp.ones(len(lengths), bool),
    )


class Reference:
    """One row of the network in float64, a pair at a time."""

    def __init__(self, params: dict, config: EagleConfig) -> None:
        self.params = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), params)
        self.eagle, self.config = self.params["eagle"], config
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = self.eagle[name]["scale"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * scale

    def fuse(self, states: np.ndarray | None) -> np.ndarray:
        if states is None:
            return np.zeros(self.config.hidden_size)
        parts = states.astype(np.float64).reshape(3, D)
        parts = self.norm(parts, "feature_norm") if self.config.feature_norm else parts
        return parts.reshape(-1) @ self.eagle["fc"]["kernel"]

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        half = x.shape[-1] // 2
        turn = np.exp(1j * position * self.config.rope_theta ** (-np.arange(half) / half))
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def push(self, feature: np.ndarray, token: int) -> np.ndarray:
        """Appends a pair and returns its hidden state."""
        config, attn = self.config, self.eagle["attn"]
        embedded = self.norm(self.params["embedding"][token], "embedding_norm")
        x = np.concatenate([embedded, self.norm(feature, "hidden_norm")])
        heads = {n: (x @ attn[f"{n}_proj"]["kernel"]).reshape(-1, config.head_dim) for n in "qkv"}
        at = len(self.pairs)
        self.pairs.append((self.rotate(heads["k"], at), heads["v"]))
        near = self.pairs[-config.window :]
        group = config.num_heads // config.num_kv_heads
        mixed = []
        for head, query in enumerate(self.rotate(heads["q"], at)):
            score = np.array([key[head // group] @ query for key, _ in near]) / np.sqrt(config.head_dim)
            weight = np.exp(score - score.max())
            mixed.append(sum(w * value[head // group] for w, (_, value) in zip(weight, near)) / weight.sum())
        hidden = feature + np.concatenate(mixed) @ attn["o_proj"]["kernel"]
        gate, up = np.split(self.norm(hidden, "mlp_norm") @ self.eagle["mlp"]["gate_up_proj"]["kernel"], 2)
        return hidden + (gate / (1 + np.exp(-gate)) * up) @ self.eagle["mlp"]["down_proj"]["kernel"]

    def text(self, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Hidden states of the pairs of a text; ``features`` are the target's raw states."""
        self.pairs = []
        states = [None, *features[: len(tokens) - 1]]
        return np.stack([self.push(self.fuse(state), token) for state, token in zip(states, tokens)])

    def log_probs(self, hidden: np.ndarray) -> dict[int, float]:
        """By target token."""
        own = self.config.draft_vocab_size is not None
        head = self.eagle["lm_head"]["kernel"] if own else self.params.get("head", self.params["embedding"].T)
        logits = self.norm(hidden, "norm") @ head / self.config.temperature
        logits = logits - logits.max()
        values = logits - np.log(np.exp(logits).sum())
        tokens = self.eagle["draft_to_target"].astype(int) if own else np.arange(V)
        return dict(zip(tokens.tolist(), values.tolist()))


def random_text(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (rows, CAPACITY)), rng.normal(size=(rows, CAPACITY, 3 * D)).astype(np.float32)


def accepted_of(tokens: np.ndarray, features: np.ndarray, lengths: list[int], counts: list[int], seed: int) -> Accepted:
    """Commits the next ``counts`` tokens of each row along a path of scattered nodes; the other nodes hold noise."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    path = np.full((rows, DEPTH + 1), -1, np.int32)
    committed = rng.integers(0, V, (rows, DEPTH + 1)).astype(np.int32)
    states = rng.normal(size=(rows, NODES, 3 * D)).astype(np.float32)
    for row, (length, count) in enumerate(zip(lengths, counts)):
        nodes = [0, *sorted(rng.choice(np.arange(1, NODES), DEPTH, replace=False))][:count]
        path[row, :count] = nodes
        committed[row, :count] = tokens[row, length : length + count]
        # Node path[j] stands at position length - 1 + j.
        states[row, nodes] = features[row, length - 1 : length - 1 + count]
    after = [length + count for length, count in zip(lengths, counts)]
    return Accepted(
        path=jnp.asarray(path),
        count=jnp.asarray(counts, jnp.int32),
        tokens=jnp.asarray(committed),
        features=jnp.asarray(states),
        context=context_of(tokens, after),
    )


@partial(jax.jit, static_argnums=0)
def init(drafter, params, context, features):
    return drafter.init(params, context, features)


@partial(jax.jit, static_argnums=0)
def observe(drafter, params, carry, accepted):
    return drafter.observe(params, carry, accepted)


@partial(jax.jit, static_argnums=0)
def propose(drafter, params, carry, context):
    return drafter.propose(params, carry, context)


@pytest.mark.parametrize("config", [CONFIG, REDUCED])
def test_forward_equals_reference(config):
    _, params = build(config)
    tokens, features = random_text(1)
    expected = Reference(params, config).text(tokens[0], features[0])
    fused = fuse_features(params["eagle"], config, jnp.asarray(features), "float32")
    shifted = jnp.pad(fused, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    hidden = eagle_forward(params["eagle"], config, params["embedding"][tokens], shifted)
    np.testing.assert_allclose(hidden[0], expected, atol=1e-4, rtol=1e-4)
    short = eagle_forward(params["eagle"], config, params["embedding"][tokens], shifted, jnp.array([9]))
    np.testing.assert_allclose(short[0, :9], expected[:9], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", [CONFIG, REDUCED])
def test_observed_in_ragged_steps_equals_from_scratch(config, packed):
    drafter, params = build(config, packed=packed)
    lengths = [1, 4, 13]
    tokens, features = random_text(3)
    reference = Reference(params, config)
    hidden = [reference.text(tokens[row], features[row]) for row in range(3)]

    padded = features.copy()
    for row, length in enumerate(lengths):
        padded[row, length - 1 :] = np.nan  # prefill gives no state for the root, nor beyond
    carry = init(drafter, params, context_of(tokens, lengths), jnp.asarray(padded[:, :16]))
    # The whole ring is written over in one round (7 tokens, window 5); rows stop at different rounds.
    for number, counts in enumerate([[1, 7, 2], [3, 1, 7], [7, 0, 1], [2, 0, 5], [7, 0, 0]]):
        for row in range(3):
            np.testing.assert_allclose(carry.hidden[row], hidden[row][lengths[row] - 1], atol=2e-4, rtol=1e-4)
        before = carry
        accepted = accepted_of(tokens, features, lengths, counts, seed=number)
        carry = observe(drafter, params, carry, accepted)
        lengths = [length + count for length, count in zip(lengths, counts)]
        for row in (row for row in range(3) if counts[row] == 0):
            for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(carry)):
                np.testing.assert_array_equal(old[row], new[row])
    assert lengths == [21, 12, 28]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("config", "depth", "branch", "tied"),
    [(CONFIG, 3, 2, True), (REDUCED, 3, 3, False), (CONFIG, 10, 1, False), (CONFIG, 1, 4, False)],
)
def test_proposed_log_probs_equal_from_scratch(config, depth, branch, tied, packed):
    pool = 1 + branch + (depth - 1) * branch**2
    drafter, params = build(config, DraftConfig(depth=depth, branch=branch, nodes=pool), tied=tied, packed=packed)
    lengths = [1, 12]
    tokens, features = random_text(2, seed=3)
    context = context_of(tokens, lengths)
    carry = init(drafter, params, context, jnp.asarray(features[:, :12]))
    tree, after = propose(drafter, params, carry, context)
    assert after is not None
    assert np.asarray(tree.num_nodes).tolist() == [pool, pool]

    for row, length in enumerate(lengths):
        reference = Reference(params, config)
        root_hidden = reference.text(tokens[row, :length], features[row])[-1]
        committed = list(reference.pairs)

        def hidden_of(path: tuple[int, ...], reference=reference, committed=committed, hidden=root_hidden):
            reference.pairs = list(committed)
            for token in path:
                hidden = reference.push(hidden, token)
            return hidden

        paths: list[tuple[int, ...]] = [()]
        children: dict[tuple[int, ...], list[int]] = {}
        q: dict[tuple[int, ...], float] = {(): 0.0}
        for node in range(1, pool):
            parent = paths[int(tree.parents[row, node])]
            token = int(tree.tokens[row, node])
            paths.append((*parent, token))
            children.setdefault(parent, []).append(token)
            q[paths[-1]] = q[parent] + reference.log_probs(hidden_of(parent))[token]
            assert float(tree.log_prob[row, node]) == pytest.approx(q[paths[-1]], abs=1e-3, rel=1e-4)
        for parent, drafted in children.items():
            step = reference.log_probs(hidden_of(parent))
            assert drafted == sorted(step, key=lambda token, step=step: -step[token])[:branch]
        for level in range(1, depth):
            level_paths = [path for path in paths if len(path) == level]
            best = sorted(level_paths, key=lambda path: -q[path])[:branch]
            assert {path for path in children if len(path) == level} == set(best)


def test_the_best_children_are_found_without_sorting_the_vocabulary():
    drafter, params = build(CONFIG, DraftConfig(depth=3, branch=4, nodes=16))
    text = jax.jit(drafter._best_children).lower(params, jnp.zeros((1, 4, D))).compile().as_text()
    assert "TopK" in text
    assert " sort(" not in text


def test_max_positions_stops_drafting_only():
    config = replace(CONFIG, max_positions=10)
    drafter, params = build(config, DraftConfig(depth=3, branch=1, nodes=4))
    tokens, features = random_text(3)
    context = context_of(tokens, [7, 8, 30])
    tree, _ = propose(drafter, params, init(drafter, params, context, jnp.asarray(features)), context)
    assert np.asarray(tree.num_nodes).tolist() == [4, 1, 1]
    assert np.asarray(tree.tokens[:, 0]).tolist() == [tokens[0, 6], tokens[1, 7], tokens[2, 29]]


def test_window_shorter_than_the_text_keeps_drafting():
    drafter, params = build(CONFIG, DraftConfig(depth=3, branch=1, nodes=4))
    tokens, features = random_text(3)
    context = context_of(tokens, [2, 20, CAPACITY])
    tree, _ = propose(drafter, params, init(drafter, params, context, jnp.asarray(features)), context)
    assert np.asarray(tree.num_nodes).tolist() == [4, 4, 4]
    assert np.isfinite(np.asarray(tree.log_prob)).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_carry_keeps_shapes_and_dtypes(dtype, packed):
    draft = DraftConfig(depth=DEPTH, branch=2, nodes=NODES, prune_tau=3.0)
    tokens, features = random_text(2)
    context = context_of(tokens, [3, 9])
    accepted = accepted_of(tokens, features, [3, 9], [2, 0], seed=0)
    ngram = (NgramDrafter(draft=draft), ())
    eagles = (build(config, draft, dtype, packed=packed) for config in (CONFIG, REDUCED))
    for drafter, params in (*eagles, ngram):
        carry = jax.eval_shape(partial(init, drafter), params, context, jnp.asarray(features))
        tree, proposed = jax.eval_shape(partial(propose, drafter), params, carry, context)
        observed = jax.eval_shape(partial(observe, drafter), params, proposed, accepted)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), (proposed, observed)) == jax.tree.map(
            lambda x: (x.shape, x.dtype), (carry, carry)
        )
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(tree)] == [
            ((2, NODES), jnp.int32),
            ((2, NODES), jnp.int32),
            ((2,), jnp.int32),
            ((2, NODES), jnp.float32),
        ]


def test_bfloat16_is_near_float32():
    tokens, features = random_text(2)
    context = context_of(tokens, [3, 9])
    hidden = []
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        drafter, params = build(CONFIG, dtype=dtype)
        carry = init(drafter, params, context, jnp.asarray(features))
        assert carry.key.dtype == carry.hidden.dtype == dtype
        hidden.append(np.asarray(carry.hidden, np.float32))
    scale = np.abs(hidden[0]).max()
    assert 1e-5 * scale < np.abs(hidden[0] - hidden[1]).max() < 0.05 * scale


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be a positive integer, got 0"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads=3, got 4"),
        ({"hidden_size": 12}, "hidden_size must be 16 to use the target's head, got 12"),
        ({"draft_vocab_size": 33}, "draft_vocab_size must be at most 32, got 33"),
        ({"max_positions": 1.5}, "max_positions must be null or a positive integer, got 1.5"),
        ({"norm_eps": 0.0}, "rope_theta and norm_eps must be positive"),
    ],
)
def test_config_checks_itself(change, message):
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **change)


def test_branch_above_the_draft_vocabulary_is_refused():
    with pytest.raises(UserError, match="branch must be at most the draft vocabulary, 10"):
        EagleDrafter(draft=DraftConfig(depth=2, branch=11, nodes=12), config=REDUCED)


def test_branch_above_what_the_kernels_take_is_refused():
    step = EagleStep(config=CONFIG, implementation="reference")
    with pytest.raises(UserError, match="branch must be at most 8 over packed weights, got 9"):
        EagleDrafter(draft=DraftConfig(depth=2, branch=9, nodes=12), config=CONFIG, step=step)
