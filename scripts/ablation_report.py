"""The tables of scripts/ablate_drafter.py, from the files that its runs leave."""

import json
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from specla_jax.bench_report import markdown
from specla_jax.drafters.eagle_layer import EagleConfig, eagle_shapes
from specla_jax.errors import UserError
from train_drafter.evaluation import BEST, DRAFTS
from train_drafter.target import read_metrics

BASE, DECODING = "base", "decoding"
TAU, CONFIDENCE, NODES = "pruning tau, nats", "confidence temperature", "nodes of the tree"
LENGTHS = {  # figures of an evaluation, and their columns
    BEST: "tree, T=0",
    "accepted_length_tree_t1": "tree, T=1",
    "accepted_length_chain_t0": "chain, T=0",
    "accepted_length_chain_t1": "chain, T=1",
}
Row = dict[str, Any]


def finished(out: Path, name: str) -> bool:
    """Whether a variant is: the file that its process writes last is there."""
    return (out / "decoding.json" if name == DECODING else out / name / "training.png").is_file()


def read_variant(folder: Path) -> Row:
    """The figures of a finished run.

    Returns:
      ``step`` of the best evaluation and its accepted lengths (tokens a round, the drafter's confidence temperature 1),
      ``acceptance_by_depth`` by draft at temperature 0 and ``first_token_match`` (both shares of the rounds), final
      ``loss`` (mean of its last line of metrics, nats, of all levels) and ``loss_at_depth_1``, ``tokens_per_second``
      (median over the lines), ``parameters``, and the ``confidence_temperature`` written with the drafter.
    """
    lines, run = read_metrics(folder / "metrics.jsonl"), json.loads((folder / "run.json").read_text())
    training = [line for line in lines if "loss" in line]
    best = max((line for line in lines if BEST in line), key=lambda line: line[BEST])  # the first of equals, as kept
    config = EagleConfig(**{field.name: run[field.name] for field in fields(EagleConfig)})
    shapes = eagle_shapes(config)
    by_depth = {method: best[f"accepted_by_depth_{method}_t0"] for method in DRAFTS}
    return {
        "step": best["step"],
        **{name: best[name] for name in LENGTHS},
        "acceptance_by_depth": by_depth,
        "first_token_match": {method: values[0] for method, values in by_depth.items()},
        "loss": training[-1]["loss"],
        "loss_at_depth_1": training[-1]["loss_by_depth"][0],
        "tokens_per_second": median(line["tokens_per_second"] for line in training),
        "parameters": sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "draft_to_target"),
        "confidence_temperature": json.loads((folder / "drafter" / "config.json").read_text())["temperature"],
    }


def read_ablation(out: Path) -> Row:
    """Everything that is finished in ``out``, with differences from the base and the noise.

    Returns:
      ``settings`` of the base; ``rows``, one a trained variant, with ``difference`` in accepted lengths where the base
      is finished, and ``reading``; ``noise``, the largest of the four differences of the seed variants, or None;
      ``decoding``, the content of decoding.json or None; ``waiting``, names of what is not finished.

    Raises:
      UserError: ``out`` holds no ablation, or nothing of it is finished.
    """
    if not (out / "variants.json").is_file():
        raise UserError(f"--out {out} holds no ablation")
    known = json.loads((out / "variants.json").read_text())
    done = [variant for variant in known if finished(out, variant["name"])]
    rows = [
        {name: variant[name] for name in ("name", "group", "setting")} | read_variant(out / variant["name"])
        for variant in done
        if variant["name"] != DECODING
    ]
    if not rows:
        raise UserError(f"--out {out} holds no finished variant yet")
    base = next((row for row in rows if row["name"] == BASE), None)
    if base is not None:
        for row in rows:
            row["difference"] = {name: round(row[name] - base[name], 4) for name in LENGTHS}
    seeds = [row["difference"] for row in rows if row["group"] == "seed" and "difference" in row]
    noise = max((abs(value) for difference in seeds for value in difference.values()), default=None)
    for row in rows:
        row["reading"] = _reading(row, noise)
    path = out / "decoding.json"
    return {
        "settings": json.loads((out / "run.json").read_text()),
        "noise": noise,
        "rows": rows,
        "decoding": json.loads(path.read_text()) if path.is_file() else None,
        "waiting": [variant["name"] for variant in known if variant not in done],
    }


def _reading(row: Row, noise: float | None) -> str:
    """What the difference in the figure that drafters are chosen by says."""
    if noise is None or "difference" not in row or row["group"] in (BASE, "seed"):
        return "-"
    change = row["difference"][BEST]
    return "within the noise" if abs(change) <= noise else "longer" if change > 0 else "shorter"


def write_report(out: Path) -> None:
    """Writes OUT/ablation.json and OUT/ablation.md.

    Raises:
      UserError: see :func:`read_ablation`.
    """
    found = read_ablation(out)
    (out / "ablation.json").write_text(json.dumps(found, indent=2) + "\n")
    (out / "ablation.md").write_text(report(found) + "\n")


def report(found: Row) -> str:
    """The Markdown of what :func:`read_ablation` returns."""
    settings, rows = found["settings"], found["rows"]
    sizes = ", ".join(f"a {method} of {draft.nodes} nodes" for method, draft in DRAFTS.items())
    base = next((row["setting"] for row in rows if row["name"] == BASE), "not finished yet")
    parts = [
        f"# Ablation of the drafter of {Path(settings['target']).name}",
        f"{settings['steps']:,} steps of {settings['batch'] * settings['accumulate']} x {settings['length']:,} tokens "
        f"each. The base: {base}. Every variant differs from it in one option.",
        "Accepted length: tokens a round, in brackets the difference from the base, of up to "
        f"{settings['eval_prompts']} held-out prompts, the same for all, {settings['eval_tokens']} new tokens each, by "
        f"{sizes}, at temperature T. First token: share of the rounds in which a draft of depth 1 was committed, tree, "
        "T=0. The loss is that of the last steps, in nats; it can be compared where loss and unroll are the base's. "
        "Tokens/s: of training.",
        _trained(rows),
        _verdict(found),
        "Share of the rounds in which the draft of a depth was committed, T=0:",
        _depths(rows),
    ]
    if found["decoding"]:
        parts += [
            "Without training: the base's drafter as it was written, with its own confidence temperature and its "
            "weights in bfloat16, by trees. Drafted: tokens proposed a round, the root not among them.",
            _decoding(found["decoding"]["rows"]),
            f"{found['decoding']['device']}, jax {found['decoding']['jax']}.",
        ]
    if found["waiting"]:
        parts.append(f"Not finished: {', '.join(found['waiting'])}.")
    return "\n\n".join(parts)


def _trained(rows: list[Row]) -> str:
    head = (
        "group", "variant", "setting", *LENGTHS.values(), "reading of tree, T=0", "first token", "best step", "loss",
        "loss at depth 1", "tokens/s", "parameters",
    )  # fmt: skip
    return markdown(head, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    changes = row.get("difference", {}) if row["name"] != BASE else {}
    return (
        row["group"],
        row["name"],
        "see above" if row["name"] == BASE else row["setting"],
        *(f"{row[name]:.2f}" + (f" ({changes[name]:+.2f})" if name in changes else "") for name in LENGTHS),
        row["reading"],
        f"{row['first_token_match']['tree']:.2f}",
        f"{row['step']:,}",
        f"{row['loss']:.3f}",
        f"{row['loss_at_depth_1']:.3f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['parameters']:,}",
    )


def _verdict(found: Row) -> str:
    if found["noise"] is None:
        return "No noise is known: it needs the base and a seed variant to be finished."
    beyond = [row for row in found["rows"] if row["reading"] in ("longer", "shorter")]
    longer = [f"{row['name']} ({row['difference'][BEST]:+.2f})" for row in beyond if row["reading"] == "longer"]
    shorter = [f"{row['name']} ({row['difference'][BEST]:+.2f})" for row in beyond if row["reading"] == "shorter"]
    near = [row["name"] for row in found["rows"] if row["reading"] == "within the noise"]
    return (
        f"Noise: with another seed (weights, order, the target's own texts) the base's accepted lengths differ by up "
        f"to {found['noise']:.2f}; a difference of no more is called within the noise. That is one run more, so an "
        f"indication, no test. Longer than the base, tree, T=0: {', '.join(longer) or 'none'}. Shorter: "
        f"{', '.join(shorter) or 'none'}. Within the noise: {', '.join(near) or 'none'}."
    )


def _depths(rows: list[Row]) -> str:
    depth = max(len(values) for row in rows for values in row["acceptance_by_depth"].values())
    body = [
        (row["name"], method, *(f"{value:.2f}" for value in values), *("-" for _ in range(depth - len(values))))
        for method in DRAFTS
        for row in rows
        for values in [row["acceptance_by_depth"][method]]
    ]
    return markdown(("variant", "draft", *map(str, range(1, depth + 1))), body)


def _decoding(rows: list[Row]) -> str:
    own = rows[0]
    body = []
    for row in rows:
        cells = [row["group"], row["setting"]]
        for temperature in (0, 1):
            name = f"accepted_length_t{temperature}"
            change = "" if row is own else f" ({row[name] - own[name]:+.2f})"
            cells += [f"{row[name]:.2f}{change}", f"{row[f'drafted_a_round_t{temperature}']:.2f}"]
        body.append(cells)
    return markdown(("group", "setting", "tree, T=0", "drafted, T=0", "tree, T=1", "drafted, T=1"), body)
