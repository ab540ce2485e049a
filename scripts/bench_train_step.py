"""Times a step of training: python scripts/bench_train_step.py [--shape gdn-1.3b] [--dtype bfloat16] [--unroll 24].

The step is the trainer's own, forward, backward and AdamW, on random weights and random tokens. Tokens a second and the
milliseconds of a step are medians over the steps after warm-up. Per cent of peak: 6 multiplications and additions a
parameter and token, the embedding table left out, against the dense bf16 peak of the card if it is known.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

# Before the folder of scripts, whose train_drafter.py would hide the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.shapes import GDN_1P3B, shape
from specla_jax.config import TargetConfig
from specla_jax.model import GatedDeltaNetLM
from train_drafter.target import TrainingConfig, make_train_step

WARMUP = 3
PEAK = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bf16 with fp32 sums, from NVIDIA's data sheets


@dataclass(frozen=True)
class Shape:
    """A model, and the rows and tokens of a step."""

    target: TargetConfig
    batch: int
    length: int


SHAPES = {
    "gdn-1.3b": Shape(GDN_1P3B, 16, 1024),
    "gdn-100m": Shape(shape(12, 768, 6, 128, 2048, 8192, True), 32, 1024),
    "tiny": Shape(shape(2, 32, 1, 16, 48, 64, True), 2, 80),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="gdn-1.3b")
    parser.add_argument("--batch", type=int, help="rows of a step, if not those of the shape")
    parser.add_argument("--length", type=int, help="tokens of a row, if not those of the shape")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--unroll", type=int, default=1, help="layers in a step of the scan over layers")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the computation")
    args = parser.parse_args()
    chosen = SHAPES[args.shape]
    batch, length = args.batch or chosen.batch, args.length or chosen.length
    config = TrainingConfig(
        steps=WARMUP + args.steps, batch=batch, length=length, learning_rate=1e-4, warmup=1, dtype=args.dtype
    )
    model = GatedDeltaNetLM(chosen.target, config.dtype)
    params = jax.jit(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    multiplied = count - (0 if chosen.target.tie_word_embeddings else params["embeddings"]["embedding"].size)
    opt_state = jax.jit(config.optimizer().init)(params)
    step = make_train_step(model, config, args.unroll)
    rng = np.random.default_rng(0)
    windows = jnp.asarray(rng.integers(0, chosen.target.vocab_size, (batch, length + 1)), jnp.int32)
    card = jax.devices()[0]
    print(f"{args.shape}, {count:,} parameters, {batch} x {length} tokens, {args.dtype}, on {card.device_kind}")

    seconds, losses = [], []
    for number in range(config.steps):
        start = time.perf_counter()
        params, opt_state, metrics = step(params, opt_state, windows)
        losses.append(float(metrics["loss"]))  # waits for the step
        seconds.append(time.perf_counter() - start)
        if number == 0:
            print(f"compiled and run once in {seconds[0]:.1f} s", flush=True)
    median = float(np.median(seconds[WARMUP:]))
    print(f"{batch * length / median:,.0f} tokens/s, {1e3 * median:.1f} ms a step (median of {args.steps})")
    if card.device_kind in PEAK:
        share = 6 * multiplied * batch * length / median / PEAK[card.device_kind]
        print(f"{share:.1%} of the peak of {PEAK[card.device_kind] / 1e12:.0f} TFLOP/s")
    stats = card.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        print(f"{stats['peak_bytes_in_use'] / 1e9:.1f} GB of device memory at most")
    finite = bool(np.isfinite(losses).all())
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {'finite' if finite else 'NOT FINITE'}")


if __name__ == "__main__":
    main()
