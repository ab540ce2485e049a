"""A small byte-level BPE: training, loading, and the files that go into a model folder."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from specla_jax.errors import UserError

BOS, EOS = "<|bos|>", "<|eos|>"
_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    r"""Trains a byte-level BPE on ``texts``.

    Every string decodes back to itself: there is no normaliser and each byte has a piece of its own. Digits are
    pieces of one, which makes arithmetic easier for a small model. So are newlines: were "\n    " a piece, a prompt
    that ends in a newline would tell the model that no indentation follows. ``encode`` puts BOS (id 0) in front; EOS
    is id 1.

    Raises:
      UserError: ``vocab_size`` has no room for the 256 bytes and the two special tokens.
    """
    if vocab_size < _BYTES + 2:
        raise UserError(f"--vocab-size must be at least {_BYTES + 2} (256 bytes, BOS and EOS), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads ``folder/tokenizer.json``, which must name this module's BOS and EOS.

    Raises:
      UserError: no such file, not a tokenizer, or a special token is missing.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"--tokenizer {folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a malformed file
        raise UserError(f"{path} is not a tokenizer: {error}") from None
    for token in (BOS, EOS):
        if tokenizer.token_to_id(token) is None:
            raise UserError(f"{path} lacks the special token {token}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json`` and a ``tokenizer_config.json`` that other libraries read."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of :func:`save_tokenizer` that lie in ``folder``."""
    return [path for name in ("tokenizer.json", "tokenizer_config.json") if (path := folder / name).is_file()]
