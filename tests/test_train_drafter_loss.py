"""The training objective: packed documents do not leak, the unrolled drafter is the one that decodes, the losses."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train_drafter.drafter_loss as drafter_loss
from eagle_weights import weights
from reference import Reference, load_reference
from specla_jax.config import DraftConfig
from specla_jax.drafters import Context, EagleConfig, EagleDrafter
from specla_jax.drafters.eagle import _Frontier
from specla_jax.drafters.eagle_layer import draft_logits
from specla_jax.model import GatedDeltaNetLM, call
from specla_jax.state import RecurrentState
from train_drafter.documents import Documents
from train_drafter.drafter_loss import DraftLoss, TargetView, reached, target_distribution
from train_drafter.evaluation import rounds_of
from train_drafter.objective import Frozen, Objective
from train_drafter.packing import Batch, pack
from train_drafter.target import hidden_states

# For what the tests jit themselves.
pytestmark = pytest.mark.filterwarnings("ignore:A large amount of constants")

STEPS, WINDOW, VOCAB, SIZE = 4, 5, 96, 64
CONFIG = EagleConfig(
    hidden_size=SIZE,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    target_hidden_size=SIZE,
    target_num_hidden_layers=2,
    target_vocab_size=VOCAB,
    window=WINDOW,
    feature_layers=(0, 1),
)
REDUCED = replace(CONFIG, hidden_size=32, draft_vocab_size=40)


def split(config: EagleConfig) -> tuple[dict, jax.Array | None]:
    params = dict(weights(config))
    return params, params.pop("draft_to_target", None)


def rows_of(*sizes: int, seed: int = 0, length: int = 24) -> Batch:
    rng = np.random.default_rng(seed)
    rows = pack(Documents.of((rng.integers(0, VOCAB, size), [True] * size) for size in sizes), length)
    return rows.batch(np.arange(len(rows)))


def objective_of(model, config: EagleConfig = CONFIG, **changes) -> Objective:
    dtype = changes.pop("dtype", "float32")
    network = GatedDeltaNetLM(model.config, dtype)
    return Objective(**{"model": network, "config": config, "steps": STEPS, "step_weight": 0.7, **changes})


@pytest.mark.parametrize("name", ["base", "no-conv", "gva"])
def test_packed_documents_are_read_as_if_alone(name):
    model = load_reference(name).model
    network = GatedDeltaNetLM(model.config, "float32", (1, 0))
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, VOCAB, size).astype(np.int32) for size in (70, 2, 1, 55)]  # chunks are of 64

    @jax.jit
    def read(tokens, starts):
        hidden, outputs = hidden_states(network, model.params, tokens, starts=starts, outputs_of=(1, 0))
        return jnp.concatenate([hidden, *outputs], axis=-1)[0]

    def packed(parts):
        tokens = np.concatenate(parts)[None]
        starts = np.concatenate([np.arange(len(part)) == 0 for part in parts])[None]
        return np.asarray(read(tokens, starts))

    @jax.jit
    def alone(tokens):
        hidden, features, _ = call(network, model.params, "prefill", tokens, None, empty)
        return jnp.concatenate([hidden, features], axis=-1)[0]

    empty = RecurrentState.zeros(model.config, 1, "float32")
    whole = packed(documents)
    ends = np.cumsum([len(part) for part in documents])
    for part, end in zip(documents, ends):
        expected = alone(np.pad(part, (0, 70 - len(part)))[None])[: len(part)]
        np.testing.assert_allclose(whole[end - len(part) : end], expected, atol=1e-4, rtol=1e-4)
    for changed in range(4):
        others = [part if i != changed else (part + 1) % VOCAB for i, part in enumerate(documents)]
        again = packed(others)
        same = np.concatenate([np.full(len(part), i != changed) for i, part in enumerate(documents)])
        np.testing.assert_array_equal(again[same], whole[same])
        assert (again[~same] != whole[~same]).any(axis=-1).all()


@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["full", "reduced"])
def test_drafts_of_one_document_do_not_depend_on_another(base: Reference, config):
    params, mapping = split(config)
    objective = objective_of(base.model, config)
    run = jax.jit(lambda batch: objective.unrolled(params, Frozen(base.model.params, mapping), batch)[0])
    batch = rows_of(11, 9, 4)
    drafted = np.asarray(run(batch))
    starts = np.flatnonzero(batch.positions[0] == 0)
    assert len(starts) == 3  # one row of three documents, no padding
    for first, last in zip(starts, [*starts[1:], 24]):
        tokens = batch.tokens.copy()
        tokens[0, first:last] = (tokens[0, first:last] + 1) % VOCAB
        again = np.asarray(run(replace(batch, tokens=tokens)))
        mine = np.arange(24)[None] >= first
        mine &= np.arange(24)[None] < last
        np.testing.assert_array_equal(again[:, ~mine], drafted[:, ~mine])


@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["full", "reduced"])
def test_unrolled_steps_are_the_levels_that_decoding_grows(base: Reference, config):
    """Along the text's own tokens, from every root: hidden states, and the best child with its log-probability."""
    params, mapping = split(config)
    objective = objective_of(base.model, config)
    batch = rows_of(13, 11)  # the second document does not begin the row; both are longer than the window
    place = int(np.flatnonzero(batch.positions[0] == 0)[1])
    size = int(batch.positions[0, place:].max()) + 1
    drafted, view, valid, _ = jax.jit(lambda: objective.unrolled(params, Frozen(base.model.params, mapping), batch))()
    log_probs = jax.nn.log_softmax(draft_logits(params, config, drafted, view.draft_kernel(params)), axis=-1)
    tokens = np.asarray(batch.tokens)[0, place : place + size]

    drafter = EagleDrafter(draft=DraftConfig(depth=STEPS, branch=1, nodes=STEPS + 1), config=config)
    bound = drafter.bind(weights(config), base.model.params)
    network = GatedDeltaNetLM(base.model.config, "float32", config.feature_layers)
    state = RecurrentState.zeros(base.model.config, 1, "float32")
    _, features, _ = call(network, base.model.params, "prefill", tokens[None], None, state)
    capacity = jnp.asarray(tokens[None])
    init = jax.jit(lambda length: drafter.init(bound, Context(capacity, length, length, length > 0), features[:, :-1]))

    @jax.jit
    def level(carry, length, frontier, depth, token):
        grown, (child, log_prob, _) = drafter._grow(bound, carry, length, frontier, depth)
        return replace(grown, tokens=token, log_prob=jnp.zeros((1, 1))), child, log_prob

    propose = jax.jit(
        lambda carry, length: drafter.propose(bound, carry, Context(capacity, length, length, length > 0))
    )
    for root in range(size):
        length = jnp.array([root + 1])
        carry = init(length)
        np.testing.assert_allclose(carry.hidden[0], drafted[0, 0, place + root], atol=2e-4, rtol=1e-4)
        tree, _ = propose(carry, length)
        step_1 = np.asarray(log_probs)[0, 0, place + root]
        best = int(step_1.argmax())
        assert int(tree.tokens[0, 1]) == (best if mapping is None else int(mapping[best]))
        assert float(tree.log_prob[0, 1]) == pytest.approx(float(step_1.max()), abs=1e-4)

        slots = jnp.zeros((1, STEPS - 1, config.num_kv_heads, config.head_dim))
        frontier = _Frontier(
            tokens=capacity[:, root + 1 : root + 2],
            feature=carry.hidden[:, None],
            log_prob=jnp.zeros((1, 1)),
            pool_index=jnp.ones((1, 1), jnp.int32),
            ancestors=jnp.zeros((1, 1, STEPS - 1), bool),
            key=slots,
            value=slots,
        )
        for depth in range(1, min(STEPS, size - root)):
            here = place + root + depth
            following = capacity[:, min(root + depth + 1, size - 1)][:, None]
            frontier, child, log_prob = level(carry, length, frontier, jnp.int32(depth), following)
            np.testing.assert_allclose(frontier.feature[0, 0], drafted[depth, 0, here], atol=2e-4, rtol=1e-4)
            expected = np.asarray(log_probs)[depth, 0, here]
            assert float(log_prob[0, 0]) == pytest.approx(float(expected.max()), abs=1e-4)
            best = int(expected.argmax())
            assert int(child[0, 0]) == (best if mapping is None else int(mapping[best]))
            assert bool(valid[depth, 0, here]) == bool(batch.counted[0, here])


def direct_loss(kind, config, params, hidden, view, weights_):
    """The formulas, on all logits at once, for automatic differentiation."""
    logits = draft_logits(params, config, hidden, view.draft_kernel(params))
    p = jax.nn.softmax(view.hidden @ view.head, axis=-1)
    if view.draft_to_target is not None:
        p = p[..., view.draft_to_target]
    mass = p.sum(axis=-1, keepdims=True)
    q = jax.nn.softmax(logits, axis=-1)
    p = p / mass
    each = (p * jnp.log(p / q)).sum(-1) if kind == "kl" else -jnp.log(jnp.minimum(p, q).sum(-1))
    return (weights_ * mass[..., 0] * each).sum()


@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["full", "reduced"])
def test_loss_and_gradient_are_those_of_the_formula(kind, config, monkeypatch):
    params, mapping = split(config)
    rng = np.random.default_rng(5)
    hidden = jnp.asarray(rng.normal(size=(3, 2, 12, config.hidden_size)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(SIZE, VOCAB)) * 0.3, jnp.float32)
    target_hidden = jnp.asarray(rng.normal(size=(2, 12, SIZE)), jnp.float32)
    view = TargetView(target_hidden, head, mapping, head if mapping is None else None)
    weights_ = jnp.asarray(rng.uniform(size=(3, 2, 12)) * (rng.uniform(size=(3, 2, 12)) > 0.3), jnp.float32)
    monkeypatch.setattr(drafter_loss, "_BYTES", 4 * 3 * 2 * config.vocab_size * 5)  # pieces of 4 positions

    loss = DraftLoss(config, kind, "float32")
    run = jax.jit(jax.value_and_grad(lambda *args: 2 * loss(*args, view, weights_)[0], argnums=(0, 1)))
    value, gradients = run(params, hidden)
    direct = jax.jit(jax.value_and_grad(partial(direct_loss, kind, config), argnums=(0, 1)))
    wanted, wanted_gradients = direct(params, hidden, view, weights_)
    assert float(value) == pytest.approx(2 * float(wanted), rel=1e-5)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, 2 * want, atol=1e-5, rtol=1e-4), gradients, wanted_gradients
    )
    _, stats = jax.jit(loss)(params, hidden, view, jnp.zeros_like(weights_))
    logits = draft_logits(params, config, hidden, view.draft_kernel(params))
    best = np.asarray(logits).argmax(-1)
    best = best if mapping is None else np.asarray(mapping)[best]
    np.testing.assert_array_equal(stats.match, best == np.asarray(target_hidden @ head).argmax(-1))
    p, q = jax.nn.softmax(target_hidden @ head), jax.nn.softmax(logits)
    p = p if mapping is None else p[..., mapping]
    np.testing.assert_allclose(stats.overlap, jnp.minimum(p, q).sum(-1), atol=1e-5)


def test_losses_vanish_where_the_drafter_agrees():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32)
    mapping = jnp.array([1, 4, 6])
    log_p, log_mass, place = target_distribution(logits, mapping)
    np.testing.assert_allclose(jnp.exp(log_p).sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(jnp.exp(log_mass), jax.nn.softmax(logits)[:, mapping].sum(-1), atol=1e-6)
    best = np.asarray(logits).argmax(-1)
    assert [int(x) for x in place] == [list(np.asarray(mapping)).index(b) if b in (1, 4, 6) else -1 for b in best]


def test_bf16_loss_is_near_float32(base: Reference):
    config = REDUCED
    params, mapping = split(config)
    frozen, batch = Frozen(base.model.params, mapping), rows_of(24, 13, 9)
    losses, gradients = [], []
    for dtype in ("float32", "bfloat16"):
        objective = objective_of(base.model, config, dtype=dtype, steps=2)
        (loss, _), grads = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(params, frozen, batch)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
        losses.append(float(loss))
        gradients.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert np.linalg.norm(gradients[1] - gradients[0]) < 0.1 * np.linalg.norm(gradients[0])


def test_rows_that_are_not_finite_count_nowhere(base: Reference):
    params, _ = split(CONFIG)
    run = jax.jit(jax.value_and_grad(objective_of(base.model, steps=2).loss, has_aux=True))
    batch = rows_of(24, 24)
    tokens = np.array(batch.tokens)
    tokens[tokens == 7] = 8
    tokens[1, 10] = 7
    batch = replace(batch, tokens=tokens)
    target = jax.tree.map(jnp.asarray, base.model.params)
    table = target["embeddings"]["embedding"].at[7].set(jnp.nan)
    broken = {**target, "embeddings": {"embedding": table}}
    (loss, sums), gradient = run(params, Frozen(broken), batch)
    counted = np.array(batch.counted)
    counted[1] = False
    (wanted, clean), wanted_gradient = run(params, Frozen(target), replace(batch, counted=counted))
    assert float(sums.masked_rows) == 1
    assert float(clean.masked_rows) == 0
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    assert float(sums.count[0]) == 23
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), gradient, wanted_gradient)

    # Where nothing is left to learn, the loss is zero and not NaN.
    (loss, sums), gradient = run(params, Frozen(target), replace(batch, counted=np.zeros_like(counted)))
    assert float(loss) == 0
    assert sums.summary()["predicted_accepted_length"] == 1
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


def test_loss_mask_leaves_out_what_is_not_learned(base: Reference):
    """A document's prompt changes no count: only predictions of learned tokens are scored."""
    rng = np.random.default_rng(3)
    documents = Documents.of([(rng.integers(0, VOCAB, 20), [place >= 12 for place in range(20)])])
    batch = pack(documents, 24).batch(np.array([0]))
    _, _, valid, _ = jax.jit(
        lambda: objective_of(base.model).unrolled(split(CONFIG)[0], Frozen(base.model.params), batch)
    )()
    for step in range(STEPS):
        assert np.flatnonzero(valid[step, 0]).tolist() == list(range(11, 19))


def test_acceptance_by_depth_and_rounds():
    """Depth d counts where all above is right; a perfect drafter of depth D takes D + 1 tokens a round."""
    match = np.zeros((3, 1, 10), bool)
    match[0, 0, [2, 5]] = True  # roots 2 and 5 have a right first draft
    match[1, 0, [3]] = True  # of which root 2 has a right second
    match[2, 0, [4, 6]] = True  # and a right third; that of root 4 does not count
    valid = np.arange(10)[None, None] >= np.arange(3)[:, None, None]
    before = np.asarray(reached(jnp.asarray(match), jnp.asarray(valid)))
    assert before[0].sum() == 10
    assert np.flatnonzero(before[1]).tolist() == [3, 6]
    assert np.flatnonzero(before[2]).tolist() == [4]
    assert rounds_of(match[:, 0], 0) == 7  # roots 0, 1, 2 and, three drafts later, 6 to 9
    perfect = np.ones((5, 60), bool)
    assert rounds_of(perfect, 0) == 10
    assert rounds_of(~perfect, 0) == 60
