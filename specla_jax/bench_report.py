"""What a benchmark's measurements add up to: figures by method, a table, a plot, and SpecLA's figures beside them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specla_jax.bench_records import Measured, Record

Row = dict[str, Any]

# Okabe and Ito's palette: told apart by every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


@dataclass(frozen=True)
class Published:
    """Figures reported of SpecLA (arXiv 2607.16673) for a suite and a kind of draft; None where there is none."""

    accepted_length: float | None
    first_token_match: float | None
    speedup: float


PUBLISHED = {
    ("gsm8k", "chain"): Published(3.47, 0.68, 1.54),
    ("gsm8k", "tree"): Published(5.00, 0.81, 1.70),
    ("humaneval", "chain"): Published(None, None, 1.03),
    ("humaneval", "tree"): Published(None, None, 1.06),
    ("spec-bench", "chain"): Published(None, None, 1.26),
    ("spec-bench", "tree"): Published(None, None, 1.42),
}
PUBLISHED_SETTING = (
    "SpecLA: as reported of arXiv 2607.16673 (by summaries, where the abstract does not say) for "
    "m-a-p/1.3B-100B-GatedDeltaNet-pure on one H100, batch 1, greedy, all prompts of a suite (spec-bench: its mixed "
    "suite of 480); its chain has 8 tokens, its tree at most 16 nodes and top-k 4, its speed-up is over its own "
    "autoregressive decoding. Its drafter's data, its prompt format and its output length are not known. Compare only "
    "with the same checkpoint."
)


def repeated_fourgrams(tokens: Sequence[int]) -> tuple[int, int]:
    """4-grams that stood earlier in the text, and all 4-grams."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(grams) - len(set(grams)), len(grams)


def break_even_acceptance(round_cost: float, depth: int) -> float | None:
    """Acceptance a, the same at every depth, at which a round yields ``round_cost`` tokens: 1 + a + ... + a^depth.

    Below it drafting is slower than plain decoding. 0 if a round costs no more than a plain step, None if no acceptance
    pays.
    """
    if round_cost <= 1:
        return 0.0
    if round_cost > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(depth + 1)) < round_cost else (low, middle)
    return high


def summarise(records: Iterable[Record], method: str, group: str | None = None) -> Row:
    """Figures of a method over batches, or over their rows of one group.

    Means are over rounds, not over prompts. Speed is left out (None) for a group that shares batches with others.
    ``round_cost`` is the time of a round over the time of a round of ``ar`` in the same run, prefill left out;
    ``speedup`` is the ratio of tokens a second, prefill included; ``break_even_acceptance``: see the function.
    """
    chosen = [(record, [i for i, name in enumerate(record.groups) if group in (None, name)]) for record in records]
    chosen = [(record, rows) for record, rows in chosen if rows]

    def total(name: str) -> int:
        return sum(getattr(record.methods[method], name)[row] for record, rows in chosen for row in rows)

    rounds, tokens, fourgrams = total("rounds"), total("tokens"), total("fourgrams")
    at_depth = [record.methods[method].accepted_at_depth[row] for record, rows in chosen for row in rows]
    accepted = [sum(column) for column in zip(*at_depth, strict=True)]
    reached = [rounds, *accepted]
    differences = [
        found for record, rows in chosen for found in record.methods[method].differences if found["row"] in rows
    ]
    summary: Row = {
        "prompts": sum(len(rows) for _, rows in chosen),
        "tokens": tokens,
        "rounds": rounds,
        "drafted_a_round": total("drafted") / rounds,
        "accepted_length": tokens / rounds,
        "first_token_match": accepted[0] / rounds if accepted else None,
        "acceptance_by_depth": [a / b if b else None for a, b in zip(accepted, reached, strict=False)],
        "repeated_4grams": total("repeated") / fourgrams if fourgrams else None,
        "differing": len(differences),
        "differing_beyond_near_ties": sum(not found["near_tie"] for found in differences),
        "largest_margin": max((found["margin"] for found in differences if found["margin"] is not None), default=None),
    }
    timed = all(len(rows) == len(record.groups) for record, rows in chosen)
    return summary | _speed([record for record, _ in chosen] if timed else [], method, len(accepted))


def _speed(records: Sequence[Record], method: str, depth: int) -> Row:
    """Times of whole batches; every figure is None without any."""
    names = ("seconds", "tokens_per_second", "speedup", "median_speedup", "round_ms", "round_cost")
    if not records:
        return dict.fromkeys((*names, "break_even_acceptance"))
    mine, plain = ([record.methods[name] for record in records] for name in (method, "ar"))
    seconds = sum(run.seconds for run in mine)
    ratios = [_rate([a]) / _rate([b]) for a, b in zip(mine, plain, strict=True)]
    time, plain_time = _round_seconds(mine), _round_seconds(plain)
    cost = time / plain_time if time and plain_time else None
    figures = (
        seconds, _rate(mine), _rate(mine) / _rate(plain), median(ratios), 1e3 * time if time else None, cost
    )  # fmt: skip
    even = None if cost is None or depth == 0 else break_even_acceptance(cost, depth)
    return dict(zip(names, figures, strict=True)) | {"break_even_acceptance": even}


def _rate(runs: Sequence[Measured]) -> float:
    return sum(sum(run.tokens) for run in runs) / sum(run.seconds for run in runs)


def _round_seconds(runs: Sequence[Measured]) -> float | None:
    """Seconds of a round after the first; a batch takes as many rounds as its slowest row."""
    rounds = sum(max(run.rounds) - 1 for run in runs)
    seconds = sum(run.seconds - run.first_seconds for run in runs)
    return seconds / rounds if rounds and seconds > 0 else None  # a few short texts can drown in noise


def table(parts: Sequence[Row]) -> str:
    """A Markdown table with a line for each part and method; see :func:`lines` for a part's fields."""
    head = (
        "suite", "T", "method", "prompts", "accepted length", "first token", "acceptance by depth", "ms a round",
        "round cost", "breaks even at", "tokens/s", "speed-up", "median", "repeated 4-grams", "texts unlike AR",
        "SpecLA",
    )  # fmt: skip
    return markdown(head, [line for part in parts for line in lines(part)])


def category_table(parts: Sequence[Row]) -> str:
    """Accepted length and speed-up by category, as Markdown below an empty line; nothing for suites without any."""
    names = [name for name in parts[0]["methods"] if name != "ar"]
    body = [
        (part["suite"], group, f"{part['temperature']:g}", str(rows["ar"]["prompts"]), *(_pair(rows[n]) for n in names))
        for part in parts
        for group, rows in part.get("groups", {}).items()
    ]
    head = ("suite", "category", "T", "prompts", *(f"{name}: accepted, speed-up" for name in names))
    return "\n\n" + markdown(head, body) if body else ""


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    rows = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, *body)]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {row} |" for row in (rows[0], rule, *rows[1:]))


def lines(part: Row) -> list[tuple[str, ...]]:
    """The cells of a part: its ``suite``, ``temperature``, and ``methods`` as :func:`summarise` gives them."""
    return [
        (
            part["suite"],
            f"{part['temperature']:g}",
            name,
            str(row["prompts"]),
            _number(row["accepted_length"]),
            _number(row["first_token_match"]),
            " ".join(map(_number, row["acceptance_by_depth"])) or "-",
            _number(row["round_ms"]),
            _number(row["round_cost"]),
            _number(row["break_even_acceptance"]),
            _number(row["tokens_per_second"], 1),
            _number(row["speedup"]),
            _number(row["median_speedup"]),
            _number(row["repeated_4grams"]),
            _differing(name, row),
            _published(part, name),
        )
        for name, row in part["methods"].items()
    ]


def _pair(row: Row) -> str:
    return f"{_number(row['accepted_length'])}, {_number(row['speedup'])}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _differing(name: str, row: Row) -> str:
    if name == "ar" or not row["differing"]:
        return "-" if name == "ar" else "0"
    margin = "" if row["largest_margin"] is None else f", margin at most {row['largest_margin']:.3g}"
    beyond = row["differing_beyond_near_ties"]
    return f"{row['differing']} ({f'{beyond} NOT near ties' if beyond else 'near ties'}{margin})"


def published(part: Row, method: str) -> Published | None:
    """SpecLA's figures that stand beside a method of a part; they are greedy ones."""
    return PUBLISHED.get((part["suite"], method)) if part["temperature"] == 0 else None


def _published(part: Row, method: str) -> str:
    found = published(part, method)
    if found is None:
        return "-"
    named = (("accepted", found.accepted_length), ("first", found.first_token_match), ("speed-up", found.speedup))
    return ", ".join(f"{name} {_number(value)}" for name, value in named if value is not None)


def plot(parts: Sequence[Row], path: Path, title: str) -> None:
    """Writes bars of accepted length and speed-up by suite, a row of panels for each temperature.

    A diamond is SpecLA's figure.
    """
    from matplotlib.figure import Figure

    temperatures = sorted({part["temperature"] for part in parts})
    figure = Figure(figsize=(11, 0.6 + 3.2 * len(temperatures)), layout="constrained")
    axes = figure.subplots(len(temperatures), 2, squeeze=False)
    for row, temperature in zip(axes, temperatures, strict=True):
        shown = [part for part in parts if part["temperature"] == temperature]
        for axis, field, label in zip(row, ("accepted_length", "speedup"), ("tokens a round", "speed-up over AR")):
            _bars(axis, shown, field)
            axis.set_title(f"{label}, temperature {temperature:g}", fontsize=11)
            axis.set_ylabel(label)
    handles = {label: handle for handle, label in zip(*axes[0, 0].get_legend_handles_labels())}
    handles |= {label: handle for handle, label in zip(*axes[0, 1].get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130, format="png")


def _bars(axis: Any, parts: Sequence[Row], field: str) -> None:
    names = [name for name in parts[0]["methods"] if name != "ar"]
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        places = [place + (i - (len(names) - 1) / 2) * width for place in range(len(parts))]
        values = [part["methods"][name][field] or 0.0 for part in parts]
        axis.bar(places, values, 0.92 * width, label=name, color=COLOURS[i % len(COLOURS)])
        for place, value in zip(places, values, strict=True):  # at the foot, where no diamond lies on it
            options: Any = {"ha": "center", "fontsize": 8, "color": "white", "textcoords": "offset points"}
            axis.annotate(f"{value:.2f}", (place, 0), xytext=(0, 3), **options)
        marks = [(place, getattr(published(part, name), field, None)) for place, part in zip(places, parts)]
        marks = [mark for mark in marks if mark[1] is not None]
        if marks:
            axis.plot(*zip(*marks), "D", color="black", markersize=4, label="SpecLA (published)")
    axis.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(parts)), [part["suite"] for part in parts])
    axis.margins(y=0.12)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
