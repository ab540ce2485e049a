"""The ``decode`` command: prompts in, texts and a summary out."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from specla_jax.config import DraftConfig, SamplingConfig
from specla_jax.errors import UserError
from specla_jax.generate import DEFAULT_DRAFT, GenerationResult, Stream, generate, stream
from specla_jax.lossless import first_difference
from specla_jax.target import Target
from specla_jax.text import StreamDecoder, Tokenizer, load_tokenizer


def bundled_target() -> Path:
    """Folder of the small model that comes with the package."""
    return Path(__file__).parent / "bundled" / "gdn-small"


def bundled_drafter() -> Path:
    """Folder of the drafter of :func:`bundled_target`, which is used with it unless another is named."""
    return Path(__file__).parent / "bundled" / "gdn-small-drafter"


def decode(args: argparse.Namespace, note: Callable[[str], None]) -> int:
    """Runs the command; returns the exit status: 0, or 1 if ``--check-lossless`` found a difference."""
    from specla_jax.checkpoint import load_target

    draft = _draft(args)
    sampling = SamplingConfig(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p
    )  # checked before a large model is loaded
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    folder = args.target or bundled_target()
    drafter = args.drafter or ("ngram" if args.target else bundled_drafter())
    model = load_target(folder, dtype=dtype)
    tokenizer = load_tokenizer(folder)
    prompts = _prompt_ids(args, tokenizer, folder)
    if args.stop_ids is None:  # a configuration may name an id that its vocabulary lacks; a user may not
        stop_ids = [token for token in model.config.eos_token_ids if token < model.config.vocab_size]
    else:
        stop_ids = parse_ids(args.stop_ids, "--stop-ids")
    options: dict[str, Any] = {
        "drafter": drafter,
        "method": args.method,
        "max_new_tokens": args.max_new_tokens,
        **asdict(sampling),
        "seed": args.seed,
        "stop_token_ids": stop_ids,
        "draft": draft,
        "memory_limit": None if args.memory_limit is None else int(args.memory_limit * 2**30),
    }
    size = 1 if args.stream else args.batch_size or len(prompts)
    if size < 1:
        raise UserError(f"--batch-size must be 1 or more, got {size}")

    status = 0
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        if args.stream and not args.json:
            result = show_stream(stream(model, batch, report=note, **options), batch[0], tokenizer)
        else:
            result = generate(model, batch, report=note, **options)
        for row, prompt in enumerate(batch):
            if args.json:
                print(json.dumps(_entry(prompt, result, row, tokenizer)), flush=True)
            elif not args.stream:
                _show_text(start + row, prompt, result.tokens[row], tokenizer, len(prompts))
        note(summary(result, f"{args.method}, {args.drafter or Path(drafter).name}" if args.method != "ar" else "ar"))
        if args.check_lossless:
            status = max(status, _check(model, batch, result, options, sampling, note, start))
    return status


def summary(result: GenerationResult, name: str) -> str:
    """One line: speed, rounds, accepted length and acceptance by depth of a batch."""
    tokens, rounds = sum(map(len, result.tokens)), sum(result.rounds)
    seconds = result.log.seconds
    line = (
        f"{name}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s, "
        f"{max(result.rounds) / seconds:.1f} rounds/s, accepted length {tokens / rounds:.2f}"
    )
    by_depth = [sum(column) / rounds for column in zip(*result.accepted_at_depth, strict=True)]
    if by_depth:
        line += ", acceptance by depth " + " ".join(f"{share:.2f}" for share in by_depth)
    return line


def parse_ids(text: str, name: str) -> list[int]:
    """Token ids from ``"5,17,3"``.

    Raises:
      UserError: something in ``text`` is not an integer.
    """
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f'{name} must be integers as "5,17,3", got {text!r}') from None


def read_prompts(path: Path) -> list[str | list[int]]:
    """Prompts of a file: lines of text, or JSON objects with "prompt" or "prompt_ids".

    Raises:
      UserError: the file is absent, empty or not UTF-8, or a line of it is neither.
    """
    if not path.is_file():
        raise UserError(f"--prompts: no file {path}")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise UserError(f"--prompts: {path} is not UTF-8 text") from None
    if not lines:
        raise UserError(f"--prompts: {path} holds no prompt")
    if path.suffix != ".jsonl":
        return list(lines)
    return [_json_prompt(line, f"line {number} of {path}") for number, line in enumerate(lines, 1)]


def _json_prompt(line: str, place: str) -> str | list[int]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        entry = None
    if isinstance(entry, dict):
        ids, text = entry.get("prompt_ids"), entry.get("prompt")
        if isinstance(ids, list) and all(type(token) is int for token in ids):
            return ids
        if ids is None and isinstance(text, str):
            return text
    raise UserError(f'--prompts: {place} must be an object with "prompt" (text) or "prompt_ids" (integers)')


def _draft(args: argparse.Namespace) -> DraftConfig | None:
    """The draft's size: what was given, over the method's defaults."""
    if args.method == "ar":
        DraftConfig(depth=args.depth or 0, branch=args.branch or 1, nodes=1 if args.nodes is None else args.nodes)
        return None
    default = DEFAULT_DRAFT[args.method]
    depth = default.depth if args.depth is None else args.depth
    nodes = args.nodes
    if nodes is None:
        nodes = depth + 1 if args.method == "chain" else max(default.nodes, depth + 1)
    return DraftConfig(
        depth=depth,
        branch=default.branch if args.branch is None else args.branch,
        nodes=nodes,
        prune_tau=args.prune_tau,
    )


def _prompt_ids(args: argparse.Namespace, tokenizer: Tokenizer | None, folder: Path) -> list[list[int]]:
    if args.prompt_ids is not None:
        return [parse_ids(text, "--prompt-ids") for text in args.prompt_ids]
    prompts = args.prompt if args.prompt is not None else read_prompts(args.prompts)
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("--prompt is empty; give some text")
            if tokenizer is None:
                raise UserError(f"{folder} has no tokenizer.json or tokenizer.model; give token ids with --prompt-ids")
            prompt = tokenizer.encode(prompt)
        ids.append(prompt)
    return ids


def _text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    return ",".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


def _show_text(
    number: int, prompt: Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer | None, count: int
) -> None:
    if count > 1:
        print(f"--- prompt {number}")
    separator = " -> " if tokenizer is None else ""
    print(_text(prompt, tokenizer) + separator + _text(tokens, tokenizer), flush=True)


def show_stream(pieces: Stream, prompt: Sequence[int], tokenizer: Tokenizer | None) -> GenerationResult:
    """Prints a prompt and its text as it comes (ids without a tokenizer); the pieces add up to the final text."""
    decoder = None if tokenizer is None else StreamDecoder(tokenizer)
    print(_text(prompt, tokenizer), end="" if decoder else " ->", flush=True)
    for delta in pieces:
        text = decoder.push(delta.tokens) if decoder else "".join(f" {token}" for token in delta.tokens)
        print(text, end="", flush=True)
    print(decoder.finish() if decoder else "", flush=True)
    return pieces.result


def _entry(prompt: list[int], result: GenerationResult, row: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    tokens, seconds = result.tokens[row], result.log.seconds
    return {
        "prompt_ids": prompt,
        "tokens": tokens,
        "text": None if tokenizer is None else tokenizer.decode(tokens),
        "finish_reason": result.finish_reasons[row],
        "rounds": result.rounds[row],
        "drafted": result.drafted[row],
        "accepted": result.accepted[row],
        "accepted_length": result.accepted_length[row],
        "accepted_at_depth": result.accepted_at_depth[row],
        "logprobs": result.logprobs[row],
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
        "rounds_per_second": result.rounds[row] / seconds,
    }


def _check(
    model: Target,
    batch: list[list[int]],
    result: GenerationResult,
    options: dict[str, Any],
    sampling: SamplingConfig,
    note: Callable[[str], None],
    start: int,
) -> int:
    """Decodes the batch again without drafts and reports; 1 if a difference is more than a near tie."""
    plain = generate(model, batch, report=note, **(options | {"method": "ar", "drafter": "none", "draft": None}))
    note(summary(plain, "ar"))
    status = 0
    for row, prompt in enumerate(batch):
        found = first_difference(model, prompt, plain.tokens[row], result.tokens[row], sampling, options["seed"])
        name = f"lossless check, prompt {start + row}"
        if found is None:
            note(f"{name}: {len(plain.tokens[row])} tokens equal plain decoding")
            continue
        kind = "a near tie" if found.near_tie else "NOT a near tie"
        note(
            f"{name}: first difference at output token {found.index}: {found.expected} by plain decoding, "
            f"{found.got} here; top-2 margin {found.margin:.3g}, {kind}"
        )
        status = max(status, 0 if found.near_tie else 1)
    return status
