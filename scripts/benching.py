"""What the benchmarks share: timing of compiled loops, measured bandwidth, a peer, results that survive a cut run."""

import importlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

LEAST = 2.5e-6  # seconds that no launch takes less than
MOST = 4.8e12  # bytes a second that no card here moves

Carry = Any
Step = Callable[[Carry, Any], Carry]
Sizes = tuple[int, int, int, int]  # heads, value heads, dk, dv


@dataclass(frozen=True, kw_only=True)
class Timing:
    """repeats: samples a median is taken of. seconds: the least time of one call of a program."""

    repeats: int = 20
    seconds: float = 0.005


class Loop:
    """A step, repeated by one compiled program: ``step(carry, fixed) -> carry``.

    The carry is donated and must hold what the step makes, or XLA would leave it out; ``fixed`` holds what it reads.
    ``moved`` bytes and ``launches`` of kernels a step say how often one call must repeat it to take long enough.
    """

    def __init__(self, step: Step, carry: Carry, fixed: Any, *, moved: int, launches: int, timing: Timing) -> None:
        self.timing = timing
        self.moved = moved
        self.steps = max(1, math.ceil(timing.seconds / max(launches * LEAST, moved / MOST)))
        self.carry = jax.tree.map(jnp.copy, carry)
        self.fixed = fixed

        def repeat(carry: Carry, fixed: Any) -> Carry:
            return lax.fori_loop(0, self.steps, lambda _, c: step(c, fixed), carry)

        self.program = jax.jit(repeat, donate_argnums=0).lower(self.carry, fixed).compile()
        self.large_copies = _large_copies(self.program.as_text() or "")
        if self.large_copies:
            print(f"  note: {self.large_copies} copies of 1 MB or more in this program", flush=True)

    def seconds(self, fixed: Any = None, repeats: int | None = None) -> float:
        """Median seconds of a step, with ``fixed`` in place of the first one if given (same shapes)."""
        fixed = self.fixed if fixed is None else fixed
        for _ in range(3):  # warm up; also says how long a call takes
            single = self._sample(fixed, 1)
        if jax.default_backend() == "gpu" and single < 2e-3:
            print(f"  note: a call takes {1e3 * single:.2f} ms, under 2 ms", flush=True)
        # Several calls a sample, so that only the first one waits for the host.
        calls = min(4, max(1, math.ceil(4 * self.timing.seconds / single)))
        samples = [self._sample(fixed, calls) for _ in range(repeats or self.timing.repeats)]
        return median(samples) / self.steps

    def _sample(self, fixed: Any, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self.carry = self.program(self.carry, fixed)
        jax.block_until_ready(self.carry)
        return (time.perf_counter() - start) / calls


def _large_copies(text: str) -> int:
    """Copies of at least 2^18 elements in an optimised program: a state that was meant to be updated in place."""
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
    return sum(math.prod(map(int, shape.split(","))) >= 2**18 for shape in shapes)


def fastest(
    candidates: Sequence[Any], build: Callable[[Any], Loop], label: str, repeats: int = 3
) -> list[tuple[float, Any]]:
    """Seconds of every candidate that runs, the fastest first; one that fails is printed and left out."""
    times = []
    for candidate in candidates:
        try:
            times.append((build(candidate).seconds(repeats=repeats), candidate))
        except Exception as error:  # whatever a compiler may throw: the others still count
            print(f"  {label} {candidate} fails: {_first_line(error)}", flush=True)
    return sorted(times, key=lambda timed: timed[0])


def read_bandwidth(size: int | None = None) -> float:
    """Bytes a second of a sum over a large array of ``size`` bytes, 4 GiB on a GPU."""
    size = size or (2**28 if jax.default_backend() == "cpu" else 2**32)
    data = jnp.ones(size // 2, jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x.astype(jnp.float32)))
    total(data).block_until_ready()
    start = time.perf_counter()
    for _ in range(10):
        result = total(data)
    result.block_until_ready()
    return 10 * size / (time.perf_counter() - start)


def copy_bandwidth(size: int | None = None) -> float:
    """Bytes a second, read and written counted both, of an fp32 array of ``size`` bytes made from another one."""
    size = size or (2**27 if jax.default_backend() == "cpu" else 2**31)
    data = jnp.ones(size // 4, jnp.float32)
    step = jax.jit(lambda x: x * 1.0001)
    data = step(step(data)).block_until_ready()
    start = time.perf_counter()
    for _ in range(10):
        data = step(data)
    data.block_until_ready()
    return 20 * size / (time.perf_counter() - start)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays (or shapes) in ``tree``."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def ratio(other: float | None, ours: float) -> float | None:
    """How many times faster ours is."""
    return None if other is None else other / ours


def scaled(seconds: float | None, by: float) -> float | None:
    """Seconds in another unit."""
    return None if seconds is None else seconds * by


class Results:
    """Figures by section, written to ``path`` after every row, since a run may be cut."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"meta": meta}

    @classmethod
    def read(cls, path: Path) -> "Results":
        """What an earlier run has written; ends with a line where it has not."""
        if not path.is_file():
            stop(f"{path} does not exist: --report shows what an earlier run has written")
        results = cls(path, {})
        results.data = json.loads(path.read_text())
        return results

    def add(self, section: str, row: dict[str, Any]) -> None:
        """Keep a row and show it."""
        self.data.setdefault(section, []).append(row)
        self._write()
        print(f"{section}: " + "  ".join(f"{key}={show(value)}" for key, value in row.items()), flush=True)

    def rows(self, section: str) -> list[dict[str, Any]]:
        """The rows of a section so far."""
        return self.data.get(section, [])

    def _write(self) -> None:
        whole = self.path.with_suffix(".tmp")  # a run that is cut while it writes leaves the rows before
        whole.write_text(json.dumps(self.data, indent=1) + "\n")
        whole.replace(self.path)


def show(value: Any) -> str:
    """A figure with four digits; "-" for None."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """The ``columns`` of ``rows``: key to heading."""
    cells = [list(columns.values()), *([show(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def judge(what: str, bound: float, values: Sequence[float | None], *, most: bool) -> dict[str, Any]:
    """A target and the worst of the figures held against it; met is None for what was not measured."""
    known = [value for value in values if value is not None]
    worst = None if not known else max(known) if most else min(known)
    met = None if worst is None else worst <= bound if most else worst >= bound
    return {"target": what, "bound": f"{'<=' if most else '>='} {bound:g}", "worst": worst, "met": met}


def verdicts(found: list[dict[str, Any]]) -> str:
    """The table of what :func:`judge` found."""
    met = {True: "yes", False: "NO", None: "-"}
    rows = [row | {"met": met[row["met"]]} for row in found]
    return f"targets\n{table(rows, {key: key for key in ('target', 'bound', 'worst', 'met')})}"


class Fla:
    """flash-linear-attention's kernels and model; every time is None where it is not installed."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.version: str | None = None
        try:
            self.torch: Any = importlib.import_module("torch")
            self.ops: Any = importlib.import_module("fla.ops.gated_delta_rule")
            if not self.torch.cuda.is_available():
                raise ImportError("torch sees no GPU")
            self.version = getattr(importlib.import_module("fla"), "__version__", "unknown")
        except Exception as error:  # a broken installation of a peer must not stop our own figures
            print(f"no figures of flash-linear-attention: {_first_line(error)}", flush=True)

    def chain(self, rows: int, tokens: int, sizes: Sizes, layers: int) -> float | None:
        """Seconds a layer of the fused recurrence over a chain; with the final state written or not, the faster."""
        return self._fastest("fused_recurrent_gated_delta_rule", rows, tokens, sizes, layers)

    def prefill(self, rows: int, tokens: int, sizes: Sizes) -> float | None:
        """Seconds of the chunked forward pass over a prompt, one layer."""
        return self._fastest("chunk_gated_delta_rule", rows, tokens, sizes, 1)

    def decode(self, config: dict[str, Any], batch: int) -> dict[str, float | None]:
        """Seconds of a token of its model in bfloat16, with random weights.

        Args:
          config: content of its config.json.
          batch: rows.

        Returns:
          By way of decoding: ``generate``; ``eager``, its forward pass and argmax called from Python; ``graph``, the
          same replayed from a CUDA graph.
        """
        ways = {"generate": self._generate_seconds, "eager": self._eager_seconds, "graph": self._replay_seconds}
        times: dict[str, float | None] = dict.fromkeys(ways)
        if self.version is None:
            return times
        torch = self.torch
        try:
            models = importlib.import_module("fla.models")
            with torch.device("cuda"):
                model = models.GatedDeltaNetForCausalLM(models.GatedDeltaNetConfig.from_dict(config))
            model = model.to(torch.bfloat16).eval()
            prompt = torch.randint(1, config["vocab_size"], (batch, 32), device="cuda")
        except Exception as error:
            print(f"  the model of flash-linear-attention fails: {_first_line(error)}", flush=True)
            return times
        for name, seconds in ways.items():
            try:
                with torch.no_grad():  # with gradients its layers take the chunked kernel for a single token too
                    times[name] = seconds(model, prompt)
            except Exception as error:
                print(f"  {name} of flash-linear-attention fails: {_first_line(error)}", flush=True)
        del model
        torch.cuda.empty_cache()
        return times

    def _generate_seconds(self, model: Any, prompt: Any) -> float:
        short, long = 8, 40

        def sample(tokens: int) -> float:
            start = time.perf_counter()
            model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
            self.torch.cuda.synchronize()
            return time.perf_counter() - start

        sample(short)  # warms up
        return median((sample(long) - sample(short)) / (long - short) for _ in range(3))

    def _eager_seconds(self, model: Any, prompt: Any) -> float:
        step = self._token_step(model, prompt)

        def sample(tokens: int) -> float:
            start = time.perf_counter()
            for _ in range(tokens):
                step()
            self.torch.cuda.synchronize()
            return (time.perf_counter() - start) / tokens

        sample(3)
        return median(sample(16) for _ in range(3))

    def _replay_seconds(self, model: Any, prompt: Any) -> float:
        return self._graph_seconds(self._token_step(model, prompt))

    def _token_step(self, model: Any, prompt: Any) -> Callable[[], Any]:
        """A token more after ``prompt``; its cache moves on, the token that is fed stays, since a graph fixes it."""
        cache = model(prompt, use_cache=True).past_key_values
        token = prompt[:, -1:].clone()
        return lambda: model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)

    def _fastest(self, name: str, rows: int, tokens: int, sizes: Sizes, layers: int) -> float | None:
        if self.version is None:
            return None
        times = []
        for final in (False, True):
            try:
                times.append(self._seconds(getattr(self.ops, name), rows, tokens, sizes, layers, final) / layers)
            except Exception as error:
                print(f"  {name} of flash-linear-attention fails: {_first_line(error)}", flush=True)
            self.torch.cuda.empty_cache()  # JAX allocates from the same card
        return min(times, default=None)

    def _seconds(self, op: Any, rows: int, tokens: int, sizes: Sizes, layers: int, final: bool) -> float:
        torch, (heads, value_heads, dk, dv) = self.torch, sizes

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        q, k = (torch.nn.functional.normalize(normal(rows, tokens, heads, dk), dim=-1) for _ in range(2))
        first = normal(rows, tokens, value_heads, dv)
        decay = -0.1 * torch.rand(rows, tokens, value_heads, device="cuda")
        beta = torch.rand(rows, tokens, value_heads, device="cuda")
        states = [torch.randn(rows, value_heads, dk, dv, device="cuda") for _ in range(layers)]

        def step() -> None:
            v = first
            for state in states:
                v, _ = op(q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=final)

        with torch.no_grad():
            return self._graph_seconds(step)

    def _graph_seconds(self, step: Callable[[], None]) -> float:
        torch = self.torch
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        def sample(replays: int) -> float:
            start = time.perf_counter()
            for _ in range(replays):
                graph.replay()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / replays

        for _ in range(3):
            single = sample(1)
        replays = max(1, math.ceil(4 * self.timing.seconds / single))
        return median(sample(replays) for _ in range(self.timing.repeats))


def stop(message: str) -> NoReturn:
    """End with one line on stderr and exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
