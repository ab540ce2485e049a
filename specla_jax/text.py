"""Text of token ids: the tokenizer that lies in a model folder, and decoding piece by piece for streaming."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers

from specla_jax.errors import UserError

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What the runtime needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. A model may have more rows: their ids decode to nothing."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of a prompt, with the BOS token (and others) that the tokenizer itself says to add, or without."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens give none. Bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_to_id(self, token: str) -> int | None: ...

    def is_skipped(self, token: int) -> bool:
        """Whether :meth:`decode` drops the id before it looks at its neighbours."""
        ...

    def is_open(self, token: int) -> bool:
        """Whether the text of the id may still change with the ids after it, other than by completing a character."""
        ...


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """Loads ``tokenizer.json``, else ``tokenizer.model``; None where the folder has neither.

    Raises:
      UserError: a file that cannot be read as what its name says.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return FastTokenizer(folder / "tokenizer.json")
    if (folder / "tokenizer.model").is_file():
        return SentencePieceTokenizer(folder / "tokenizer.model", _read_config(folder / "tokenizer_config.json"))
    return None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


class FastTokenizer:
    """A ``tokenizer.json``. Its own post-processor decides about BOS."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path} is not a tokenizer.json that can be read: {error}") from error
        # A file may carry the truncation and padding of its training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def is_skipped(self, token: int) -> bool:
        return token in self._special or self._tokenizer.id_to_token(token) is None

    def is_open(self, token: int) -> bool:
        # The byte-fallback decoder replaces every byte of a run of <0xNN> pieces when the run as a whole is not UTF-8,
        # also those that made complete characters before the next piece came.
        piece = self._tokenizer.id_to_token(token) or ""
        return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


class SentencePieceTokenizer:
    """A ``tokenizer.model``, used as Llama's tokenizer uses it.

    ``add_bos_token`` (default: yes, if the model has a BOS piece) and ``add_eos_token`` (default: no) of
    ``tokenizer_config.json`` decide what is added to a prompt.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} is not a SentencePiece model that can be read: {error}") from error
        add_bos = config.get("add_bos_token")
        self._add_bos = self._model.bos_id() >= 0 and (add_bos is None or bool(add_bos))
        self._add_eos = self._model.eos_id() >= 0 and bool(config.get("add_eos_token"))

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return self._model.encode(text, add_bos=add_special and self._add_bos, add_eos=add_special and self._add_eos)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([token for token in ids if not self.is_skipped(token)])

    def token_to_id(self, token: str) -> int | None:
        found = self._model.piece_to_id(token)  # the unknown piece stands for every absent one
        return found if self._model.id_to_piece(found) == token else None

    def is_skipped(self, token: int) -> bool:
        return not 0 <= token < self.vocab_size or self._model.is_control(token) or self._model.is_unknown(token)

    def is_open(self, token: int) -> bool:
        return False  # bytes are decoded from the left: a character that is complete stays


class StreamDecoder:
    """Decodes ids as they come; the pieces put together are ``tokenizer.decode`` of all ids, whatever the ids are.

    What later ids can change is held back: a trailing U+FFFD, which may become a character, and a trailing run of byte
    pieces where the tokenizer judges such a run as a whole. What is settled is dropped but for one token of context,
    so a stream of n ids costs about n decodings of a few ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # one settled token of context (none at first), then what came after it
        self._looked_at = 0  # leading ids that the last decoding covered
        self._sent = 0  # leading characters of the text of _ids that are out already

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that has become certain, often that of the ids, or none."""
        tokenizer = self._tokenizer
        self._ids += [token for token in ids if not tokenizer.is_skipped(token)]
        closed = len(self._ids)
        while closed > self._looked_at and tokenizer.is_open(self._ids[closed - 1]):
            closed -= 1
        if closed == self._looked_at:
            return ""
        self._looked_at = closed
        text = tokenizer.decode(self._ids[:closed])
        delta = text.rstrip(REPLACEMENT)[self._sent :]
        self._sent += len(delta)
        if not text.endswith(REPLACEMENT):
            self._drop_settled(closed)
        return delta

    def finish(self) -> str:
        """Returns what was held back; the decoder is then ready for another text."""
        delta = self._tokenizer.decode(self._ids)[self._sent :]
        self._ids, self._looked_at, self._sent = [], 0, 0
        return delta

    def _drop_settled(self, closed: int) -> None:
        # The text ends between two characters here. One token stays in front because the first token of a text is
        # treated apart (its space goes); one that gives no text would not serve as the first.
        context = self._tokenizer.decode(self._ids[closed - 1 : closed])
        if context:
            self._ids = self._ids[closed - 1 :]
            self._looked_at = 1
            self._sent = len(context)
