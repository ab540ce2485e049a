"""Times a round of decoding: python scripts/bench_decode.py [--target DIR] [--batch 1 8] [--nodes 1 8 16] [--dtype D].

Without --target it makes random weights in the shape of m-a-p/1.3B-100B-GatedDeltaNet-pure. A round is the whole of it:
propose nothing, verify N nodes, accept, recover. Its time is the difference between a long and a short generation over
the difference of their rounds, so that prefill and start-up drop out. Bytes are the weights and the state read once;
the bandwidth they are held against is measured in the same run.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from benching import read_bandwidth
from shapes import GDN_1P3B

from specla_jax.checkpoint import load_target
from specla_jax.config import DraftConfig, Dtype
from specla_jax.generate import generate
from specla_jax.memory import nbytes
from specla_jax.model import GatedDeltaNetLM
from specla_jax.target import Target

SHORT, LONG, REPEATS = 64, 124, 3  # both in one bucket of output lengths, so that one program serves both


def random_1p3b(dtype: Dtype) -> Target:
    """Random weights in the shape of the public 1.3B checkpoint (24 layers, D 2048, 8 heads of 256 x 256)."""
    config = GDN_1P3B
    shapes = jax.eval_shape(GatedDeltaNetLM(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [(0.02 * jax.random.normal(key, leaf.shape)).astype(dtype) for key, leaf in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(structure, made)
    for layer in range(config.num_hidden_layers):
        attn = params[f"layers_{layer}"]["attn"]
        attn["A_log"], attn["dt_bias"] = jnp.zeros(8), jnp.full(8, -4.0)
    return Target(config=config, params=params, dtype=dtype, path=Path("random"))


def round_ms(model: Target, batch: int, nodes: int) -> float:
    """Milliseconds of a round that verifies ``nodes`` nodes a row, median of the repeats."""
    options = {
        "method": "chain",
        "drafter": "none",
        "draft": DraftConfig(depth=nodes - 1, branch=1, nodes=nodes),
    }
    times = []
    for _ in range(REPEATS + 1):  # the first one warms up
        short, long = (
            generate(model, [[1, 2, 3]] * batch, max_new_tokens=count, **options).log.seconds for count in (SHORT, LONG)
        )
        times.append(1e3 * (long - short) / (LONG - SHORT))
    return sorted(times[1:])[REPEATS // 2]


def main() -> None:
    """Prints one line for each batch and number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()

    model = random_1p3b(args.dtype) if args.target is None else load_target(args.target, dtype=args.dtype)
    bandwidth = read_bandwidth()
    # The embedding table is looked up, not read, unless it is the head as well.
    weights = nbytes(model.params)
    if not model.config.tie_word_embeddings:
        weights -= nbytes(model.params["embeddings"])
    config = model.config
    state = 4 * config.num_hidden_layers * config.num_v_heads * config.head_dim * config.head_v_dim
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}; weights {weights / 1e9:.3f} GB")
    print(f"read bandwidth in this run: {bandwidth / 1e9:.0f} GB/s")
    print("batch nodes   ms/round  round cost   floor ms   % of bandwidth")
    for batch in args.batch:
        single = None
        for nodes in args.nodes:
            ms = round_ms(model, batch, nodes)
            single = single or ms
            floor = 1e3 * (weights + 2 * batch * state) / bandwidth
            print(
                f"{batch:5d} {nodes:5d} {ms:10.3f} {ms / single:11.2f} {floor:10.3f} {100 * floor / ms:16.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
