"""Training documents written by the target itself: its continuations in place of the rest of a document."""

import fcntl
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy import ndarray
from tqdm import tqdm

from specla_jax.errors import UserError
from specla_jax.generate import generate
from specla_jax.target import Target
from train_drafter.documents import Documents
from train_drafter.evaluation import prompt_size

_ROWS = 128  # decoded together at most


def self_generated(
    documents: Documents,
    target: Target,
    folder: Path,
    *,
    share: float,
    longest_prompt: int,
    new_tokens: int,
    temperature: float,
    seed: int,
    fingerprint: str,
    progress: bool = True,
) -> Documents:
    """The documents, a share of them replaced by prompts from them and what the target writes behind each.

    A document gives one prompt, its beginning; a long one gives one for every ``longest_prompt + new_tokens`` of its
    tokens. What was learned of a prompt still is, and all of the continuation. The texts are kept in ``folder`` and
    read from there the next time; runs may share it, at the same time too.

    Args:
      share: of the documents, 0 to 1; which ones depends on ``seed``.
      longest_prompt: tokens of a prompt at most.
      new_tokens: tokens of a continuation at most; it ends at the target's end-of-text token.
      temperature: 0 for the target's greedy text.
      fingerprint: of the documents; goes into the name of the file.

    Raises:
      UserError: ``share`` is not 0 to 1.
    """
    check_share(share)
    chosen = np.flatnonzero(np.random.default_rng([seed, 1]).permutation(len(documents)) < share * len(documents))
    if not len(chosen):
        return documents
    recipe = [fingerprint, target.vocabulary_hash, str(target.path), target.dtype]
    recipe += [share, longest_prompt, new_tokens, temperature, seed]
    name = "generated-" + hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    done = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # runs that share the folder wait for the first one to write the texts
        if not done.is_file():
            stretch = longest_prompt + new_tokens
            prompts = [prompt for i in chosen.tolist() for prompt in _prompts(*documents[i], longest_prompt, stretch)]
            texts = _continue(target, [tokens for tokens, _ in prompts], new_tokens, temperature, seed, progress)
            pairs = ((ids + text, learned + [True] * len(text)) for (ids, learned), text in zip(prompts, texts))
            Documents.of(pairs).save(folder, name)
            done.write_text(json.dumps(recipe) + "\n")
    replaced = set(chosen.tolist())
    kept = (document for i, document in enumerate(documents) if i not in replaced)
    return Documents.of([*kept, *Documents.load(folder, name)])


def _prompts(tokens: ndarray, learned: ndarray, longest: int, stretch: int) -> list[tuple[list[int], list[bool]]]:
    """Prompts out of a document, and which of their tokens are learned."""
    if not learned[1:].all():  # a conversation: its prompt is what comes before the first answer
        stretch = len(tokens)
    found = []
    for start in range(0, len(tokens) - 1, stretch):
        stop = start + prompt_size(learned[start : start + stretch], longest)
        found.append((tokens[start:stop].tolist(), learned[start:stop].tolist()))
    return found


def check_share(share: float) -> None:
    """Raises UserError if ``share`` is not 0 to 1."""
    if not 0 <= share <= 1:
        raise UserError(f"--self-generated must be 0 to 1, got {share}")


def _continue(
    target: Target, prompts: Sequence[list[int]], new_tokens: int, temperature: float, seed: int, progress: bool
) -> list[list[int]]:
    """The target's texts, in the order of the prompts; those of like length are decoded together."""
    config = target.config
    stops = [token for token in config.eos_token_ids if token < config.vocab_size]
    texts: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    size = min(_ROWS, len(order))
    longest = max(2, *map(len, prompts)) - 1  # one length of the prefill, so one program
    for first in tqdm(range(0, len(order), size), disable=not progress, unit="batch", desc="self-generated"):
        rows = order[first : first + size]
        padded = rows + rows[:1] * (size - len(rows))  # one batch size, so one program
        result = generate(
            target,
            [prompts[i] for i in padded],
            method="ar",
            prefill_length=longest,
            max_new_tokens=new_tokens,
            temperature=temperature,
            seed=[(seed + i) % 2**32 for i in padded],
            stop_token_ids=stops,
        )
        for i, tokens in zip(rows, result.tokens):
            texts[i] = tokens
    return texts
