"""Rounds of decoding, timed: what bench_decode.py measures, and the random models that it measures without a folder."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Before the folder of scripts, whose train_drafter.py would hide the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from benching import Results, stop

from kernels_pallas.implementations import Implementation
from specla_jax.config import DraftConfig, Dtype, SamplingConfig, TargetConfig
from specla_jax.drafters import EagleDrafter, EagleStep, init_eagle
from specla_jax.generate import GenerationResult, Job, Method, compile_all, prepare
from specla_jax.lossless import first_difference
from specla_jax.memory import nbytes
from specla_jax.model import GatedDeltaNetLM
from specla_jax.target import Target
from train_drafter.drafter_cli import default_config

PROMPT = (1, 2, 3)
TREE = DraftConfig(depth=6, branch=4, nodes=16, prune_tau=6.0)


def chain(depth: int) -> DraftConfig:
    """A chain of ``depth`` drafts."""
    return DraftConfig(depth=depth, branch=1, nodes=depth + 1)


def random_target(config: TargetConfig, dtype: Dtype) -> Target:
    """Random weights, with a head that answers most tokens with the token after them.

    A head of noise would leave near ties everywhere, and a bfloat16 text that parts from plain decoding's at one of
    them is out of step with an oracle from there on. The embedding is large, so that the layers do not drown it.
    """

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf if path[-1].key in ("A_log", "dt_bias") else leaf.astype(dtype)

    def make(key: jax.Array) -> dict[str, Any]:
        variables: Any = GatedDeltaNetLM(config).lazy_init(key, jax.ShapeDtypeStruct((1, 1), jnp.int32))
        params = variables["params"]
        small = params["embeddings"]["embedding"]  # [V, D]
        params["lm_head"]["kernel"] = jnp.roll(small, 1, axis=0).T
        params["embeddings"]["embedding"] = 50 * small
        return jax.tree_util.tree_map_with_path(cast, params)

    params = jax.jit(make)(jax.random.key(0))
    return Target(config=config, params=params, dtype=dtype, path=Path("random"))


def random_drafter(model: Target, packed: Implementation | None = None) -> tuple[EagleDrafter, Any]:
    """An EAGLE drafter of the default shape; its temperature makes it sure of its drafts, so that trees are deep."""
    config = default_config(model, temperature=0.1)
    step = None if packed is None else EagleStep(config=config, implementation=packed)
    drafter = EagleDrafter(draft=TREE, config=config, dtype=model.dtype, step=step)
    return drafter, drafter.bind(init_eagle(jax.random.key(1), config, model.dtype), model.params)


class Rounds(NamedTuple):
    """What is measured: a batch, a method of ``generate``, its drafter with params, and the size of its drafts."""

    batch: int
    method: Method = "ar"
    drafter: Any = None
    draft: DraftConfig = chain(0)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells its program from others'."""
        return self.batch, self.method, self.drafter and self.drafter[0], self.draft


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The rounds of a method.

    Attributes:
      ms: of a round.
      tokens_per_second: of all rows, prefill left out.
      compile_s: seconds that its program took to compile, beside others; 0 if an earlier row compiled it.
      result: the long generation.
    """

    ms: float
    tokens_per_second: float
    compile_s: float
    result: GenerationResult

    @property
    def accepted_length(self) -> float:
        """Tokens a round over all rows."""
        return sum(map(len, self.result.tokens)) / sum(self.result.rounds)


@dataclass(kw_only=True)
class Bench:
    """What the sections share.

    Attributes:
      model: the target.
      drafter: EAGLE, and its params.
      tokens: output lengths lie between half of this power of two and it, and share a program.
      repeats: samples that a median is taken of.
      read: measured bandwidth in bytes a second.
      packed: the step over packed weights, by this implementation; None for the model's own.
      plain: `ar` by batch, once measured.
      compile_seconds: of programs that no row has told of yet.
    """

    model: Target
    drafter: tuple[Any, Any]
    tokens: int
    repeats: int
    read: float
    results: Results
    packed: Implementation | None = None
    plain: dict[int, Measured] = field(default_factory=dict)
    compile_seconds: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def compile(self, rounds: Iterable[Rounds]) -> None:
        """The programs of all rounds, side by side."""
        distinct = {one.key: one for one in rounds}
        jobs = [self._job(one, self.tokens - 1) for one in distinct.values()]
        self.compile_seconds.update(zip(distinct, compile_all(jobs), strict=True))

    def _job(self, rounds: Rounds, count: int) -> Job:
        batch, method, drafter, draft = rounds
        options: dict[str, Any] = {"method": method, "drafter": drafter, "draft": draft, "packed": self.packed}
        return prepare(self.model, [list(PROMPT)] * batch, max_new_tokens=count, **options)

    def measure(self, rounds: Rounds) -> Measured:
        """Short and long generations in turn, after one of each that is not counted."""
        # Whole rounds of full chains, so that the limit trims none of them.
        step = rounds.draft.depth + 1
        short, long = -(-(self.tokens // 2) // step) * step, (self.tokens - 1) // step * step

        def decode(count: int) -> GenerationResult:
            return self._job(rounds, count).run()

        pairs = [(decode(short), decode(long)) for _ in range(self.repeats + 1)]
        first, last = pairs[0]
        seconds = median(b.log.seconds - a.log.seconds for a, b in pairs[1:])
        return Measured(
            ms=1e3 * seconds / (max(last.rounds) - max(first.rounds)),
            tokens_per_second=rounds.batch * (long - short) / seconds,
            compile_s=self.compile_seconds.pop(rounds.key, first.log.compile_seconds),
            result=last,
        )

    def ar(self, batch: int) -> Measured:
        """Plain decoding, measured and kept as a row when a section first asks for it."""
        if batch not in self.plain:
            self.plain[batch] = self.measure(Rounds(batch))
            self.add_round("ar", batch, chain(0), self.plain[batch], self.floor_bytes(batch))
        return self.plain[batch]

    def floor_bytes(self, batch: int, drafter_params: Any = None, depth: int = 0) -> int:
        """Bytes that a round must move."""
        config, weights = self.model.config, nbytes(self.model.params)
        if not config.tie_word_embeddings:  # else the table is looked up, not read
            weights -= nbytes(self.model.params["embeddings"])
        state = 4 * config.num_hidden_layers * config.num_v_heads * config.head_dim * config.head_v_dim
        if drafter_params is None:
            return weights + 2 * batch * state
        eagle = drafter_params["eagle"]
        fuse = nbytes(eagle["fc"])  # once a round
        head = drafter_params.get("head", () if "lm_head" in eagle else drafter_params["embedding"])
        return weights + 2 * batch * state + fuse + depth * (nbytes(eagle) - fuse + nbytes(head))

    def add_round(self, method: str, batch: int, draft: DraftConfig, measured: Measured, moved: int) -> None:
        """Keep a row of the section ``rounds``."""
        plain, floor = self.plain[batch], 1e3 * moved / self.read
        row = {
            "method": method,
            "batch": batch,
            "depth": draft.depth,
            "nodes": draft.nodes,
            "ms": measured.ms,
            "round_cost": measured.ms / plain.ms,
            "floor_ms": floor,
            "percent": 100 * floor / measured.ms,
            "drafted": sum(measured.result.drafted) / sum(measured.result.rounds),
            "accepted_length": measured.accepted_length,
            "tokens_per_second": measured.tokens_per_second,
            "speedup": measured.tokens_per_second / plain.tokens_per_second,
            "compile_s": measured.compile_s,
        }
        self.results.add("rounds", row | self.near_ties(f"{method} of {draft.nodes} nodes", batch, measured))

    def near_ties(self, label: str, batch: int, measured: Measured) -> dict[str, Any]:
        """Rows whose text parts from plain decoding's at a near tie; any other difference ends the run."""
        margins = []
        for row, (want, got) in enumerate(zip(self.plain[batch].result.tokens, measured.result.tokens, strict=True)):
            found = first_difference(self.model, PROMPT, want[: len(got)], got, SamplingConfig(), 0)
            if found is None:
                continue
            if not found.near_tie:
                stop(
                    f"{label}: row {row} parts from plain decoding at output token {found.index}, {found.expected} "
                    f"there and {found.got} here, by a margin of {found.margin:.3g}"
                )
            margins.append(found.margin)
        return {"near_ties": len(margins), "largest_margin": max(margins, default=None)}
