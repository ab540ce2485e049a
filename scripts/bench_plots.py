"""Figures of the benchmarks."""

from pathlib import Path
from typing import Any

from specla_jax.bench_report import COLOURS


def plot_verify(rows: list[dict[str, Any]], floor: float, path: Path) -> None:
    """Time against nodes, a panel a batch, to a PNG file. ``floor``: seconds to read the state of a layer and row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = (  # keys, label, colour (Okabe and Ito's, told apart by all), marker
        (("us",), "gdn_verify (tree)", "#0072B2", "o"),
        (("walk_us", "walk_keep_us"), "walk, a state a node (tree)", "#D55E00", "s"),
        (("replay_us",), "replay of every path (tree)", "#009E73", "^"),
        (("fla_us",), "flash-linear-attention (chain)", "#CC79A7", "D"),
    )
    batches = sorted({row["batch"] for row in rows})
    figure, panels = pyplot.subplots(
        1, len(batches), figsize=(4.2 * len(batches), 4.2), squeeze=False, layout="constrained"
    )
    for panel, batch in zip(panels[0], batches, strict=True):
        here = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["nodes"])
        for keys, label, colour, marker in lines:
            points = [(row["nodes"], [row[key] for key in keys if row.get(key) is not None]) for row in here]
            points = [(nodes, min(times)) for nodes, times in points if times]
            if points:
                panel.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label)
        panel.axhline(1e6 * batch * floor, color="0.4", linestyle="--", linewidth=1, label="state read once")
        ticks = [row["nodes"] for row in here]
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_title(f"batch {batch}")
        panel.set_xlabel("nodes")
        panel.grid(True, which="major", color="0.9")
        panel.set_axisbelow(True)
    panels[0][0].set_ylabel("µs a layer")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_oracle(
    rows: list[dict[str, Any]], even: float | None, published: tuple[float, str], title: str, path: Path
) -> None:
    """Speed-up over plain decoding against the probability that a draft is right, to a PNG file.

    Args:
      rows: with ``p`` and ``speedup``.
      even: the probability at which drafting breaks even, or None.
      published: a speed-up at p = 1 and its label.
      title: of the figure.
      path: of the file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axis = figure.subplots()
    points = sorted((row["p"], row["speedup"]) for row in rows)
    axis.axhline(1, color="0.4", linestyle="--", linewidth=1)
    axis.plot(*zip(*points, strict=True), color=COLOURS[0], marker="o", markersize=5, label="measured")
    if even is not None:
        axis.plot([even], [1], "s", color=COLOURS[1], markersize=7, label="breaks even")
        axis.annotate(f"p = {even:.2f}", (even, 1), xytext=(6, -14), textcoords="offset points", fontsize=9)
    value, label = published
    axis.plot([1], [value], "D", color="black", markersize=5, label=label)
    axis.annotate(f"{value:.2f}", (1, value), xytext=(-8, 0), textcoords="offset points", ha="right", va="center")
    axis.set_xlabel("probability that a draft token is right")
    axis.set_ylabel("speed-up over plain decoding")
    axis.set_ylim(bottom=0)
    axis.grid(True, color="0.9")
    axis.set_axisbelow(True)
    axis.set_title(title, fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")
