"""Training a target for a budget of wall-clock time: the learning rate's cosine ends when the time does.

Used by scripts/experiment_1p3b.py. The first steps lie in the warm-up and do not depend on how many there will be. They
measure the rate; from it follows how many steps fit, and the plan is corrected as the rate changes.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from specla_jax.checkpoint import write_fla
from specla_jax.config import Dtype, TargetConfig
from specla_jax.errors import UserError
from specla_jax.model import GatedDeltaNetLM
from train_drafter.data import TokenData, WindowSampler
from train_drafter.target import (
    HeldOut,
    TrainingConfig,
    claim_run,
    decay_mask,
    read_metrics,
    token_losses,
    trim_metrics,
    write_metrics,
)
from train_drafter.tokenizer import tokenizer_files

_CHUNK = 10  # steps between two looks at the clock
_HELD_OUT_WINDOWS = 64  # a source


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a target is trained: AdamW with fp32 master weights, as :class:`train_drafter.target.TrainingConfig` says.

    Attributes:
      batch, length: rows of a step and predicted tokens of a row.
      learning_rate: peak; falls to ``final_ratio`` of it.
      warmup: steps, at least 20: the rate is measured in them.
      weights: share of the rows of each source.
      dtype: of the computation.
    """

    batch: int
    length: int
    learning_rate: float
    warmup: int
    weights: tuple[float, ...]
    dtype: Dtype
    final_ratio: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW but for the learning rate, which the caller multiplies with."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.scale_by_adam(b1=0.9, b2=0.95),
            optax.add_decayed_weights(self.weight_decay, mask=decay_mask),
        )

    def rate(self, step: int, progress: float) -> float:
        """Learning rate: linear warm-up by steps, cosine by progress."""
        cosine = self.final_ratio + (1 - self.final_ratio) * (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * min(1.0, (step + 1) / self.warmup) * cosine


@dataclass(frozen=True)
class Plan:
    """The cosine was at ``progress`` when ``step`` began and ends at ``total``; None until the rate is known."""

    step: int = 0
    progress: float = 0.0
    total: int | None = None

    def at(self, step: int) -> float:
        """Progress at a step, 0 to 1."""
        if self.total is None:
            return self.progress
        return self.progress + (1 - self.progress) * (step - self.step) / (self.total - self.step)

    def moved(self, step: int, total: int) -> "Plan":
        """The same up to ``step``, from there on with another end."""
        return Plan(step, self.at(step), max(total, step + 1))


def train_target(
    data: TokenData,
    target: TargetConfig,
    recipe: Recipe,
    out: Path,
    *,
    seconds: float,
    reserve: float,
    steps: int | None = None,
    checkpoint_seconds: float = math.inf,
) -> bool:
    """Trains and writes ``out/model`` (bf16) and ``out/target.json``, or goes on where ``out`` was cut.

    Args:
      seconds: what this call may take, compiling and writing included.
      reserve: of them, for the last held-out loss and the model's files.
      steps: a fixed number of steps. The budget then cuts the run instead of planning it.
      checkpoint_seconds: time between checkpoints of the whole state; they are written while training goes on.

    Returns:
      False if ``steps`` were given and the budget ended before them, with a checkpoint.

    Raises:
      UserError: ``out`` holds another run, a source is too short, or the loss is no longer finite.
    """
    end = time.perf_counter() + seconds - reserve
    sampler = WindowSampler(data, recipe.batch, recipe.length, recipe.weights, recipe.seed)
    claim_run(out, {**asdict(target), **asdict(recipe), "data": data.fingerprint, "steps": steps})
    if (out / "target.json").is_file():
        return True
    model = GatedDeltaNetLM(target, recipe.dtype)
    train_step = jax.jit(partial(_step, model, recipe.optimizer()), donate_argnums=(0, 1))
    metrics = out / "metrics.jsonl"
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager((out / "checkpoints").resolve(), options=options) as manager:
        params, opt_state = jax.jit(partial(_fresh, model, recipe))()
        step, plan = 0, Plan(total=steps)
        if (latest := manager.latest_step()) is not None:
            params, opt_state = manager.restore(latest, args=ocp.args.StandardRestore([params, opt_state]))
            step = latest
            plan = Plan(**next(line["plan"] for line in read_metrics(metrics) if line["step"] == step))
        trim_metrics(metrics, step)
        measured = False  # the first chunk compiles
        saved = time.perf_counter()
        with tqdm(initial=step, disable=None, unit="step") as bar:
            while plan.total is None or step < plan.total:
                start, first = time.perf_counter(), step
                rate, loss = 0.0, jnp.zeros(())
                while step < min(first + _CHUNK, plan.total or first + _CHUNK):
                    rate = recipe.rate(step, plan.at(step))
                    windows = jnp.asarray(sampler(step))
                    params, opt_state, loss = train_step(params, opt_state, windows, jnp.float32(rate))
                    step += 1
                value = float(loss)  # waits for the steps
                now = time.perf_counter()
                if not np.isfinite(value):
                    raise UserError(f"the loss is {value} at step {step}; try a lower learning rate")
                if steps is None and measured and step != plan.total:
                    plan = plan.moved(step, step + int((end - now) * (step - first) / (now - start)))
                speed = (step - first) * recipe.batch * recipe.length / (now - start) if measured else None
                line = {"step": step, "loss": value, "learning_rate": rate, "tokens_per_second": speed}
                write_metrics(metrics, {**line, "plan": asdict(plan)})
                bar.update(step - first)
                bar.set_postfix_str(f"of {plan.total}, loss {value:.3f}")
                measured = True
                out_of_time = steps is not None and now > end and step < steps
                if out_of_time or (now - saved > checkpoint_seconds and step != plan.total):
                    held = jax.tree.map(jnp.copy, [params, opt_state])  # the next step donates them
                    manager.save(step, args=ocp.args.StandardSave(held))
                    del held
                    saved = time.perf_counter()
                    write_metrics(metrics, {"step": step, "checkpoint_blocked_seconds": saved - now})
                if out_of_time:
                    return False  # the manager finishes writing first
    _finish(data, model, params, recipe, out, sampler.shares)
    return True


def _fresh(model: GatedDeltaNetLM, recipe: Recipe) -> tuple[Any, optax.OptState]:
    params = model.init(jax.random.key(recipe.seed), jnp.zeros((1, 8), jnp.int32))["params"]
    return params, recipe.optimizer().init(params)


def _step(
    model: GatedDeltaNetLM,
    optimizer: optax.GradientTransformation,
    params: Any,
    opt_state: optax.OptState,
    windows: Int[Array, "B T+1"],
    rate: Float[Array, ""],
) -> tuple[Any, optax.OptState, Float[Array, ""]]:
    loss, grads = jax.value_and_grad(lambda p: token_losses(model, p, windows).mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, jax.tree.map(lambda u: -rate * u, updates)), opt_state, loss


def _finish(
    data: TokenData, model: GatedDeltaNetLM, params: Any, recipe: Recipe, out: Path, shares: dict[str, float]
) -> None:
    """Held-out loss by source, the model's files, and what the report says of the run."""
    start = time.perf_counter()
    config = TrainingConfig(steps=1, warmup=0, batch=recipe.batch, length=recipe.length, dtype=recipe.dtype)
    losses = HeldOut(model, data, config, shares)(params, _HELD_OUT_WINDOWS)
    sizes = {
        source.name: source.held_out_bytes / source.held_out_tokens for source in data.sources if source.held_out_tokens
    }
    evaluated = time.perf_counter()
    # Narrowed on the device: half as much to fetch.
    half = jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key in ("A_log", "dt_bias") else x.astype(jnp.bfloat16), params
    )
    if not (out / "model").exists():
        write_fla(half, model.config, out / "model", dtype="bfloat16", tokenizer_files=tokenizer_files(data.folder))
    lines = read_metrics(out / "metrics.jsonl")
    chunks = [line for line in lines if "loss" in line]
    speeds = [line["tokens_per_second"] for line in chunks if line["tokens_per_second"]]
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "steps": chunks[-1]["step"],
        "tokens": chunks[-1]["step"] * recipe.batch * recipe.length,
        "training_loss": float(np.mean([line["loss"] for line in chunks[-5:]])),
        "tokens_per_second": float(np.median(speeds)) if speeds else None,
        "held_out_loss": losses,
        "bytes_a_token": sizes,
        "held_out_seconds": evaluated - start,
        "writing_seconds": time.perf_counter() - evaluated,
        "checkpoint_blocked_seconds": [
            line["checkpoint_blocked_seconds"] for line in lines if "checkpoint_blocked_seconds" in line
        ],
    }
    (out / "target.json").write_text(json.dumps(report, indent=2) + "\n")
