"""Where the time of a round goes: the kernels of each stage, and what lies between kernels."""

import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from specla_jax.errors import UserError
from specla_jax.generate import Job, compile_rounds

# The scopes of ``Engine.spec_round``, and within the verification the ops that are told apart.
SCOPES = ("draft", "verify", "accept", "recover", "commit")
VERIFY = {"tree_conv": "verify: convolution", "gdn_verify": "verify: delta rule", "lm_head": "verify: head"}
REST = "verify: products, norms"
STAGES = ("draft", *VERIFY.values(), REST, "accept", "recover", "commit", "other")
_WARM_UP = 2  # rounds


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A round by stage.

    Attributes:
      method: of generation.
      launches, milliseconds: of a round, by stage of :data:`STAGES`; on a CPU a launch is an operation of the program.
      round_milliseconds: of a round that nobody watches.
    """

    method: str
    launches: Mapping[str, float]
    milliseconds: Mapping[str, float]
    round_milliseconds: float

    @property
    def between(self) -> float:
        """Milliseconds of a round outside of kernels; negative where kernels run side by side."""
        return self.round_milliseconds - sum(self.milliseconds.values())


def profile(job: Job, method: str, rounds: int = 8) -> Profile:
    """Runs that many rounds under JAX's profiler, and as many without it before.

    Raises UserError if the profiler names no operation of the program.
    """
    prefill, spec_round = compile_rounds(job)

    def run(carry: Any, times: int) -> Any:
        for _ in range(times):
            carry = spec_round(job.params, carry)
        return jax.block_until_ready(carry)

    carry = run(prefill(job.params, job.carry()), _WARM_UP)
    start = time.perf_counter()
    carry = run(carry, rounds)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(carry, rounds)
        seen = list(_operations(Path(folder)))
    text = spec_round.as_text()
    names = dict(re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', text, re.MULTILINE))
    module = re.search(r"^HloModule ([\w.\-]+)", text)
    seen = [(op, ns) for where, op, ns in seen if module is not None and where == module[1]]
    if not seen:
        raise UserError("the profiler of this JAX names no operation of the round, so there is nothing to profile")
    launches, milliseconds = dict.fromkeys(STAGES, 0.0), dict.fromkeys(STAGES, 0.0)
    for op, ns in seen:
        name = stage(names.get(op, ""))
        launches[name] += 1 / rounds
        milliseconds[name] += ns / rounds / 1e6
    return Profile(
        method=method,
        launches=launches,
        milliseconds=milliseconds,
        round_milliseconds=1e3 * seconds / rounds,
    )


def stage(op_name: str) -> str:
    """The stage of an operation, by the scopes in its name."""
    scopes = op_name.split("/")
    top = next((scope for scope in scopes if scope in SCOPES), "other")
    if top != "verify":
        return top
    return next((name for op, name in VERIFY.items() if op in scopes), REST)


def _operations(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Module, operation and nanoseconds of every event that has an operation, without what runs within it."""
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                yield from _own_times(line.events)


def _own_times(events: Any) -> Iterator[tuple[str, str, float]]:
    open_events: list[list[Any]] = []  # [end, module, operation, own nanoseconds], one within the other
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib's own type of ``stats``
        found = [(event.start_ns, event.duration_ns, dict(event.stats)) for event in events]
    found = sorted((item for item in found if "hlo_op" in item[2]), key=lambda item: (item[0], -item[1]))
    for start, duration, stats in found:
        while open_events and open_events[-1][0] <= start:
            yield tuple(open_events.pop()[1:])  # pyrefly: ignore[bad-return]
        if open_events:
            open_events[-1][3] -= duration
        open_events.append([start + duration, stats.get("hlo_module", ""), stats["hlo_op"], duration])
    for event in reversed(open_events):
        yield tuple(event[1:])  # pyrefly: ignore[bad-return]


def table(profiles: Sequence[Profile]) -> str:
    """Milliseconds of a round by stage and method, with launches in brackets."""
    width = max(map(len, STAGES))

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name:<{width}}" + "".join(f"{cell:>18}" for cell in cells)

    def figures(title: str, number: Callable[[Profile], float]) -> str:
        return line(title, [f"{number(one):.3f}      " for one in profiles])

    lines = [line("ms a round (launches)", [one.method for one in profiles])]
    for name in STAGES:
        if any(one.launches[name] for one in profiles):
            cells = [f"{one.milliseconds[name]:.3f} ({one.launches[name]:.0f})" for one in profiles]
            lines.append(line(name, cells))
    lines.append(figures("between kernels", lambda one: one.between))
    lines.append(figures("round", lambda one: one.round_milliseconds))
    return "\n".join(lines) + "\n"


def write(profiles: Sequence[Profile], out: Path) -> None:
    """Writes ``profile.json``, whole or not at all."""
    part = out / "profile.json.part"
    part.write_text(json.dumps([asdict(one) | {"between": one.between} for one in profiles], indent=2) + "\n")
    os.replace(part, out / "profile.json")
