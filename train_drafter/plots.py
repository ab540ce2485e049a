"""The picture of a training run."""

from pathlib import Path
from typing import Any

from specla_jax.bench_report import COLOURS


def plot_run(lines: list[dict[str, Any]], path: Path) -> None:
    """Loss and acceptance by depth against steps, and accepted length in evaluation, to a PNG file.

    Args:
      lines: of metrics.jsonl.
      path: the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    training = [line for line in lines if "loss" in line]
    decoding = [line for line in lines if "accepted_length_tree_t0" in line]
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    steps = [line["step"] for line in training]
    for panel, key in zip(panels, ("loss_by_depth", "acceptance_by_depth")):
        for depth, values in enumerate(zip(*(line[key] for line in training)), 1):
            colour = COLOURS[(depth - 1) % len(COLOURS)]
            panel.plot(steps, values, color=colour, linewidth=1.2, marker=".", markersize=3, label=f"depth {depth}")
        panel.set_xlabel("step")
    panels[0].set_title("loss, nats")
    panels[1].set_title("acceptance where all above is right")
    panels[1].set_ylim(0, 1)
    panels[1].legend(frameon=False, fontsize=8, ncols=2)
    names = ("tree_t0", "chain_t0", "tree_t1", "chain_t1")
    for name, colour in zip(names, COLOURS):
        label = f"{name[:-3]}, temperature {name[-1]}"
        values = [line[f"accepted_length_{name}"] for line in decoding]
        panels[2].plot([line["step"] for line in decoding], values, color=colour, marker="o", markersize=4, label=label)
    panels[2].set_title("accepted length, held-out prompts")
    panels[2].set_xlabel("step")
    panels[2].legend(frameon=False, fontsize=8)
    for panel in panels:
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
