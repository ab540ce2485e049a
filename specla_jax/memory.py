"""What a generation will hold in memory, worked out before anything is allocated."""

from typing import Any

import jax
import jax.numpy as jnp
import psutil

from specla_jax.errors import UserError
from specla_jax.loop import Carry, Engine, Params


def nbytes(tree: Any) -> int:
    """Bytes of all arrays (or abstract arrays) of a pytree; an array that occurs twice counts once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves.values())


def memory_use(engine: Engine, params: Params, carry: Carry) -> dict[str, int]:
    """Bytes by kind: weights, state, conv, factors, drafter, logits and an estimate of the prefill's activations.

    ``carry`` may be abstract (:func:`jax.eval_shape` of :meth:`Engine.init`).
    """
    config = engine.model.config
    batch = carry.context.length.shape[0]
    nodes = engine.drafter.draft.nodes
    after = jax.eval_shape(engine.prefill, params, carry)
    ints = jax.ShapeDtypeStruct((batch, nodes), jnp.int32)
    logits, features, factors = jax.eval_shape(
        lambda params, nodes, count, state: engine.verify(params, nodes, nodes, count, state),
        params,
        ints,
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        carry.state,
    )
    # At the widest place of a layer: its fused projections in float32, the MLP, and two residual streams.
    width = 2 * (config.conv_dim + 2 * config.value_dim) + 3 * config.intermediate_size + 4 * config.hidden_size
    prefill = 4 * batch * engine.prefill_length * width
    if engine.drafter.needs_features:
        prefill += batch * engine.prefill_length * features.shape[-1] * features.dtype.itemsize
    # Drafting and filtering hold the noise and a sorted copy beside the logits.
    return {
        "weights": nbytes(params),
        "state": nbytes(after.state.S),
        "conv": nbytes((after.state.conv, factors.conv)),
        "factors": nbytes(factors.delta),
        "drafter": nbytes(after.drafter),
        "logits": 3 * nbytes(logits) + nbytes(features),
        "prefill": prefill,
    }


def free_memory() -> int:
    """Bytes that can still be allocated on the default device; of the host's memory if it has no limit of its own."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available


def format_bytes(count: int) -> str:
    """A size for people: ``48.0 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def check_fits(use: dict[str, int], free: int) -> None:
    """Refuses a generation that needs more than ``free`` bytes beside the weights, which are loaded already.

    Raises:
      UserError: with the parts that make up the need.
    """
    parts = {name: count for name, count in use.items() if name != "weights" and count}
    need = sum(parts.values())
    if need > free:
        listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
        raise UserError(
            f"this run needs {format_bytes(need)} beside the weights ({listed}) but {format_bytes(free)} are free; "
            "use fewer prompts at a time, fewer nodes or shorter prompts"
        )
