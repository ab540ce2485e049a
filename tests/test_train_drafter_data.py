"""Documents, conversations, packing and the order of rows."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import specla_jax
from reference import Reference
from specla_jax.chat_template import load_chat_template
from specla_jax.decode import bundled_target
from specla_jax.errors import UserError
from specla_jax.target import Target
from specla_jax.text import load_tokenizer
from train_drafter.chat import conversation
from train_drafter.documents import Documents, DrafterData, prepare
from train_drafter.evaluation import prompts_of
from train_drafter.generated import _prompts
from train_drafter.packing import RowSampler, pack

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]
# Thoughts are written for the last answer only, as templates of reasoning models do.
THINKING = """{{ bos_token }}{% for m in messages %}<{{ m.role }}>
{% if m.role == 'assistant' and loop.last %}<think>sum</think>{% endif %}{{ m.content }}<end>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
PLAIN_TURNS = """{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def target() -> Target:
    return specla_jax.load_target(bundled_target(), dtype="float32")


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def learned_text(data: Documents, target: Target) -> list[str]:
    tokenizer = load_tokenizer(target.path)
    return [tokenizer.decode(tokens[learned].tolist()) for tokens, learned in data]


def test_plain_conversation_learns_answers_only():
    (parts,) = conversation(MESSAGES, None)
    assert "".join(text for text, _ in parts) == (
        "System: Be brief.\nUser: 1+1?\nAssistant: 2\nUser: And 2+2?\nAssistant: 4\n"
    )
    assert [text for text, learned in parts if learned] == ["2\n", "4\n"]
    assert conversation(MESSAGES[:2], None) == []


def test_template_learns_whole_answers_and_splits_where_it_rewrites_history(tmp_path: Path):
    pytest.importorskip("jinja2")
    assert load_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": THINKING, "bos_token": "<s>"}))
    first, second = conversation(MESSAGES, load_chat_template(tmp_path))
    assert first[-1] == ("<think>sum</think>2<end>\n", True)
    assert [text for text, learned in second if learned] == ["<think>sum</think>4<end>\n"]
    prompt = "".join(text for text, learned in second if not learned)
    assert prompt.startswith("<s><system>\nBe brief.<end>")
    assert prompt.endswith("<assistant>\n2<end>\n<user>\nAnd 2+2?<end>\n<assistant>\n")

    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": PLAIN_TURNS}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (parts,) = conversation(MESSAGES, load_chat_template(tmp_path))
    assert [text for text, learned in parts if learned] == ["2<end>", "4<end>"]
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match="refuses a conversation: no system role"):
        conversation(MESSAGES, load_chat_template(tmp_path))


def test_documents_become_tokens_with_masks(target: Target, tmp_path: Path):
    texts = write_jsonl(tmp_path / "t.jsonl", [{"text": f"Ann has {i} apples."} for i in range(30)] * 2)
    chats = [{"messages": MESSAGES}, {"messages": MESSAGES[:2]}]
    chat = write_jsonl(tmp_path / "c.jsonl", chats)
    held = tmp_path / "held.py"
    held.write_text("x = 1\n")
    data = prepare([texts, chat], tmp_path / "data", target, held_out_paths=[held], fraction=0.2)
    assert len(data.train) + len(data.held_out) == 30 + 1 + 1  # duplicates and the unanswered conversation are left out
    assert data.notes == ("1 train documents have no token to learn and are left out",)
    ids, learned = data.held_out[0]
    assert ids[0] == target.config.bos_token_id
    assert ids[-1] == target.config.eos_token_ids[0]
    assert learned.all()
    assert load_tokenizer(target.path).decode(ids.tolist()) == "x = 1\n"
    answers = [
        text for side in (data.train, data.held_out) for text in learned_text(side, target) if "apple" not in text
    ]
    assert sorted(answers) == ["2\n4\n", "x = 1\n"]

    again = prepare([texts, chat], tmp_path / "data", target, held_out_paths=[held], fraction=0.2)
    assert again.fingerprint == data.fingerprint
    np.testing.assert_array_equal(again.train.tokens, data.train.tokens)
    with pytest.raises(UserError, match="prepared from other data"):
        prepare([texts], tmp_path / "data", target, held_out_paths=[held], fraction=0.2)


def test_token_arrays(base: Reference, tmp_path: Path):
    rows = np.arange(60).reshape(20, 3)
    np.save(tmp_path / "rows.npy", rows)
    data = prepare([tmp_path / "rows.npy"], tmp_path / "a", base.model, fraction=0.3)
    both = [tokens.tolist() for side in (data.train, data.held_out) for tokens, _ in side]
    assert sorted(both) == rows.tolist()
    np.save(tmp_path / "flat.npy", np.arange(60, dtype=np.uint16))
    np.save(tmp_path / "held.npy", rows[:, ::-1])
    held = [tmp_path / "held.npy"]
    flat = prepare([tmp_path / "flat.npy"], tmp_path / "b", base.model, held_out_paths=held, fraction=0)
    joined = np.concatenate([tokens for tokens, _ in flat.train])
    np.testing.assert_array_equal(joined, np.arange(60))
    eos = base.model.config.eos_token_ids
    assert [tokens[-1] for tokens, _ in flat.train] == [*eos, 59]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: np.save(path, np.array([[1, 999]])), "must hold ids 0 to 95, got 1 to 999"),
        (lambda path: np.save(path, np.array([1.5])), "must hold integers of one or two axes"),
        (lambda path: path.write_bytes(b"no"), "is not a .npy array"),
        (lambda path: None, "does not exist"),
    ],
)
def test_wrong_token_arrays_are_refused(base: Reference, tmp_path: Path, write, message):
    write(tmp_path / "x.npy")
    with pytest.raises(UserError, match=message):
        prepare([tmp_path / "x.npy"], tmp_path / "out", base.model)


def test_mistakes_in_text_are_refused(base: Reference, target: Target, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="the target has no tokenizer; give token ids as .npy"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", base.model)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": [{"role": "user", "content": 3}]}])
    with pytest.raises(UserError, match="bad.jsonl line 1: 'messages' must be a list of objects"):
        prepare([bad], tmp_path / "out", target)
    with pytest.raises(UserError, match="no document is held out"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", target, fraction=0)
    with pytest.raises(UserError, match="leaves no document to train on"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", target, held_out_paths=[tmp_path / "a.txt"])
    silent = write_jsonl(tmp_path / "silent.jsonl", [{"messages": MESSAGES[:2]}])
    with pytest.raises(UserError, match="no train document has a token to learn"):
        prepare([silent], tmp_path / "out", target, held_out_paths=[tmp_path / "a.txt"])


def numbered(sizes: list[int]) -> Documents:
    """Documents whose tokens are all different; the first token after a document's start is not learned."""
    total = np.cumsum([0, *sizes])
    return Documents.of((range(a, b), [place != 1 for place in range(b - a)]) for a, b in pairwise(total.tolist()))


def test_packing_holds_every_prediction_once_and_cuts_long_documents():
    sizes = [3, 20, 7, 1, 33, 2, 9, 9, 5]
    documents = numbered(sizes)
    rows = pack(documents, 16)
    assert len(rows) <= 7  # 83 tokens fit into 6 rows of 16 at best
    batch = rows.batch(np.arange(len(rows)))
    predicted = []
    for row in range(len(rows)):
        for place in np.flatnonzero(batch.counted[row]):
            assert batch.positions[row, place + 1] == batch.positions[row, place] + 1
            assert batch.tokens[row, place + 1] == batch.tokens[row, place] + 1  # never across a boundary
            predicted.append(int(batch.tokens[row, place + 1]))
    starts = documents.starts[:-1].tolist()
    cut = {start + n for start, size in zip(starts, sizes) for n in range(0, size, 16)}
    wanted = [token for token in range(sum(sizes)) if token not in cut and token - 1 not in starts]
    assert sorted(predicted) == wanted
    assert ((batch.positions == 0) == batch.starts).all()


def test_sampler_takes_each_row_once_an_epoch_and_depends_on_seed_and_step_only():
    rows = pack(numbered([16] * 10), 16)
    sampler = RowSampler(rows, 4, seed=3)
    later = sampler(7)
    first = [sampler(step).tokens[:, 0].tolist() for step in range(5)]
    both = [token for tokens in first for token in tokens]
    assert sorted(both[:10]) == sorted(both[10:]) == list(range(0, 160, 16))
    assert both[:10] != both[10:]
    np.testing.assert_array_equal(RowSampler(rows, 4, seed=3)(7).tokens, later.tokens)
    assert (RowSampler(rows, 4, seed=4)(7).tokens != later.tokens).any()


def test_prompts_end_before_what_is_learned():
    chat = ([1, 2, 3, 4, 5], [False, False, False, True, True])
    text = (list(range(10, 20)), [True] * 10)
    data = DrafterData(Documents.of([chat]), Documents.of([chat, text]), "")
    assert prompts_of(data.held_out, 5, 4) == [[1, 2, 3], [10, 11, 12, 13]]
    assert prompts_of(data.held_out, 5, 2) == [[2, 3], [10, 11]]


def test_prompts_for_the_target_cover_a_long_document():
    tokens, everything = np.arange(25), np.ones(25, bool)
    assert [ids for ids, _ in _prompts(tokens, everything, 3, 10)] == [[0, 1, 2], [10, 11, 12], [20, 21]]
    assert _prompts(tokens[:2], everything[:2], 3, 10) == [([0], [True])]
    answer = np.arange(25) >= 12
    ((ids, learned),) = _prompts(tokens, answer, 3, 10)
    assert ids == list(range(12))
    assert not any(learned)
