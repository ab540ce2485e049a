"""Tokenizers of a model folder, and streaming that equals decoding at once."""

import io
import itertools
import json

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from specla_jax.errors import UserError
from specla_jax.text import REPLACEMENT, StreamDecoder, load_tokenizer

EMOJI = "😀"
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_fallback_bpe():
    letters = ["▁", "a", "b", "A", "世", "▁a", "▁▁", ".", REPLACEMENT]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.enable_truncation(max_length=4)  # left over from a training run
    return tokenizer


def byte_level_bpe():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    chars = {text: pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0] for text in "世é"}
    first, second = chars["世"][0], chars["世"][1]
    vocab = {piece: index for index, piece in enumerate([*SPECIAL, *alphabet, first + second, "ab", second + "a"])}
    merges = [(first, second), ("a", "b"), (second, "a")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<tool call>"])  # shown, unlike the special ones
    return tokenizer


def train_sentencepiece():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a cat sat on a mat.", "the rat and the cat ran", "  two  spaces"] * 20),
        model_writer=model,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    found = {name: root / name for name in ("byte-fallback", "byte-level", "sentencepiece")}
    for folder in found.values():
        folder.mkdir()
    byte_fallback_bpe().save(str(found["byte-fallback"] / "tokenizer.json"))
    byte_level_bpe().save(str(found["byte-level"] / "tokenizer.json"))
    (found["sentencepiece"] / "tokenizer.model").write_bytes(train_sentencepiece())
    return found


@pytest.fixture(scope="module", params=["byte-fallback", "byte-level", "sentencepiece"])
def tokenizer(request, folders):
    return load_tokenizer(folders[request.param])


def without_bos(tokenizer, text):
    return [token for token in tokenizer.encode(text) if not tokenizer.is_skipped(token)]


def stream(tokenizer, ids, cuts=()):
    decoder = StreamDecoder(tokenizer)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    deltas = [decoder.push(ids[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return [*deltas, decoder.finish()]


@pytest.mark.parametrize("text", ["A 世 ab", f"a{EMOJI}b", "", "é世é", "a b.", "<0x41>"])
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, ids, range(len(ids)))) == text


@pytest.mark.parametrize("text", ["", " ", "  a", "a  ", " . "])
def test_spaces_at_the_ends_stream_as_they_decode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids, range(len(ids)))) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_streaming_equals_decoding_at_once(tokenizer, data):
    # Bytes that make characters are rare among all ids: mix in pieces of real ones.
    real = without_bos(tokenizer, f"A 世{EMOJI} é ab.")
    token = st.one_of(st.integers(0, tokenizer.vocab_size + 3), st.sampled_from(real))
    ids = data.draw(st.lists(token, max_size=24))
    cuts = data.draw(st.one_of(st.just(range(24)), st.sets(st.integers(0, 24))))
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def test_an_emoji_split_over_tokens_is_held(tokenizer):
    ids = without_bos(tokenizer, f"a{EMOJI}b")
    deltas = stream(tokenizer, ids, range(len(ids)))
    assert len(ids) >= 6
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert "".join(deltas) == f"a{EMOJI}b"


def test_a_character_is_not_repeated_when_a_broken_byte_follows(tokenizer):
    cjk = without_bos(tokenizer, "A 世")
    broken = without_bos(tokenizer, EMOJI)
    broken = [token for token in broken if tokenizer.decode([token]).strip()][:1]  # the first byte alone
    ids = [*cjk, *broken, *without_bos(tokenizer, "ab")]
    deltas = stream(tokenizer, ids, range(len(ids)))
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "".join(deltas).count(REPLACEMENT) >= 1
    assert "".join(deltas).endswith("ab")


def test_unfinished_bytes_come_out_at_the_end(tokenizer):
    ids = without_bos(tokenizer, f"a{EMOJI}")[:-1]
    deltas = stream(tokenizer, ids, range(len(ids)))
    assert deltas[-1].startswith(REPLACEMENT)
    assert not any(REPLACEMENT in delta for delta in deltas[:-1])


def test_complete_text_is_not_held(tokenizer):
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(without_bos(tokenizer, "ab")) == "ab"
    assert decoder.push([]) == ""
    assert decoder.finish() == ""
    assert decoder.push(without_bos(tokenizer, "ab")) == "ab"  # ready for another text


def test_a_long_stream_decodes_few_ids_at_a_time(tokenizer, monkeypatch):
    ids = without_bos(tokenizer, f"ab a {EMOJI} b" * 100)
    looked_at = []
    decode = type(tokenizer).decode
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids: looked_at.append(len(ids)) or decode(self, ids))
    text = "".join(stream(tokenizer, ids, range(len(ids))))
    assert max(looked_at) <= 16
    monkeypatch.undo()
    assert text == tokenizer.decode(ids)


def test_special_tokens_and_ids_beyond_the_vocabulary_give_no_text(tokenizer):
    ids = without_bos(tokenizer, "ab")
    noisy = [1, *ids, 2, tokenizer.vocab_size + 7]
    assert tokenizer.decode(noisy) == "ab"
    assert "".join(stream(tokenizer, noisy, range(9))) == "ab"


def test_a_special_token_between_the_bytes_of_a_character(tokenizer):
    ids = without_bos(tokenizer, f"a{EMOJI}b")
    for place, start in itertools.product(range(len(ids)), repeat=2):
        noisy = [*ids[:place], 2, *ids[start:]]
        assert "".join(stream(tokenizer, noisy, range(len(noisy)))) == tokenizer.decode(noisy)


def test_tokens_by_name(tokenizer):
    assert tokenizer.token_to_id("</s>") == 2
    assert tokenizer.token_to_id("no such piece") is None
    assert tokenizer.vocab_size > 256


def test_a_shown_added_token_is_text(folders):
    tokenizer = load_tokenizer(folders["byte-level"])
    ids = [tokenizer.token_to_id("<tool call>"), *without_bos(tokenizer, "ab")]
    assert "".join(stream(tokenizer, ids, range(9))) == "<tool call>ab"


def test_post_processor_decides_about_bos_and_saved_truncation_is_off(folders):
    assert load_tokenizer(folders["byte-fallback"]).encode("abab")[0] == 1
    assert len(load_tokenizer(folders["byte-fallback"]).encode("ab" * 20)) > 40
    assert load_tokenizer(folders["byte-level"]).encode("a")[0] != 1


@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        (None, True, False),
        ({}, True, False),
        ({"add_bos_token": None}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_eos_token": True}, True, True),
    ],
)
def test_sentencepiece_adds_what_the_configuration_says(folders, tmp_path, config, bos, eos):
    (tmp_path / "tokenizer.model").write_bytes((folders["sentencepiece"] / "tokenizer.model").read_bytes())
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = load_tokenizer(tmp_path).encode("a cat")
    assert (ids[0] == 1, ids[-1] == 2) == (bos, eos)


def test_tokenizer_json_comes_first_and_neither_is_none(folders, tmp_path):
    assert load_tokenizer(tmp_path) is None
    for name in ("byte-fallback/tokenizer.json", "sentencepiece/tokenizer.model"):
        source = folders["byte-level"].parent / name
        (tmp_path / source.name).write_bytes(source.read_bytes())
    assert load_tokenizer(tmp_path).token_to_id("<0x41>") == 3 + 0x41
    assert load_tokenizer(tmp_path).token_to_id("世") is not None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_a_broken_file_is_named(folders, tmp_path, name):
    (tmp_path / "tokenizer.model").write_bytes((folders["sentencepiece"] / "tokenizer.model").read_bytes())
    (tmp_path / name).write_text("{broken")
    with pytest.raises(UserError, match=name):
        load_tokenizer(tmp_path)
