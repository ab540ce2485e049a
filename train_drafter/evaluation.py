"""Evaluation of a drafter by real decoding of held-out prompts, and what teacher forcing predicts for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from specla_jax.config import DraftConfig
from specla_jax.drafters.eagle import EagleDrafter
from specla_jax.drafters.eagle_layer import EagleConfig, Params
from specla_jax.generate import DEFAULT_DRAFT, GenerationResult, Method, bucket, compile_all, generate, prepare
from specla_jax.model import GatedDeltaNetLM
from specla_jax.target import Target
from train_drafter.documents import Documents
from train_drafter.objective import Frozen, Objective
from train_drafter.packing import Batch

BEST = "accepted_length_tree_t0"  # what the best checkpoint is chosen by
DRAFTS: dict[Method, DraftConfig] = {"chain": DEFAULT_DRAFT["chain"], "tree": DEFAULT_DRAFT["tree"]}


def prompts_of(documents: Documents, count: int, longest: int) -> list[list[int]]:
    """Beginnings of up to ``count`` documents, evenly spaced, of at most ``longest`` tokens.

    What precedes the first learned part (its last tokens), and the first half of a document that is learned from the
    start.
    """
    chosen = np.unique(np.linspace(0, len(documents) - 1, count).round().astype(int))
    prompts = []
    for index in chosen.tolist():
        tokens, learned = documents[index]
        size = prompt_size(learned, longest)
        prompts.append(tokens[max(0, size - longest) : size].tolist())
    return prompts


def prompt_size(learned: Bool[ndarray, " m"], longest: int) -> int:
    """Tokens of a document that make a prompt; see :func:`prompts_of`."""
    given = int(np.argmax(learned[1:])) + 1
    return given if given > 1 else max(1, min(len(learned) // 2, longest))


@dataclass(frozen=True)
class Evaluation:
    """Decodes prompts with a drafter.

    Attributes:
      target: what it drafts for.
      config: the drafter.
      prompts: token ids.
      new_tokens: of each prompt.
      seed: of the texts at temperature 1.
      confidence: temperature of the drafter's confidence, in place of that of ``config``; to try one costs no program.
    """

    target: Target
    config: EagleConfig
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    seed: int = 0
    confidence: float | None = None

    def __call__(self, params: Params) -> dict[str, Any]:
        """Accepted length and acceptance by depth, by chain and tree, at temperatures 0 and 1, over all prompts.

        ``predicted_accepted_length_chain_t0`` is what teacher forcing on the same texts says of the chain.
        """
        report: dict[str, Any] = {}
        kinds: list[tuple[Method, float]] = [(method, temperature) for method in DRAFTS for temperature in (0.0, 1.0)]
        compile_all([prepare(**self._request(params, *kind)) for kind in kinds])
        for method, temperature in kinds:
            result = self.decode(params, method, temperature)
            rounds, name = sum(result.rounds), f"{method}_t{temperature:g}"
            report[f"accepted_length_{name}"] = round(sum(map(len, result.tokens)) / rounds, 4)
            report[f"accepted_by_depth_{name}"] = [
                round(sum(column) / rounds, 4) for column in zip(*result.accepted_at_depth)
            ]
            if name == "chain_t0":
                predicted = sum(map(len, result.tokens)) / self.predicted_rounds(params, result)
                report["predicted_accepted_length_chain_t0"] = round(predicted, 4)
        return report

    def decode(
        self, params: Params, method: Method, temperature: float, draft: DraftConfig | None = None
    ) -> GenerationResult:
        """The texts, by drafts of the size ``draft``; None for that of :data:`DRAFTS`."""
        return generate(**self._request(params, method, temperature, draft))

    def _request(
        self, params: Params, method: Method, temperature: float, draft: DraftConfig | None = None
    ) -> dict[str, Any]:
        """The arguments of :func:`specla_jax.generate`."""
        drafter = EagleDrafter(draft=draft or DRAFTS[method], config=self.config, dtype=self.target.dtype)
        bound, config = drafter.bind(params, self.target.params), self.target.config
        if self.confidence is not None:
            bound["temperature"] = jnp.float32(self.confidence)
        return {
            "model": self.target,
            "prompts": self.prompts,
            "drafter": (drafter, bound),
            "method": method,
            "max_new_tokens": self.new_tokens,
            "temperature": temperature,
            "seed": self.seed,
            "stop_token_ids": [token for token in config.eos_token_ids if token < config.vocab_size],
        }

    def predicted_rounds(self, params: Params, result: GenerationResult) -> int:
        """Rounds that a chain at temperature 0 should take for these texts, by teacher forcing.

        The drafter is unrolled over the texts as in training. At a root, drafts are accepted as long as the likeliest
        draft is the target's likeliest token; the next root is the token after them.
        """
        texts = [[*prompt, *tokens] for prompt, tokens in zip(self.prompts, result.tokens)]
        frozen = Frozen(self.target.params, params.get("draft_to_target"))
        stats, valid = self._statistics(params, frozen, one_a_row(texts))
        match = np.asarray(stats.match & valid)
        return sum(
            rounds_of(match[:, row, : len(text) - 1], len(prompt) - 1)
            for row, (text, prompt) in enumerate(zip(texts, self.prompts))
        )

    @cached_property
    def _statistics(self) -> Any:
        model, depth = GatedDeltaNetLM(self.target.config, self.target.dtype), DRAFTS["chain"].depth
        return jax.jit(Objective(model=model, config=self.config, steps=depth).statistics)


def one_a_row(texts: Sequence[Sequence[int]]) -> Batch:
    """Whole texts, a row each, padded to a length that few programs serve."""
    length = bucket(max(map(len, texts)))
    tokens = np.zeros((len(texts), length), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    places = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    arrays: Any = tokens, places, places + 1 < np.array([len(text) for text in texts])[:, None]
    return Batch(*arrays)


def rounds_of(match: Bool[ndarray, "depth T"], root: int) -> int:
    """Rounds from ``root`` to the end of a text; level d below root r is right if ``match[d - 1, r + d - 1]``."""
    depth, end = match.shape
    rounds = 0
    while root < end:
        level = 0
        while level < depth and root + level < end and match[level, root + level]:
            level += 1
        root += level + 1
        rounds += 1
    return rounds
