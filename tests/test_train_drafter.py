"""Training a drafter: resumption, updates that are not finite, and several devices."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specla_jax
from drafter_training import documents, metrics
from reference import Reference
from specla_jax.drafters import EagleConfig, init_eagle, load_drafter
from specla_jax.model import GatedDeltaNetLM
from specla_jax.target import Target
from train_drafter.drafter import DrafterTraining, make_train_step, rows_mesh, split_params, train
from train_drafter.drafter_cli import default_config
from train_drafter.evaluation import BEST
from train_drafter.objective import Frozen, Objective
from train_drafter.packing import RowSampler, pack

TRAINING = DrafterTraining(
    steps=6, batch=2, length=24, accumulate=2, unroll=2, learning_rate=1e-2, warmup=1, eval_every=3
)


def small(target: Target, **changes) -> EagleConfig:
    return default_config(target, num_heads=2, head_dim=8, intermediate_size=32, window=16, **changes)


def first_is_best(params: dict) -> dict:
    """In place of an evaluation by decoding: the less a norm has moved, the better."""
    return {BEST: 9 - float(abs(params["norm"]["scale"] - 1).sum())}


def run(target: Target, out: Path, **options):
    config = small(target)
    sampler = RowSampler(pack(documents(20), TRAINING.length), TRAINING.batch, TRAINING.seed)
    return train(
        target, config, TRAINING, sampler, first_is_best, out, settings={}, progress=False, log_every=1, **options
    )


def test_a_resumed_run_equals_an_unbroken_one(base: Reference, tmp_path: Path):
    whole = run(base.model, tmp_path / "whole")
    stopped = run(base.model, tmp_path / "parts", stop_after=2)
    assert not stopped.finished
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as log:  # what a crash after the checkpoint leaves behind
        log.write('{"step": 3, "loss": 99}\n{"step": 1')
    resumed = run(base.model, tmp_path / "parts")
    assert whole.finished
    assert resumed.finished
    assert whole.step == 3
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    lines = [[{**line, "tokens_per_second": 0} for line in metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[0] if "loss" in line] == [1, 2, 3, 4, 5, 6]
    written, saved = load_drafter(tmp_path / "parts" / "drafter", base.model)
    assert written == small(base.model)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), saved, whole.params)
    with pytest.raises(specla_jax.UserError, match=r"run with other settings \(seed 0, now 1\)"):
        train(base.model, written, replace(TRAINING, seed=1), None, None, tmp_path / "whole", settings={})


def test_an_update_that_is_not_finite_is_skipped_and_counted(base: Reference):
    config = small(base.model)
    objective = Objective(model=GatedDeltaNetLM(base.model.config, "float32"), config=config)
    step = make_train_step(objective, TRAINING.optimizer(), rows_mesh(2))
    params = split_params(init_eagle(jax.random.key(0), config))[0]
    state = {"params": params, "opt_state": TRAINING.optimizer().init(params), "skipped": jnp.zeros((), jnp.int32)}
    batch = pack(documents(4), 24).batch(np.array([0, 1]))
    frozen = Frozen(base.model.params)
    # The head of the target overflows: hidden states are finite, the loss is not.
    broken = Frozen({**base.model.params, "lm_head": {"kernel": base.model.params["lm_head"]["kernel"] * 3e38}})
    before = jax.tree.map(np.asarray, state)
    state, sums, (loss, _) = step(state, broken, batch)
    assert not np.isfinite(loss)
    assert float(sums.masked_rows) == 0
    assert int(state["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, state["opt_state"], before["opt_state"])
    jax.tree.map(np.testing.assert_array_equal, state["params"], before["params"])
    for _ in range(4):  # the learning rate of the first update is 0
        state, _, (loss, _) = step(state, frozen, batch)
        assert np.isfinite(loss)
    assert int(state["skipped"]) == 1
    changed = [
        (new != old).any() for new, old in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(before["params"]))
    ]
    assert all(changed)


FOUR_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh
sys.path[:0] = ["tests"]
from drafter_training import documents
from test_train_drafter import small
from reference import load_reference
from specla_jax.drafters import init_eagle
from specla_jax.model import GatedDeltaNetLM
from train_drafter.drafter import make_train_step, rows_mesh, split_params
from train_drafter.objective import Frozen, Objective
from train_drafter.packing import pack

model = load_reference("base").model
config = small(model)
objective = Objective(model=GatedDeltaNetLM(model.config, "float32"), config=config, steps=2, step_weight=0.7)
batch = pack(documents(13), 24).batch(np.array([0, 1, 2, 6]))  # the last row is half empty
assert rows_mesh(4).size == 4
# Not AdamW, which divides by the size of a gradient: one near 0 would show its rounding as a whole update.
optimizer, found = optax.sgd(0.1), []
for mesh in (rows_mesh(4), Mesh(np.array(jax.devices()[:1]), ("rows",))):
    params = split_params(init_eagle(jax.random.key(0), config))[0]
    start = jax.device_get(params)  # the step donates them
    state = {"params": params, "opt_state": optimizer.init(params), "skipped": jnp.zeros((), jnp.int32)}
    step = make_train_step(objective, optimizer, mesh)
    for _ in range(4):
        state, sums, scalars = step(state, Frozen(model.params), batch)
    found.append(jax.device_get((scalars, sums.count, state["params"])))
np.testing.assert_array_equal(found[0][1], found[1][1])
np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)  # the loss after three updates, and the gradient's norm
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), found[0][2], found[1][2])
moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(found[0][2]), jax.tree.leaves(start))]
assert min(moved) > 1e-4, moved
print("equal", float(found[0][0][0]))
"""


def test_four_devices_give_the_loss_of_one():
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FOUR_DEVICES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal")
