"""The stages of a round: names, times of events within events, and a round that is watched."""

from types import SimpleNamespace

import pytest

from reference import Reference
from specla_jax import profile as module
from specla_jax.config import DraftConfig
from specla_jax.generate import prepare
from specla_jax.profile import STAGES, Profile, profile, stage, table


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("jit(spec_round)/draft/jit(_launch)/stream_matmul/mpmd_map", "draft"),
        ("jit(spec_round)/verify/GatedDeltaNetLM.verify/layers_0/attn/tree_conv/add", "verify: convolution"),
        ("jit(spec_round)/verify/gdn_verify/jit(_launch)/gdn_verify/mpmd_map", "verify: delta rule"),
        ("jit(spec_round)/verify/GatedDeltaNetLM.verify/lm_head/dot_general", "verify: head"),
        ("jit(spec_round)/verify/jit(_launch)/stream_matmul/mpmd_map", "verify: products, norms"),
        ("jit(spec_round)/accept/reduce", "accept"),
        ("jit(spec_round)/recover/gdn_recover/pallas_call", "recover"),
        ("jit(spec_round)/commit/scatter", "commit"),
        ("jit(spec_round)/or", "other"),
        ("", "other"),
    ],
)
def test_an_operation_belongs_to_the_stage_of_its_scopes(name, wanted):
    assert stage(name) == wanted


def test_what_runs_within_an_operation_is_not_its_own_time():
    """As a loop's body within the loop; another line's events are not within it."""

    def event(start, duration, op=None):
        stats = {} if op is None else {"hlo_op": op, "hlo_module": "jit_f"}
        return SimpleNamespace(start_ns=start, duration_ns=duration, stats=stats.items())

    events = [event(20, 5, "add"), event(0, 100, "while"), event(0, 10, "first"), event(26, 4), event(100, 7, "after")]
    found = sorted(module._own_times(events))
    expected = {"while": 85, "first": 10, "add": 5, "after": 7}
    assert found == sorted(("jit_f", op, ns) for op, ns in expected.items())


def test_a_round_by_stage(base: Reference):
    """Every stage that a round has takes time; a chain's draft does, that of plain decoding is nothing."""
    draft = DraftConfig(depth=2, branch=1, nodes=3)
    options = {"max_new_tokens": 60, "stop_token_ids": ()}
    plain = prepare(base.model, [[1, 2, 3]], method="ar", drafter="none", **options)
    chain = prepare(base.model, [[1, 2, 3]], method="chain", drafter="ngram", draft=draft, **options)
    seen = [profile(plain, "ar", rounds=3), profile(chain, "chain", rounds=3)]
    for one in seen:
        for name in ("verify: convolution", "verify: products, norms", "recover"):
            assert one.milliseconds[name] > 0
            assert one.launches[name] >= 1
        total = sum(one.milliseconds.values()) + one.between
        assert total == pytest.approx(one.round_milliseconds)
    assert seen[1].launches["draft"] > seen[0].launches["draft"]
    assert list(seen[0].milliseconds) == list(STAGES)


def test_a_profiler_that_names_nothing_is_said(base: Reference, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_operations", lambda folder: iter([("jit_other", "add", 1.0)]))
    job = prepare(base.model, [[1, 2, 3]], method="ar", drafter="none", max_new_tokens=60)
    with pytest.raises(module.UserError, match="names no operation of the round"):
        profile(job, "ar", rounds=1)


def test_the_table_shows_the_stages_that_there_are():
    times = dict.fromkeys(STAGES, 0.0) | {"draft": 0.25, "recover": 0.5}
    launches = dict.fromkeys(STAGES, 0.0) | {"draft": 12.0, "recover": 1.0}
    one = Profile(method="tree", launches=launches, milliseconds=times, round_milliseconds=1.0)
    assert [line.split() for line in table([one]).splitlines()] == [
        ["ms", "a", "round", "(launches)", "tree"],
        ["draft", "0.250", "(12)"],
        ["recover", "0.500", "(1)"],
        ["between", "kernels", "0.250"],
        ["round", "1.000"],
    ]
