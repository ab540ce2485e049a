"""Training a small GDN target on packed text: loss, optimiser, the resumable loop, held-out loss."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from kernels_pallas.gdn_prefill.triton import SAVED
from kernels_pallas.norm import rms_norm
from specla_jax.config import Dtype, TargetConfig
from specla_jax.errors import UserError
from specla_jax.model import Block, GatedDeltaNetLM, Linear, matmul
from specla_jax.projection import project
from specla_jax.state import RecurrentState
from train_drafter.data import TokenData, WindowSampler, held_out_windows

Params = dict[str, Any]
Carry = dict[str, Any]  # everything a checkpoint holds; see init_carry

_DECAYED = ("in_proj", "o_proj", "gate_up_proj", "down_proj", "embeddings", "lm_head")
_SAVED = "projection"  # results that the gradient keeps rather than computes again
_QUICK_WINDOWS = 128  # held-out windows a source, while training
_BEFORE = ("data", "data.partial", "locks")  # what a folder may hold before it is that of a run


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a target is trained. Parameters, gradients and the optimiser are float32 whatever ``dtype`` computes in.

    Attributes:
      steps: optimiser steps in all; the cosine ends there.
      batch, length: rows of a step and predicted tokens of a row.
      learning_rate: peak, reached after ``warmup`` steps; falls to ``final_ratio`` of it.
      weight_decay: on matrices only, not on norms, gates (A_log, dt_bias) and convolution filters.
      clip: largest global norm of a gradient.
      eval_every: steps between held-out losses, each followed by a checkpoint.
      weights: share of the rows of each source; empty means by tokens.
      dtype: of the computation.
      seed: of the initial weights and the windows.
    """

    steps: int
    batch: int = 16
    length: int = 256
    learning_rate: float = 1e-3
    warmup: int = 100
    final_ratio: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 500
    weights: tuple[float, ...] = ()
    dtype: Dtype = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "eval_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.warmup < self.steps:
            raise UserError(f"warmup must be 0 to steps - 1 = {self.steps - 1}, got {self.warmup}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.final_ratio <= 1:
            raise UserError(f"final_ratio must be 0 to 1, got {self.final_ratio}")
        if not self.weight_decay >= 0:
            raise UserError(f"weight_decay must be 0 or more, got {self.weight_decay}")
        if self.seed < 0:
            raise UserError(f"seed must be 0 or more, got {self.seed}")

    def schedule(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, self.warmup, self.steps, self.learning_rate * self.final_ratio
        )

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind a clip by global norm."""
        adamw = optax.adamw(self.schedule(), b1=0.9, b2=0.95, eps=1e-8, weight_decay=self.weight_decay, mask=decay_mask)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


def decay_mask(params: Params) -> Params:
    """True where weight decay applies: matrices, and not norms, A_log, dt_bias or convolution filters."""
    flat = flatten_dict(params)
    return unflatten_dict({path: any(name in _DECAYED for name in path) for path in flat})


def _narrow_linear(gates: int, call: Callable[..., Array], args: tuple[Array, ...], kwargs: Any, context: Any) -> Array:
    """In place of a ``Linear`` that computes in bf16: round the result to bf16 under the name that remat saves.

    The model rounds most of these results itself; the ``gates`` at the end of ``in_proj`` neither it nor this does.
    """
    linear = context.module
    if not isinstance(linear, Linear) or context.method_name != "__call__":
        return call(*args, **kwargs)
    x = args[0].astype(jnp.bfloat16)
    kernel: Any = linear.get_variable("params", "kernel")
    gates = gates if linear.name == "in_proj" else 0
    main, wide = jnp.split(kernel, [kernel.shape[-1] - gates], axis=-1)
    y = checkpoint_name(project(x, main, jnp.bfloat16), _SAVED).astype(jnp.float32)
    if gates:
        y = jnp.concatenate([y, checkpoint_name(project(x, wide, jnp.float32), _SAVED)], axis=-1)
    return y


def hidden_states(
    model: GatedDeltaNetLM,
    params: Params,
    tokens: Int[Array, "B T"],
    unroll: int = 1,
    starts: Bool[Array, "B T"] | None = None,
    outputs_of: Sequence[int] = (),
) -> tuple[Float[Array, "B T D"], list[Float[Array, "B T D"]]]:
    """What the head reads, and the outputs of the layers ``outputs_of``, from an empty state.

    The model's own computation in a form that trains fast: one compiled layer, run in scans that end at the layers
    asked for. In bf16 a layer keeps the results of its projections and what the gradient of ``gdn_prefill`` reads, and
    computes the rest again; for the 1.3B shape that is 74 KB a token and layer. ``unroll`` layers make a step of a
    scan: with all of them nothing is copied into stacks, and compiling takes as many times longer.

    Args:
      starts: first tokens of documents that lie one behind another in a row; nothing passes from one to the next.
    """
    config, narrow = model.config, model.dtype == "bfloat16"
    block = Block(config, model.dtype)
    state = RecurrentState.zeros(replace(config, num_hidden_layers=1), tokens.shape[0], model.dtype)
    window = None if state.conv is None else state.conv[0]

    def layer(h: Array, layer_params: Params) -> tuple[Array, None]:
        out: Any = block.apply({"params": layer_params}, h, None, state.S[0], window, starts, method="prefill")
        return out[0], None

    if narrow:
        policy = jax.checkpoint_policies.save_only_these_names(_SAVED, SAVED)
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    h: Any = model.apply({"params": params}, tokens, method="_embed")
    outputs, first = {}, 0
    with nn.intercept_methods(partial(_narrow_linear, 2 * config.num_v_heads)) if narrow else nullcontext():
        for stop in sorted({*(i + 1 for i in outputs_of), config.num_hidden_layers}):
            layers = [params[f"layers_{i}"] for i in range(first, stop)]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
            h, _ = lax.scan(layer, h, stacked, unroll=min(unroll, stop - first))
            outputs[stop - 1], first = h, stop
    return rms_norm(h, params["norm"]["scale"], config.norm_eps), [outputs[i] for i in outputs_of]


def head_kernel(params: Params, config: TargetConfig) -> Float[Array, "D V"]:
    """The matrix from hidden states to logits: the embedding's transpose if they are tied."""
    return params["embeddings"]["embedding"].T if config.tie_word_embeddings else params["lm_head"]["kernel"]


def head_logits(hidden: Float[Array, "*n D"], kernel: Float[Array, "D V"], dtype: str) -> Float[Array, "*n V"]:
    """Float32 logits of what :func:`hidden_states` returns."""
    if dtype == "bfloat16":
        return project(hidden.astype(jnp.bfloat16), kernel, jnp.float32)
    return matmul(hidden, kernel, dtype)


def logits(model: GatedDeltaNetLM, params: Params, tokens: Int[Array, "B T"], unroll: int = 1) -> Float[Array, "B T V"]:
    """What ``model`` computes from an empty state; see :func:`hidden_states`."""
    hidden, _ = hidden_states(model, params, tokens, unroll)
    return head_logits(hidden, head_kernel(params, model.config), model.dtype)


def token_losses(
    model: GatedDeltaNetLM, params: Params, windows: Int[Array, "B T+1"], unroll: int = 1
) -> Float[Array, "B T"]:
    """Cross entropy in nats of each next token, in float32, from an empty state."""
    predicted = logits(model, params, windows[:, :-1], unroll)
    return optax.softmax_cross_entropy_with_integer_labels(predicted, windows[:, 1:])


def make_train_step(
    model: GatedDeltaNetLM, config: TrainingConfig, unroll: int = 1
) -> Callable[[Params, optax.OptState, Int[Array, "B T+1"]], tuple[Params, optax.OptState, dict[str, Array]]]:
    """One jitted optimiser step; parameters and optimiser state are donated. ``unroll``: see :func:`logits`."""
    optimizer = config.optimizer()

    def step(params: Params, opt_state: optax.OptState, windows: Array):
        loss, grads = jax.value_and_grad(lambda p: token_losses(model, p, windows, unroll).mean())(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    return jax.jit(step, donate_argnums=(0, 1))


class HeldOut:
    """Held-out loss by source, in nats a token. One compiled shape, the training batch."""

    def __init__(self, model: GatedDeltaNetLM, data: TokenData, config: TrainingConfig, shares: dict[str, float]):
        self._data = data
        self._config = config
        self._shares = shares
        self._sum = jax.jit(lambda params, windows, mask: (token_losses(model, params, windows) * mask).sum())

    def __call__(self, params: Params, limit: int | None = None) -> dict[str, float]:
        """Loss of each source with held-out tokens, and ``mean``: by the shares of training, which keep-best follows.

        Sources held out whole have no share; they count in ``mean`` only if nothing else is held out.
        """
        losses: dict[str, float] = {}
        rows = self._config.batch
        for source in self._data.sources:
            windows, mask = held_out_windows(self._data, source, self._config.length, limit)
            if not mask.sum():
                continue
            pad = -len(windows) % rows
            windows, mask = (np.pad(x, ((0, pad), (0, 0))) for x in (windows, mask))
            total = sum(
                float(self._sum(params, windows[i : i + rows], mask[i : i + rows]))
                for i in range(0, len(windows), rows)
            )
            losses[source.name] = total / float(mask.sum())
        weights = [self._shares.get(name, 0.0) for name in losses]
        mean = np.average(list(losses.values()), weights=weights if sum(weights) > 0 else None)
        return {**losses, "mean": float(mean)}


def init_carry(model: GatedDeltaNetLM, config: TrainingConfig) -> Carry:
    """The state before step 0: parameters, optimiser state, step, and the best parameters so far."""
    params = model.init(jax.random.key(config.seed), jnp.zeros((1, 8), jnp.int32))["params"]
    return {
        "params": params,
        "opt_state": config.optimizer().init(params),
        "step": 0,
        "best_params": jax.tree.map(jnp.copy, params),
        "best_loss": float("inf"),
        "best_step": 0,
    }


@dataclass(frozen=True)
class TrainingResult:
    """The parameters with the lowest held-out loss, that loss by source over all held-out tokens, and their step."""

    params: Params
    held_out: dict[str, float]
    step: int
    finished: bool


def check_out(out: Path) -> None:
    """Checks that ``out`` is absent, empty (prepared data and locks aside) or the folder of a run.

    Raises:
      UserError: it is a file, or holds something else.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file, not a folder")
    holds_run = (out / "run.json").is_file()
    if out.is_dir() and not holds_run and any(path.name not in _BEFORE for path in out.iterdir()):
        raise UserError(f"--out {out} is not empty and holds no run; choose another folder")


def claim_run(out: Path, settings: dict[str, Any]) -> None:
    """Makes ``out`` the folder of a run with these settings, or checks that it already is.

    Raises:
      UserError: as :func:`check_out`, or the run there has other settings.
    """
    check_out(out)
    record = out / "run.json"
    settings = json.loads(json.dumps(settings))
    if record.is_file():
        found = json.loads(record.read_text())
        keys = sorted(key for key in {*found, *settings} if found.get(key) != settings.get(key))
        if keys:
            other = "; ".join(f"{key} {found.get(key)}, now {settings.get(key)}" for key in keys)
            raise UserError(f"--out {out} holds a run with other settings ({other}); choose another folder")
        return
    out.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(settings, indent=2) + "\n")


def run_settings(target: TargetConfig, config: TrainingConfig, data: TokenData) -> dict[str, Any]:
    """What makes two runs the same run."""
    return {**asdict(target), **asdict(config), "data": data.fingerprint}


def train(
    data: TokenData,
    target: TargetConfig,
    config: TrainingConfig,
    out: Path,
    *,
    stop_after: int | None = None,
    log_every: int = 20,
    progress: bool = True,
) -> TrainingResult:
    """Trains, or goes on training where ``out`` left off.

    ``out`` gets run.json, metrics.jsonl and checkpoints/ (the latest one). A run that was stopped and resumed takes
    the same steps as an unbroken one: windows depend on (seed, step) alone and a checkpoint holds the whole state.

    Args:
      stop_after: stop after this step, with a checkpoint, as if interrupted there.

    Raises:
      UserError: ``out`` is not for this run; a source is shorter than a window; the loss is no longer finite.
    """
    sampler = WindowSampler(data, config.batch, config.length, config.weights, config.seed)
    claim_run(out, run_settings(target, config, data))
    model = GatedDeltaNetLM(target, config.dtype)
    train_step = make_train_step(model, config)
    held_out = HeldOut(model, data, config, sampler.shares)
    schedule = config.schedule()
    last = config.steps if stop_after is None else min(stop_after, config.steps)

    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with ocp.CheckpointManager((out / "checkpoints").resolve(), options=options) as manager:
        carry = init_carry(model, config)
        if manager.latest_step() is not None:
            carry = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(carry))
        step = int(carry["step"])
        trim_metrics(out / "metrics.jsonl", step)
        params, opt_state = carry["params"], carry["opt_state"]
        with tqdm(total=config.steps, initial=step, disable=not progress, unit="step") as bar:
            clock, since = perf_counter(), step
            while step < last:
                params, opt_state, metrics = train_step(params, opt_state, jnp.asarray(sampler(step)))
                step += 1
                bar.update()
                evaluate = step % config.eval_every == 0 or step == config.steps
                if step % log_every == 0 or evaluate:
                    line = {"step": step, **{name: float(value) for name, value in metrics.items()}}
                    if not np.isfinite(line["loss"]):
                        raise UserError(f"the loss is {line['loss']} at step {step}; try a lower --learning-rate")
                    rate = (step - since) * config.batch * config.length / (perf_counter() - clock)
                    line |= {"learning_rate": float(np.asarray(schedule(step - 1))), "tokens_per_second": round(rate)}
                    write_metrics(out / "metrics.jsonl", line)
                    bar.set_postfix_str(f"loss {line['loss']:.3f}, {rate:,.0f} tokens/s")
                    clock, since = perf_counter(), step
                if evaluate:
                    losses = held_out(params, _QUICK_WINDOWS)
                    write_metrics(out / "metrics.jsonl", {"step": step, "held_out": losses})
                    if losses["mean"] < carry["best_loss"]:
                        best = jax.tree.map(jnp.copy, params)
                        carry |= {"best_params": best, "best_loss": losses["mean"], "best_step": step}
                if evaluate or step == last:
                    carry |= {"params": params, "opt_state": opt_state, "step": step}
                    manager.save(step, args=ocp.args.StandardSave(carry))
                    clock, since = perf_counter(), step
        finished = step >= config.steps
        best = carry["best_params"]
        return TrainingResult(best, held_out(best) if finished else {}, int(carry["best_step"]), finished)


def write_metrics(path: Path, line: dict[str, Any]) -> None:
    """Appends a line to metrics.jsonl."""
    with path.open("a") as log:
        log.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, but for one cut short by a crash; none if there is no file."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def trim_metrics(path: Path, step: int) -> None:
    """Drops lines of steps that will be taken again, and a line cut short by a crash."""
    if path.exists():
        path.write_text("".join(json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step))
