"""The chat template of a tokenizer: messages to the text that the target was tuned on."""

import importlib
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specla_jax.checkpoint.folders import read_json
from specla_jax.errors import UserError

# messages (role and content), and whether to open an answer at the end
Render = Callable[[Sequence[dict[str, Any]], bool], str]


def load_chat_template(folder: Path | None) -> Render | None:
    """Reads ``chat_template.jinja``, else ``chat_template`` of ``tokenizer_config.json``; None where there is neither.

    What it renders holds its special tokens already: encode it with ``add_special=False``.

    Raises:
      UserError: it cannot be read, or jinja2, which templates are written for, is not installed.
    """
    if folder is None:
        return None
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    try:
        jinja: Any = importlib.import_module("jinja2")
        sandbox: Any = importlib.import_module("jinja2.sandbox")
    except ModuleNotFoundError:
        raise UserError(f"{folder} has a chat template, which needs jinja2: pip install jinja2") from None

    def refuse(message: str) -> None:
        raise jinja.TemplateError(message)

    special = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        special[name] = token["content"] if isinstance(token, dict) else token or ""
    # The options and functions that Hugging Face's templates count on.
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    try:
        template = environment.from_string(source)
    except jinja.TemplateError as error:
        raise UserError(f"{folder}: the chat template cannot be read: {error}") from error

    def render(messages: Sequence[dict[str, Any]], ask: bool) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=ask, **special)
        except jinja.TemplateError as error:
            raise UserError(f"{folder}: the chat template refuses a conversation: {error}") from error

    return render
