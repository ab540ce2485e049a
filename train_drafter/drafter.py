"""Training an EAGLE drafter for a frozen target: configuration, the step, the resumable loop."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from specla_jax.config import Dtype
from specla_jax.drafters.eagle_files import save_drafter
from specla_jax.drafters.eagle_layer import EagleConfig, Params, init_eagle
from specla_jax.errors import UserError
from specla_jax.model import GatedDeltaNetLM
from specla_jax.target import Target
from train_drafter.drafter_loss import LossKind
from train_drafter.evaluation import BEST, Evaluation
from train_drafter.objective import Frozen, Objective, Sums
from train_drafter.packing import Batch, RowSampler
from train_drafter.target import claim_run, read_metrics, trim_metrics, write_metrics

State = dict[str, Any]  # what a step changes: params, opt_state, skipped
_AXIS = "rows"
_SAVE_SECONDS = 300  # between checkpoints, where evaluations are rarer


@dataclass(frozen=True, kw_only=True)
class DrafterTraining:
    """How a drafter is trained. Parameters, gradients and the optimiser are float32 whatever ``dtype`` computes in.

    Attributes:
      steps: optimiser steps in all; the cosine ends there.
      batch, length: rows of a batch and tokens of a row.
      accumulate: batches whose gradients make one step.
      loss: "kl" or "lk", see :mod:`train_drafter.drafter_loss`.
      unroll: levels of the training-time test.
      step_weight: weight of a level relative to the one above it.
      learning_rate: peak, reached after ``warmup`` steps; falls to ``final_ratio`` of it.
      weight_decay: on matrices only.
      clip: largest global norm of a gradient.
      eval_every: steps between evaluations by decoding, each followed by a checkpoint.
      eval_prompts, eval_tokens: held-out prompts decoded there and new tokens of each.
      dtype: of the computation, the target's included.
      seed: of the initial weights, the order of the rows and the texts that the target writes.
    """

    steps: int
    batch: int = 16
    length: int = 1024
    accumulate: int = 1
    loss: LossKind = "kl"
    unroll: int = 6
    step_weight: float = 0.8
    learning_rate: float = 1e-3
    warmup: int = 100
    final_ratio: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    eval_every: int = 500
    eval_prompts: int = 32
    eval_tokens: int = 96
    dtype: Dtype = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "unroll", "eval_every", "eval_prompts", "eval_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.length < 2:
            raise UserError(f"length must be at least 2, got {self.length}")
        if self.unroll > self.length:
            raise UserError(f"unroll must be at most length, {self.length}, got {self.unroll}")
        if self.loss not in get_args(LossKind):
            raise UserError(f"loss must be one of {', '.join(get_args(LossKind))}, got {self.loss!r}")
        if not 0 <= self.warmup < self.steps:
            raise UserError(f"warmup must be 0 to steps - 1 = {self.steps - 1}, got {self.warmup}")
        for name in ("learning_rate", "clip", "step_weight"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.final_ratio <= 1:
            raise UserError(f"final_ratio must be 0 to 1, got {self.final_ratio}")
        if not 0 <= self.weight_decay < float("inf"):
            raise UserError(f"weight_decay must be 0 or more, got {self.weight_decay}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be 0 to {2**32 - 1}, got {self.seed}")

    def schedule(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, self.warmup, self.steps, self.learning_rate * self.final_ratio
        )

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind a clip by global norm, fed with the mean gradient of ``accumulate`` batches."""
        decayed = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
        adamw = optax.adamw(self.schedule(), b1=0.9, b2=0.95, weight_decay=self.weight_decay, mask=decayed)
        optimizer = optax.chain(optax.clip_by_global_norm(self.clip), adamw)
        return optax.MultiSteps(optimizer, self.accumulate).gradient_transformation()


def rows_mesh(batch: int) -> Mesh:
    """All local devices along the rows of a batch.

    Raises:
      UserError: the rows do not divide by the devices.
    """
    devices = jax.local_devices()
    if batch % len(devices):
        raise UserError(f"batch must be a multiple of the {len(devices)} devices, got {batch}")
    return Mesh(np.array(devices), (_AXIS,))


def make_train_step(
    objective: Objective, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[State, Frozen, Batch], tuple[State, Sums, jax.Array]]:
    """One jitted batch: the new state (the old one is donated), sums, and (loss, gradient norm).

    A batch whose loss or gradient is not finite changes nothing but ``skipped``.
    """
    objective = replace(objective, axis=_AXIS)

    def gradients(params: Params, frozen: Frozen, batch: Batch):
        (loss, sums), grads = jax.value_and_grad(objective.loss, has_aux=True)(params, frozen, batch)
        return jax.lax.psum((loss, sums, grads), _AXIS)

    # The kernels of prefill are not partitioned by the compiler, so each device runs its own rows.
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P(), P(_AXIS)), out_specs=P(), check_vma=False)

    def step(state: State, frozen: Frozen, batch: Batch):
        loss, sums, grads = sharded(state["params"], frozen, batch)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        after = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        before = {name: state[name] for name in after}
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        return {**kept, "skipped": state["skipped"] + ~finite}, sums, jnp.stack([loss, norm])

    return jax.jit(step, donate_argnums=0)


def split_params(params: Params) -> tuple[Params, Params]:
    """What is trained, in float32, and the map of a reduced draft vocabulary."""
    trained = {name: value for name, value in params.items() if name != "draft_to_target"}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), trained), {
        name: jnp.asarray(value) for name, value in params.items() if name not in trained
    }


@dataclass(frozen=True)
class DrafterResult:
    """The parameters with the longest accepted length in evaluation, that evaluation, and its step."""

    params: Params
    best: dict[str, Any]
    step: int
    skipped: int
    finished: bool


def train(
    target: Target,
    config: EagleConfig,
    training: DrafterTraining,
    sampler: RowSampler,
    evaluation: Evaluation,
    out: Path,
    *,
    settings: dict[str, Any],
    init: Params | None = None,
    fixed: Params | None = None,
    stop_after: int | None = None,
    log_every: int = 20,
    progress: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> DrafterResult:
    """Trains, or goes on training where ``out`` left off.

    ``out`` gets run.json, metrics.jsonl, checkpoints/ (the latest state and the best parameters) and drafter/ (the best
    parameters so far). A run that was stopped and resumed takes the same steps as an unbroken one: batches depend on
    (seed, step) alone and a checkpoint holds the whole state.

    Args:
      settings: what makes two runs the same run, beside ``training`` and ``config``.
      init: parameters to begin with; None for random ones.
      fixed: parameters that are not trained, the map of a reduced draft vocabulary.
      stop_after: stop after this step, with a checkpoint, as if interrupted there.
      progress: whether to show a bar.
      report: receives a line for each line of metrics.

    Raises:
      UserError: ``out`` is not for this run, or no update is finite any more.
    """
    claim_run(out, {**asdict(config), **asdict(training), **settings})
    mesh = rows_mesh(training.batch)
    everywhere, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P(_AXIS))
    fixed = fixed or {}
    objective = Objective(
        model=GatedDeltaNetLM(target.config, target.dtype),
        config=config,
        kind=training.loss,
        steps=training.unroll,
        step_weight=training.step_weight,
    )
    optimizer, schedule = training.optimizer(), training.schedule()
    train_step = make_train_step(objective, optimizer, mesh)
    frozen = jax.device_put(Frozen(target.params, fixed.get("draft_to_target")), everywhere)
    last = training.steps if stop_after is None else min(stop_after, training.steps)

    def fresh() -> State:
        params = split_params(init_eagle(jax.random.key(training.seed), config) if init is None else init)[0]
        return {"params": params, "opt_state": optimizer.init(params), "skipped": jnp.zeros((), jnp.int32)}

    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager((out / "checkpoints").resolve(), options=options) as manager:
        state = jax.device_put(fresh(), everywhere)
        carry: dict[str, Any] = {**state, "best_params": state["params"], "step": 0, "best_step": 0, "best_length": 0.0}
        if manager.latest_step() is not None:
            carry = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(carry))
            state = {name: carry[name] for name in state}
        best = {name: carry[name] for name in ("best_params", "best_step", "best_length")}
        best["best_params"] = jax.tree.map(jnp.copy, best["best_params"])  # the state is donated
        step, log = int(carry["step"]), _Log(out / "metrics.jsonl", int(carry["step"]), training)
        saved = perf_counter()
        with tqdm(total=training.steps, initial=step, disable=not progress, unit="step") as bar:
            while step < last:
                for part in range(training.accumulate):
                    batch = jax.device_put(sampler(step * training.accumulate + part), by_row)
                    state, sums, scalars = train_step(state, frozen, batch)
                    log.add(sums, scalars)
                step += 1
                bar.update()
                evaluate = step % training.eval_every == 0 or step == training.steps
                if step % log_every == 0 or evaluate:
                    line = log.flush(step, float(np.asarray(schedule(step - 1))), int(state["skipped"]))
                    bar.set_postfix_str(line)
                    report(f"step {step}: {line}")
                if evaluate:
                    params = jax.device_put(state["params"], jax.local_devices()[0])
                    start = perf_counter()
                    found = evaluation(params | fixed)
                    log.write({"step": step, **found})
                    figures = ", ".join(f"{k} {v}" for k, v in found.items() if not isinstance(v, list))
                    report(f"step {step}: {figures}; in {perf_counter() - start:.1f} s")
                    if found[BEST] > best["best_length"]:
                        kept = jax.tree.map(jnp.copy, state["params"])
                        best = {"best_params": kept, "best_step": step, "best_length": found[BEST]}
                        save_drafter(narrow(params | fixed), config, out / "drafter")
                if evaluate or step == last or perf_counter() - saved > _SAVE_SECONDS:
                    # The next step donates the state, and saving goes on beside it.
                    held = jax.tree.map(jnp.copy, state)
                    manager.save(step, args=ocp.args.StandardSave({**held, **best, "step": step}))
                    log.restart()
                    saved = perf_counter()
        params = jax.device_put(best["best_params"], jax.local_devices()[0]) | fixed
        best_step, finished = int(best["best_step"]), step >= training.steps
        return DrafterResult(params, log.evaluation_of(best_step), best_step, int(state["skipped"]), finished)


def narrow(params: Params) -> Params:
    """Parameters as they are written: floats in bf16, which decoding on an accelerator computes in."""

    def leaf(x: jax.Array) -> np.ndarray:
        return np.asarray(x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x)

    return jax.tree.map(leaf, params)


class _Log:
    """metrics.jsonl: means since the last line. Numbers stay on the device until a line is due."""

    def __init__(self, path: Path, step: int, training: DrafterTraining) -> None:
        trim_metrics(path, step)
        self._path, self._training = path, training
        self._pending: list[tuple[Sums, jax.Array]] = []
        self.restart()

    def restart(self) -> None:
        """Starts the clock anew, after work that is not training."""
        self._clock, self._tokens = perf_counter(), 0

    def add(self, sums: Sums, scalars: jax.Array) -> None:
        self._pending.append((sums, scalars))
        self._tokens += self._training.batch * self._training.length

    def flush(self, step: int, learning_rate: float, skipped: int) -> str:
        """Writes a line and returns the short form.

        Raises:
          UserError: none of the last batches, 20 or more, gave a finite update.
        """
        pending = jax.device_get(self._pending)
        self._pending = []
        sums = jax.tree.map(lambda *parts: sum(parts), *(part for part, _ in pending))
        scalars = np.stack([part for _, part in pending])
        finite = scalars[np.isfinite(scalars).all(axis=1)]
        if not len(finite) and len(scalars) >= 20:
            raise UserError(f"no update of the last {len(scalars)} batches is finite; try a lower --learning-rate")
        loss, norm = finite.mean(axis=0) if len(finite) else (float("nan"), float("nan"))
        rate = self._tokens / (perf_counter() - self._clock)
        summary = sums.summary()
        line = {"step": step, "loss": float(loss), "grad_norm": float(norm), **summary}
        line |= {"learning_rate": learning_rate, "tokens_per_second": round(rate), "skipped": skipped}
        self.write(line)
        self.restart()
        return f"loss {loss:.3f}, predicted length {summary['predicted_accepted_length']:.2f}, {rate:,.0f} tokens/s"

    def write(self, line: dict[str, Any]) -> None:
        write_metrics(self._path, line)

    def evaluation_of(self, step: int) -> dict[str, Any]:
        return next((line for line in read_metrics(self._path) if line["step"] == step and BEST in line), {})
