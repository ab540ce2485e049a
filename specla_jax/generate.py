"""Generation from Python: ``generate`` for whole texts, ``stream`` for tokens as they come."""

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.implementations import Implementation
from specla_jax.config import DraftConfig, SamplingConfig
from specla_jax.decode_step import DecodeStep
from specla_jax.drafters import get_drafter
from specla_jax.errors import UserError
from specla_jax.loop import Carry, Engine, Params, Request
from specla_jax.memory import check_fits, format_bytes, free_memory, memory_use
from specla_jax.model import GatedDeltaNetLM
from specla_jax.sampling import Sampler
from specla_jax.target import Target

Method = Literal["ar", "chain", "tree"]

_NO_DRAFT = DraftConfig(depth=0, branch=1, nodes=1)
DEFAULT_DRAFT = {
    "ar": _NO_DRAFT,
    "chain": DraftConfig(depth=7, branch=1, nodes=8),
    "tree": DraftConfig(depth=7, branch=4, nodes=16),
}


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """Measurements of one call.

    Attributes:
      seconds: from the start of prefill to the last token, without compilation.
      compile_seconds: time spent compiling in this call.
      compilations: programs compiled in this call.
      bytes: planned memory by kind.
    """

    seconds: float
    compile_seconds: float
    compilations: int
    bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """Texts and counts, one entry a prompt.

    Attributes:
      tokens: output tokens, the stop token included, the prompt not.
      finish_reasons: "stop" or "length".
      rounds: verifications.
      drafted: tokens proposed.
      accepted: drafted tokens that were committed.
      accepted_at_depth: the same by depth, 1 first.
      logprobs: log-probability of each output token under the target, before temperature and filters.
      log: times and bytes of the whole batch.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    rounds: list[int]
    drafted: list[int]
    accepted: list[int]
    accepted_at_depth: list[list[int]]
    logprobs: list[list[float]]
    log: RunLog

    @property
    def accepted_length(self) -> list[float]:
        """Committed tokens a round, bonus included, after stop trimming."""
        return [len(tokens) / rounds for tokens, rounds in zip(self.tokens, self.rounds, strict=True)]


@dataclass(frozen=True)
class Delta:
    """Tokens that a row has just got."""

    row: int
    tokens: list[int]


def generate(model: Target, prompts: Sequence[Sequence[int]], **options: Any) -> GenerationResult:
    """Decodes all prompts as one batch, in one compiled program from prefill to the last token.

    Args:
      model: from :func:`load_target`.
      prompts: token ids, at least one a prompt.
      **options: see :func:`prepare`.

    Raises:
      UserError: an argument is wrong, or the run would not fit in memory.
    """
    return prepare(model, prompts, **options).run()


def stream(model: Target, prompts: Sequence[Sequence[int]], **options: Any) -> "Stream":
    """The same texts as :func:`generate`, as tokens come.

    Args:
      model, prompts, **options: as for :func:`generate`.

    Returns:
      An iterable of :class:`Delta`; its ``result`` is there once it is exhausted.

    Raises:
      UserError: an argument is wrong, or the run would not fit in memory.
    """
    return Stream(prepare(model, prompts, **options))


class Stream:
    """Rounds called from Python: the same function that :func:`generate` loops over on the device.

    Attributes:
      result: texts and counts, after the last token; before that, reading it raises AttributeError.
    """

    result: GenerationResult

    def __init__(self, job: "Job") -> None:
        self._job = job
        self._prefill, self._spec_round = compile_rounds(job)

    def __iter__(self) -> Iterator[Delta]:
        job, carry = self._job, self._job.carry()
        known = np.array([len(prompt) for prompt in job.prompts])
        start = time.perf_counter()
        carry = self._prefill(job.params, carry)
        seconds = time.perf_counter() - start
        active = np.array([True])
        while active.any():
            start = time.perf_counter()
            carry = self._spec_round(job.params, carry)
            tokens, length, active = jax.device_get((carry.context.tokens, carry.context.length, carry.context.active))
            seconds += time.perf_counter() - start  # what is done with the tokens does not count
            for row in np.flatnonzero(length > known):
                yield Delta(int(row), tokens[row, known[row] : length[row]].tolist())
            known = length
        self.result = job.result(carry, seconds)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked request, ready to compile and run.

    Attributes:
      compiled_before: programs and seconds of compilation before this job, for the log.
    """

    model: Target
    engine: Engine
    params: Params
    prompts: Sequence[Sequence[int]]
    request: Request
    capacity: int
    bytes: dict[str, int]
    report: Callable[[str], None]
    compiled_before: tuple[int, float]

    def carry(self) -> Carry:
        """A fresh carry, to be donated to the first program."""
        tokens = np.zeros((len(self.prompts), self.capacity), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in self.prompts], np.int32)
        return self.engine.init(jnp.asarray(tokens), jnp.asarray(lengths), self.request)

    def compile(self, method: str, carry: Carry) -> Callable[..., Any]:
        """A method of the engine as a program of the model's, compiled now if it is new."""
        programs = self.model.programs
        before = programs.count, programs.seconds
        program = programs.get(self.engine, method, self.params, carry)
        if programs.count > before[0]:
            self.report(
                f"compiled {method} for prompts of up to {self.engine.prefill_length + 1} tokens in "
                f"{programs.seconds - before[1]:.1f} s ({programs.count} programs so far)"
            )
        return program

    def run(self) -> GenerationResult:
        """All of it in one program; neither its compilation nor the carry before it count as time."""
        carry = jax.block_until_ready(self.carry())
        run = self.compile("generate", carry)
        start = time.perf_counter()
        carry = jax.block_until_ready(run(self.params, carry))
        return self.result(carry, time.perf_counter() - start)

    def result(self, carry: Carry, seconds: float) -> GenerationResult:
        """Fetches a finished carry."""
        context, counters = carry.context, carry.counters
        tokens, length, logprobs, stopped, counted = jax.device_get(
            (context.tokens, context.length, carry.logprobs, carry.stopped, counters)
        )
        spans = [slice(len(prompt), length[row]) for row, prompt in enumerate(self.prompts)]
        return GenerationResult(
            tokens=[tokens[row, span].tolist() for row, span in enumerate(spans)],
            finish_reasons=["stop" if row else "length" for row in stopped],
            rounds=counted.rounds.tolist(),
            drafted=counted.drafted.tolist(),
            accepted=counted.accepted.tolist(),
            accepted_at_depth=counted.accepted_at_depth.tolist(),
            logprobs=[logprobs[row, span].tolist() for row, span in enumerate(spans)],
            log=RunLog(
                seconds=seconds,
                compile_seconds=self.model.programs.seconds - self.compiled_before[1],
                compilations=self.model.programs.count - self.compiled_before[0],
                bytes=self.bytes,
            ),
        )


def compile_rounds(job: Job) -> tuple[Any, Any]:
    """``Engine.prefill`` and ``Engine.spec_round`` as two programs, both ready before the first token."""
    before = jax.eval_shape(job.carry)
    prefill = job.compile("prefill", before)
    # Tracing alone tells what prefill returns.
    trace = functools.partial(jax.eval_shape, job.engine.prefill, job.params, before)
    after = job.model.programs.remember((job.engine, "after prefill"), job.params, before, trace)
    return prefill, job.compile("spec_round", after)


def compile_all(jobs: Iterable[Job]) -> list[float]:
    """Compiles what ``generate`` runs for each job, side by side: a compiler works on one core.

    Returns the seconds that each took.
    """

    def compile(job: Job) -> float:
        start = time.perf_counter()
        job.compile("generate", jax.eval_shape(job.carry))
        return time.perf_counter() - start

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile, jobs))


def bucket(count: int) -> int:
    """The static size that serves ``count``: powers of two from 64, so that few programs serve all lengths."""
    return 1 << max(6, (count - 1).bit_length())


def prepare(
    model: Target,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Any = None,
    method: Method = "tree",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] = (),
    draft: DraftConfig | None = None,
    prefill_length: int | None = None,
    packed: Implementation | None = None,
    memory_limit: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Job:
    """Checks a request and states its memory.

    Args:
      model: the target.
      prompts: token ids.
      drafter: None (``ngram`` unless the method is ``ar``), "ngram", "none", a drafter folder, or a (drafter, params)
        pair.
      method: "ar" decodes one token a round; "chain" and "tree" verify drafts.
      max_new_tokens: limit of each output, the stop token included.
      temperature, top_k, top_p, min_p: see :class:`SamplingConfig`.
      seed: 0 to 2**32 - 1, one for all prompts or one each.
      stop_token_ids: ids that end a text; none by default.
      draft: size of the drafts; None for the method's default. A chain has ``branch=1``.
      prefill_length: static length of the prefill, at least the longest prompt less one; None rounds that up to a power
        of two. One length for many requests means one program.
      packed: verify over packed weights, their products by this implementation (see
        :func:`kernels_pallas.stream_matmul`); None: over the parameters.
      memory_limit: bytes this run may use beside the weights; None for what is free.
      report: receives a line on memory and one for each compilation.

    Raises:
      UserError: names the argument, its value and what would be right.
    """
    config = model.config
    if method not in DEFAULT_DRAFT:
        raise UserError(f"method must be one of {', '.join(DEFAULT_DRAFT)}, got {method!r}")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    _check_prompts(prompts, config.vocab_size)
    seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise UserError(f"seed must be one number or one for each of the {len(prompts)} prompts, got {len(seeds)}")
    for value in seeds:
        if not 0 <= value < 2**32:
            raise UserError(f"seed must be 0 to {2**32 - 1}, got {value}")
    for token in stop_token_ids:
        if not 0 <= token < config.vocab_size:
            raise UserError(f"stop_token_ids: {token} is outside the vocabulary of {config.vocab_size}")
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    if method == "ar":
        draft, drafter = _NO_DRAFT, "none"
    elif draft is None:
        draft = DEFAULT_DRAFT[method]
    if method == "chain" and draft.branch != 1:
        raise UserError(f"branch must be 1 for method 'chain', got {draft.branch}")
    drafter, drafter_params = get_drafter("ngram" if drafter is None else drafter, draft, model, packed)

    longest = max(len(prompt) for prompt in prompts)
    if prefill_length is None:
        prefill_length = bucket(longest - 1)
    elif prefill_length < longest - 1:
        raise UserError(f"prefill_length must be at least {longest - 1} for these prompts, got {prefill_length}")
    network = GatedDeltaNetLM(config, model.dtype, getattr(drafter, "feature_layers", None))
    step = None
    if packed is not None:
        layers = network.feature_layers or config.feature_layers
        step = DecodeStep(config=config, dtype=model.dtype, feature_layers=layers, implementation=packed)
    engine = Engine(model=network, drafter=drafter, prefill_length=prefill_length, step=step)
    stops = sorted(set(stop_token_ids))
    request = Request(
        sampler=Sampler.create(sampling, seeds),
        stop_tokens=jnp.asarray(stops + [-1] * (-len(stops) % 8 or 8 * (not stops)), jnp.int32),
        limit=jnp.asarray([len(prompt) + max_new_tokens for prompt in prompts], jnp.int32),
    )
    params = Params(model.params, drafter_params, None if step is None else model.decode_weights)
    capacity = engine.prefill_length + bucket(max_new_tokens + 1)
    rows = jax.ShapeDtypeStruct((len(prompts),), jnp.int32)
    tokens = jax.ShapeDtypeStruct((len(prompts), capacity), jnp.int32)
    abstract = jax.eval_shape(engine.init, tokens, rows, request)
    planned = model.programs.remember(
        (engine, "memory"), params, abstract, lambda: memory_use(engine, params, abstract)
    )
    report("memory: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in planned.items()))
    check_fits(planned, free_memory() if memory_limit is None else memory_limit)
    return Job(
        model=model,
        engine=engine,
        params=params,
        prompts=prompts,
        request=request,
        capacity=capacity,
        bytes=planned,
        report=report,
        compiled_before=(model.programs.count, model.programs.seconds),
    )


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    if not prompts:
        raise UserError("prompts must hold at least one prompt")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {i} is empty; give at least one token")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise UserError(f"prompt {i}: token id {token} is outside the vocabulary of {vocab_size}")
