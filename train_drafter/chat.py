"""Conversations to text: which parts a drafter learns from.

A conversation is a list of messages with a ``role`` and a ``content``. The chat template of the target's tokenizer
writes it (``chat_template`` in ``tokenizer_config.json``, or ``chat_template.jinja``). Without one it is plain:
``System: ...``, ``User: ...`` and ``Assistant: ...``, a line break after each. Only what the assistant says is learned.
"""

from collections.abc import Sequence
from typing import Any

from specla_jax.chat_template import Render
from specla_jax.errors import UserError

Message = dict[str, Any]
Parts = list[tuple[str, bool]]  # text, and whether it is learned


def parse_messages(record: dict[str, Any], where: str) -> list[Message]:
    """The ``messages`` of a JSON object.

    Raises:
      UserError: they are not a list of objects with a ``role`` and a ``content`` of text.
    """
    messages = record["messages"]
    fits = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not fits or not messages:
        raise UserError(f"{where}: 'messages' must be a list of objects with 'role' and 'content' (text)")
    return messages


def conversation(messages: Sequence[Message], render: Render | None) -> list[Parts]:
    """The documents of a conversation, up to its last answer, as parts that are learned or not.

    It is one document, unless a template writes earlier turns otherwise once there is a later one (it may drop what
    was thought, say). Then an answer begins a document of its own, with the prompt it would be decoded from.
    """
    render = render or _plain
    documents: list[Parts] = []
    written = ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answered = render(messages[:place], True), render(messages[: place + 1], False)
        cut = next((i for i, (a, b) in enumerate(zip(asked, answered)) if a != b), min(len(asked), len(answered)))
        if not documents or not answered[:cut].startswith(written):
            documents.append([])
            written = ""
        documents[-1] += [(answered[len(written) : cut], False), (answered[cut:], True)]
        written = answered
    return documents


def _plain(messages: Sequence[Message], ask: bool) -> str:
    text = "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages)
    return text + "Assistant: " * ask
