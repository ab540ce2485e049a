"""The loop as a program, and the state it carries against the plain recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from reference import Reference
from specla_jax.config import DraftConfig
from specla_jax.drafters import ScriptedDrafter, script_chain
from specla_jax.generate import generate, prepare
from specla_jax.model import GatedDeltaNetLM
from specla_jax.state import RecurrentState, recover

DEPTH = 6
CHAIN = DraftConfig(depth=DEPTH, branch=1, nodes=DEPTH + 1)


def state_after(reference: Reference, texts: list[list[int]]) -> RecurrentState:
    """State of plain decoding: one token at a time through single-node verifications."""
    model = GatedDeltaNetLM(reference.model.config)

    @jax.jit
    def step(params, token, state):
        one = jnp.ones(1, jnp.int32)
        root = jnp.full((1, 1), -1, jnp.int32)
        _, _, factors = model.apply({"params": params}, token, root, one, state, method="verify")
        return recover(state, factors, root, one - 1)

    rows = []
    for text in texts:
        state = RecurrentState.zeros(reference.model.config, 1, "float32")
        for token in text:
            state = step(reference.model.params, jnp.full((1, 1), token, jnp.int32), state)
        rows.append(state)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *rows)


@pytest.mark.parametrize("right", range(DEPTH + 1))
def test_state_after_every_accepted_length(base: Reference, right: int) -> None:
    """S and the conv window follow the accepted path for each count, below, at and above the window's length."""
    drafter = (ScriptedDrafter(draft=CHAIN), script_chain(base.greedy, DEPTH, right))
    job = prepare(base.model, base.prompts, method="chain", drafter=drafter, max_new_tokens=25)
    carry = job.compile("generate", job.carry())(job.params, job.carry())
    texts = [prompt + output[:24] for prompt, output in zip(base.prompts, base.greedy, strict=True)]
    expected = state_after(base, texts)  # all but the newest token
    np.testing.assert_allclose(carry.state.S, expected.S, atol=2e-5)
    np.testing.assert_allclose(carry.state.conv, expected.conv, atol=2e-5)


def test_state_stops_where_the_text_stops(base: Reference) -> None:
    """Accepted nodes behind a stop token or beyond the limit are not folded in."""
    stop = base.greedy[0][9]
    assert stop not in base.greedy[0][:9]
    drafter = (ScriptedDrafter(draft=CHAIN), script_chain(base.greedy[:1], DEPTH))
    job = prepare(
        base.model, base.prompts[:1], method="chain", drafter=drafter, max_new_tokens=40, stop_token_ids=[stop]
    )
    carry = job.compile("generate", job.carry())(job.params, job.carry())
    expected = state_after(base, [base.prompts[0] + base.greedy[0][:9]])
    np.testing.assert_allclose(carry.state.S, expected.S, atol=2e-5)
    np.testing.assert_allclose(carry.state.conv, expected.conv, atol=2e-5)


def test_a_finished_rows_state_is_frozen_bit_for_bit(base: Reference) -> None:
    stop = base.greedy[1][0]
    job = prepare(base.model, base.prompts, method="ar", max_new_tokens=20, stop_token_ids=[stop])
    after_prefill = job.compile("prefill", job.carry())(job.params, job.carry())
    spec_round = jax.jit(job.engine.spec_round)
    carry = spec_round(job.params, after_prefill)
    assert carry.context.active.tolist() == [True, False]
    later = spec_round(job.params, spec_round(job.params, carry))
    for name in ("S", "conv"):
        before, after = getattr(carry.state, name), getattr(later.state, name)
        np.testing.assert_array_equal(before[:, 1], after[:, 1])
        assert (before[:, 0] != after[:, 0]).any()
    assert later.context.length[1] == carry.context.length[1]
    assert later.counters.rounds.tolist() == [3, 1]


def primitives(jaxpr: jax.extend.core.Jaxpr) -> list[str]:
    """Names of all primitives, those of inner programs included."""
    names = []
    for equation in jaxpr.eqns:
        names.append(equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                names += primitives(getattr(inner, "jaxpr", inner))
    return names


@pytest.mark.parametrize("method", ["ar", "chain", "tree"])
def test_generation_is_one_while_loop_of_rounds(base: Reference, method: str) -> None:
    """Every round after prefill runs in one while_loop whose body is spec_round, and nothing calls the host."""
    job = prepare(base.model, base.prompts, method=method, temperature=1.0, top_p=0.9, max_new_tokens=8)
    carry = jax.eval_shape(job.carry)
    whole = jax.make_jaxpr(job.engine.generate)(job.params, carry)
    loops = [equation for equation in whole.eqns if equation.primitive.name == "while"]
    assert len(loops) == 1
    after_prefill = jax.eval_shape(job.engine.prefill, job.params, carry)
    one_round = jax.make_jaxpr(job.engine.spec_round)(job.params, after_prefill)
    body = loops[0].params["body_jaxpr"]
    assert [e.primitive.name for e in body.eqns] == [e.primitive.name for e in one_round.eqns]

    names = primitives(whole.jaxpr)
    assert "dot_general" in names
    assert not [name for name in names if "callback" in name or "infeed" in name or "outfeed" in name]

    card = AbstractMesh(
        (), (), abstract_device=AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="cuda")
    )
    with use_abstract_mesh(card):
        lowered = jax.jit(job.engine.generate, donate_argnums=1).trace(job.params, carry)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in text
    assert "triangular_solve" not in text.lower()


def test_the_state_is_donated(base: Reference) -> None:
    """The loop updates one state: the input's buffers are given to the output."""
    job = prepare(base.model, base.prompts, method="chain", max_new_tokens=8)
    carry = job.carry()
    program = job.compile("generate", carry)
    program(job.params, carry)
    assert carry.state.S.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        np.asarray(carry.state.S)


def test_a_prompt_runs_the_same_padded_or_not(base: Reference) -> None:
    """Rows of a batch are padded to the longest prompt's bucket; 8 rows or 1, the text is the same."""
    prompts = [base.prompts[0], *([base.prompts[1][:2]] * 6), base.prompts[1]]
    options = {"method": "chain", "draft": CHAIN, "max_new_tokens": 10}
    together = generate(base.model, prompts, **options).tokens
    assert together[0] == base.greedy[0][:10]
    assert together[-1] == base.greedy[1][:10]
