"""Prompts of public benchmarks, read in their publishers' own files, and the forms a target wants them in.

| name | file below the suite folder | prompt | source |
|---|---|---|---|
| gsm8k | gsm8k/test.jsonl | the question | openai/grade-school-math |
| humaneval | humaneval/HumanEval.jsonl.gz, or unpacked | the head of a function | openai/human-eval |
| spec-bench | spec_bench/question.jsonl | the first turn | hemingkx/Spec-Bench |
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specla_jax.chat_template import Render, load_chat_template
from specla_jax.errors import UserError
from specla_jax.text import Tokenizer

PROMPT_FORMATS = ("question", "raw", "chat")

# Spec-Bench takes its multi-turn conversations from MT-Bench and keeps that suite's eight categories.
_MULTI_TURN = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())


@dataclass(frozen=True)
class Prompt:
    """One task of a suite.

    Attributes:
      number: its place in the suite's file, from 0.
      group: the task it belongs to, for tables by category; the suite's name where there are none.
      text: as published.
      is_code: the head of a program, to be continued as it stands.
    """

    number: int
    group: str
    text: str
    is_code: bool = False


@dataclass(frozen=True)
class Suite:
    """Where a suite lies (the first of ``files`` that is there) and how one of its entries is read."""

    files: tuple[str, ...]
    read: Callable[[int, dict[str, Any]], Prompt]


def _spec_bench(number: int, entry: dict[str, Any]) -> Prompt:
    group = "multi-turn" if entry["category"] in _MULTI_TURN else entry["category"]
    return Prompt(number, group, entry["turns"][0])


SUITES = {
    "gsm8k": Suite(("gsm8k/test.jsonl",), lambda i, entry: Prompt(i, "gsm8k", entry["question"])),
    "humaneval": Suite(
        ("humaneval/HumanEval.jsonl.gz", "humaneval/HumanEval.jsonl"),
        lambda i, entry: Prompt(i, "humaneval", entry["prompt"], is_code=True),
    ),
    "spec-bench": Suite(("spec_bench/question.jsonl",), _spec_bench),
}


def read_suite(name: str, folder: Path, count: int | None = None) -> list[Prompt]:
    """The prompts of a suite, or ``count`` of them, evenly spaced over its file so that every category is there.

    Raises:
      UserError: an unknown suite, no such folder or file, or an entry that is not one of the suite's.
    """
    if name not in SUITES:
        raise UserError(f"--suite must be one of {', '.join(SUITES)}, got {name!r}")
    if not folder.is_dir():
        raise UserError(f"--suite-dir: no folder {folder}")
    if count is not None and count < 1:
        raise UserError(f"--prompts must be 1 or more, got {count}")
    suite = SUITES[name]
    path = next((folder / file for file in suite.files if (folder / file).is_file()), None)
    if path is None:
        raise UserError(f"--suite-dir {folder} has no {' or '.join(suite.files)}, which --suite {name} reads")
    prompts = [_entry(suite, name, i, line, path) for i, line in enumerate(_lines(path))]
    if not prompts:
        raise UserError(f"{path} holds no prompt")
    if count is None or count >= len(prompts):
        return prompts
    return [prompts[i] for i in np.linspace(0, len(prompts) - 1, count).round().astype(int)]


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError) as error:
        raise UserError(f"{path} is not a gzip file that can be read: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    return [line for line in text.split("\n") if line.strip()]


def _entry(suite: Suite, name: str, number: int, line: str, path: Path) -> Prompt:
    try:
        prompt = suite.read(number, json.loads(line))
    except (ValueError, KeyError, IndexError, TypeError):
        prompt = None
    if prompt is None or not isinstance(prompt.text, str) or not prompt.text.strip():
        raise UserError(f"entry {number + 1} of {path} is not an entry of {name}")
    return prompt


@dataclass(frozen=True)
class PromptFormat:
    r"""How a suite's text becomes a prompt.

    ``question`` writes ``Question: ...\nAnswer:``, ``raw`` leaves the text as published, and ``chat`` is the turn of a
    user in the tokenizer's chat template, with the opening of the answer. Code is continued as it stands unless the
    format is ``chat``.

    Attributes:
      style: one of these names.
      template: for ``chat``.
    """

    style: str
    template: Render | None = None

    @classmethod
    def load(cls, style: str, folder: Path | None) -> "PromptFormat":
        """Reads the chat template that lies beside the tokenizer, if the style needs it.

        Raises:
          UserError: another style, or no template that can be used.
        """
        if style not in PROMPT_FORMATS:
            raise UserError(f"--prompt-format must be one of {', '.join(PROMPT_FORMATS)}, got {style!r}")
        template = load_chat_template(folder) if style == "chat" else None
        if style == "chat" and template is None:
            raise UserError(f"--prompt-format chat: {folder} has no chat template; use question or raw")
        return cls(style, template)

    def text(self, prompt: Prompt) -> str:
        if self.template is not None:
            return self.template([{"role": "user", "content": prompt.text}], True)
        if self.style == "raw" or prompt.is_code:
            return prompt.text
        return f"Question: {prompt.text}\nAnswer:"

    def encode(self, prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
        """Token ids; a chat template writes its own special tokens."""
        return tokenizer.encode(self.text(prompt), add_special=self.template is None)
