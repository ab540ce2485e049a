"""The loops that ``bench_kernels.py`` times: for each kernel and each baseline a step over all layers, and its data."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benching import Loop, Timing, nbytes

from kernels_pallas import Factors, gdn_prefill, gdn_recover, gdn_verify, tree_conv
from kernels_pallas.baselines import MOST_ELEMENTS, paths, replay_recover, replay_verify, walk_verify

PATH = 8  # accepted tokens that recovery is timed for, of twice as many nodes

Columns = tuple[int, int]  # the tile of a baseline: columns of dv a program, and its warps


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model and of the grid that is timed; ``full`` has more batches, ``tiles`` are the baselines'.

    ``tokens``: of the products.
    """

    layers: int
    heads: int
    value_heads: int
    dk: int
    dv: int
    hidden: int
    mlp: int
    vocabulary: int
    prefill: tuple[int, int]
    batches: tuple[int, ...]
    full: tuple[int, ...]
    recover: tuple[int, ...]
    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    tiles: tuple[Columns, ...]
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.heads * self.dk + self.value_heads * self.dv

    @property
    def state(self) -> tuple[int, int, int]:
        return self.value_heads, self.dk, self.dv


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every loop depends on."""

    shape: Shape
    timing: Timing
    implementation: Any = None

    @property
    def interpret(self) -> bool:
        """Without a GPU the baselines have no other way to run; their times then mean nothing."""
        return jax.default_backend() != "gpu"

    def baseline(self, tile: Columns) -> dict[str, Any]:
        """The options that all baselines share."""
        return {"columns": tile[0], "warps": tile[1], "interpret": self.interpret}


# Data


def tree(nodes: int) -> np.ndarray:
    """Parents of a draft tree of top-4 shape, numbered depth first; a chain up to 4 nodes.

    Below the root every level has 4 nodes: of the level above, the first has three of them and the second has one.
    Depth-first numbers suit the walk, which then finds most parents in its registers.
    """
    if nodes <= 4:
        return np.arange(-1, nodes - 1, dtype=np.int32)
    above = [-1] + [0 if t <= 4 else (t - 1) // 4 * 4 - 3 + ((t - 1) % 4 == 3) for t in range(1, nodes)]
    order: list[int] = []

    def visit(node: int) -> None:
        order.append(node)
        for child in range(node + 1, nodes):
            if above[child] == node:
                visit(child)

    visit(0)
    return np.array([-1 if t == 0 else order.index(above[t]) for t in order], np.int32)


def chain(nodes: int) -> np.ndarray:
    """Parents of a chain."""
    return np.arange(-1, nodes - 1, dtype=np.int32)


def scattered(nodes: int) -> np.ndarray:
    """Parents of a tree whose longest path is every other node: none of them has its parent just before it."""
    return np.array([-1, *(t - 2 if t % 2 == 0 else t - 1 for t in range(1, nodes))], np.int32)


def every_row(batch: int, parents: np.ndarray) -> jax.Array:
    """The same tree for all rows."""
    return jnp.tile(jnp.asarray(parents, jnp.int32), (batch, 1))


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def uniform(seed: int, *shape: int, low: float = 0.0, high: float = 1.0) -> jax.Array:
    """Evenly spread fp32 numbers."""
    return jax.random.uniform(jax.random.key(seed), shape, jnp.float32, low, high)


def unit(seed: int, *shape: int) -> jax.Array:
    """Unit vectors along the last axis, in bf16."""
    x = normal(seed, *shape, dtype=jnp.float32)
    return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)


def inputs(shape: Shape, batch: int, tokens: int) -> tuple[jax.Array, ...]:
    """q, k, v, log_decay, beta of a layer: decays of 0 to -0.1, in bf16 but for the gates."""
    key, gate = (batch, tokens, shape.heads, shape.dk), (batch, tokens, shape.value_heads)
    return (
        unit(1, *key),
        unit(2, *key),
        normal(3, *gate, shape.dv),
        uniform(4, *gate, low=-0.1, high=0),
        uniform(5, *gate),
    )


def states(shape: Shape, batch: int) -> jax.Array:
    """The states of all layers."""
    return normal(6, shape.layers, batch, *shape.state, dtype=jnp.float32)


def windows(shape: Shape, batch: int) -> jax.Array:
    """The windows of the convolution of all layers."""
    return normal(8, shape.layers, batch, shape.taps - 1, shape.channels)


def all_factors(shape: Shape, batch: int, nodes: int) -> tuple[Factors, jax.Array]:
    """Factors of all layers, and the inputs of the convolution."""
    gate = shape.layers, batch, nodes, shape.value_heads
    total = jnp.cumsum(uniform(4, *gate, low=-0.1, high=0), axis=2)
    key = unit(2, *gate[:3], shape.heads, shape.dk)
    factors = Factors(key, normal(3, *gate, shape.dv, dtype=jnp.float32), total, jnp.zeros(gate))
    return factors, normal(7, *gate[:3], shape.channels)


def kept(factors: Factors) -> tuple[Any, ...]:
    """The factors that verification writes; the keys are an input of it, given back as they are."""
    return factors.value, factors.log_decay, factors.log_decay_low


def zeros(make: Callable[[], Any]) -> Any:
    """Zeros in the shapes of what ``make`` returns."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))


def kernel(op: str, kind: str = "triton") -> Callable[..., Any]:
    """The function of an op that takes a tile, Triton's or of another ``kind``; its arguments are not checked."""
    return getattr(importlib.import_module(f"kernels_pallas.{op}.{kind}"), op)


# Kernels. Each returns a loop of steps over all layers; ``tile`` None is the one of the op's table.


def verify_loop(
    setup: Setup, batch: int, nodes: int, tile: Any = None, state: jax.Array | None = None, kind: str = "triton"
) -> Loop:
    """``gdn_verify`` of the tree; ``tile`` is one of the ``kind``. The last of the fixed arguments is the parents."""
    shape = setup.shape
    q, k, v, log_decay, beta = inputs(shape, batch, nodes)
    state = states(shape, batch) if state is None else state
    run = functools.partial(gdn_verify, implementation=setup.implementation)
    if tile is not None:
        run = functools.partial(kernel("gdn_verify", kind), num_nodes=None, scale=shape.dk**-0.5, tile=tile)

    def step(carry: Any, fixed: Any) -> Any:
        v, written = carry[0], []
        q, k, log_decay, beta, state, parents = fixed
        for layer in range(shape.layers):
            v, factors = run(q, k, v, log_decay, beta, state, parents, layer=layer)
            written.append(kept(factors))
        return v, written

    fixed = q, k, log_decay, beta, state, every_row(batch, tree(nodes))
    blank = zeros(lambda: step((v,), fixed)[1])
    moved = nbytes((state, blank)) + shape.layers * nbytes((q, k, v, v, log_decay, beta, fixed[5]))
    return Loop(step, (v, blank), fixed, moved=moved, launches=shape.layers, timing=setup.timing)


def conv_loop(setup: Setup, batch: int, nodes: int, tile: Any = None, state: jax.Array | None = None) -> Loop:
    """``tree_conv``, followed by ``gdn_verify`` if there is a state; the bytes are those of the first.

    Layers follow each other in one stream without a dependency in their values, which would take a kernel more. The
    number of nodes is in the carry, so that nothing can be moved out of the loop.
    """
    shape = setup.shape
    width = shape.channels + shape.value_heads * shape.dv + 2 * shape.value_heads  # the output gate lies between
    arrays = (
        normal(7, batch, nodes, width, dtype=jnp.float32),
        windows(shape, batch),
        normal(9, shape.taps, shape.channels),
        jnp.zeros(shape.value_heads),
        jnp.full(shape.value_heads, -4.0),
        every_row(batch, tree(nodes)),
    )
    options: dict[str, Any] = {"key_heads": shape.heads, "dk": shape.dk, "dtype": jnp.dtype(jnp.bfloat16)}
    run = functools.partial(tree_conv, implementation=setup.implementation, **options)
    if tile is not None:
        run = functools.partial(kernel("tree_conv"), dv=shape.dv, max_beta=1.0, tile=tile, **options)

    def step(carry: Any, fixed: Any) -> Any:
        num_nodes, written = carry[0], []
        arrays, state = fixed
        for layer in range(shape.layers):
            mixer = run(*arrays, num_nodes, layer=layer)
            if state is None:
                written.append(tuple(mixer))
                continue
            q, k, v, log_decay, beta, conv_inputs = mixer
            o, factors = gdn_verify(
                *(q, k, v, log_decay, beta, state, arrays[5], num_nodes),
                **{"layer": layer, "implementation": setup.implementation},
            )
            written.append((o, conv_inputs, factors.key, *kept(factors)))
        # Always ``nodes``, which no compiler can know.
        return jnp.minimum(nodes, num_nodes + (written[-1][0][:, 0, 0, 0] > 1e30)), written

    fixed = arrays, state
    carry = jnp.full(batch, nodes, jnp.int32), zeros(lambda: step((jnp.full(batch, nodes, jnp.int32),), fixed)[1])
    read = 4 * batch * nodes * (shape.channels + 2 * shape.value_heads) + nbytes(arrays[2:])
    moved = shape.layers * read + nbytes((arrays[1], carry[1]))
    return Loop(step, carry, fixed, moved=moved, launches=shape.layers, timing=setup.timing)


def recover_loop(setup: Setup, batch: int, nodes: int, tile: Any = None) -> Loop:
    """``gdn_recover`` of states and windows, all layers in one launch, half of the nodes on the accepted path."""
    shape = setup.shape
    run = functools.partial(gdn_recover, implementation=setup.implementation)
    if tile is not None:
        run = functools.partial(kernel("gdn_recover"), tile=tile)

    def step(carry: Any, fixed: Any) -> Any:
        factors, conv_inputs, parents, last = fixed
        return run(carry[0], factors, parents, last, carry[1], conv_inputs)

    carry = states(shape, batch), windows(shape, batch)
    factors, conv_inputs = all_factors(shape, batch, nodes)
    fixed = factors, conv_inputs, every_row(batch, scattered(nodes)), jnp.full(batch, nodes - 2, jnp.int32)
    moved = 2 * nbytes(carry[0]) + 3 * nbytes(carry[1]) + nbytes(factors) // 2
    return Loop(step, carry, fixed, moved=moved, launches=1, timing=setup.timing)


def decode_steps_loop(setup: Setup, batch: int) -> Loop:
    """One token more through all layers, verified as a tree of one node and folded: replay as plain decoding does it.

    Kernels only, no projections. Of the factors only G goes from verification to recovery, so that the copies that
    stack the layers' factors are not counted against it.
    """
    shape, implementation = setup.shape, setup.implementation

    def step(carry: Any, fixed: Any) -> Any:
        v, state, window = carry
        q, k, log_decay, beta, factors, conv_inputs, parents, last = fixed
        totals = []
        for layer in range(shape.layers):
            v, written = gdn_verify(
                q, k, v, log_decay, beta, state, parents, layer=layer, implementation=implementation
            )
            totals.append(written.log_decay)
        factors = replace(factors, log_decay=jnp.stack(totals))
        return v, *gdn_recover(state, factors, parents, last, window, conv_inputs, implementation)

    q, k, v, log_decay, beta = inputs(shape, batch, 1)
    carry = v, states(shape, batch), windows(shape, batch)
    fixed = (
        q,
        k,
        log_decay,
        beta,
        *all_factors(shape, batch, 1),
        every_row(batch, chain(1)),
        jnp.zeros(batch, jnp.int32),
    )
    return Loop(step, carry, fixed, moved=3 * nbytes(carry[1]), launches=shape.layers + 1, timing=setup.timing)


def prefill_loop(setup: Setup, batch: int, tokens: int, tile: Any = None, kind: str = "triton") -> Loop:
    """``gdn_prefill``, one layer a step; ``tile`` is one of the ``kind``."""
    q, k, v, log_decay, beta = inputs(setup.shape, batch, tokens)
    run = functools.partial(gdn_prefill, implementation=setup.implementation)
    if tile is not None:
        scale = setup.shape.dk**-0.5
        run = functools.partial(kernel("gdn_prefill", kind), lengths=None, scale=scale, chunk=64, tile=tile)

    def step(carry: Any, fixed: Any) -> Any:
        q, k, log_decay, beta = fixed
        return run(q, k, carry[0], log_decay, beta, carry[1])

    state = normal(6, batch, *setup.shape.state, dtype=jnp.float32)
    moved = nbytes((q, k, v, v, log_decay, beta, state, state))
    return Loop(step, (v, state), (q, k, log_decay, beta), moved=moved, launches=1, timing=setup.timing)


# Baselines. A layer's state is an array of its own: the kernels of all layers are then equal, and compiled once.


def walk_loop(setup: Setup, batch: int, nodes: int, tile: Columns, layers: list[jax.Array], keep: bool) -> Loop:
    """``walk_verify``. As in an engine, the states a node of all layers are there until acceptance has chosen.

    Beyond 8 GB of them layers share buffers; these are then far larger than any cache.
    """
    q, k, v, log_decay, beta = inputs(setup.shape, batch, nodes)
    buffer = batch, nodes, *setup.shape.state
    size = 4 * int(np.prod(buffer))
    buffers = min(len(layers), max(2, 8 * 10**9 // size))

    def step(carry: Any, fixed: Any) -> Any:
        v, written = carry[0], list(carry[1])
        q, k, log_decay, beta, layers, parents = fixed
        for i, state in enumerate(layers):
            place = i % buffers
            v, written[place] = walk_verify(
                q, k, v, log_decay, beta, state, parents, written[place], keep=keep, **setup.baseline(tile)
            )
        return v, written

    carry = v, [jnp.zeros(buffer, jnp.float32) for _ in range(buffers)]
    fixed = q, k, log_decay, beta, layers, every_row(batch, tree(nodes))
    return Loop(step, carry, fixed, moved=size * len(layers), launches=len(layers), timing=setup.timing)


def replay_loop(setup: Setup, batch: int, nodes: int, tile: Columns, layers: list[jax.Array]) -> Loop:
    """``replay_verify``; the paths are found once for all layers."""
    q, k, v, log_decay, beta = inputs(setup.shape, batch, nodes)

    def step(v: Any, fixed: Any) -> Any:
        q, k, log_decay, beta, layers, path, count = fixed
        for state in layers:
            v = replay_verify(q, k, v, log_decay, beta, state, path, count, **setup.baseline(tile))
        return v

    fixed = q, k, log_decay, beta, layers, *paths(every_row(batch, tree(nodes)))
    return Loop(step, v, fixed, moved=nbytes(layers), launches=len(layers), timing=setup.timing)


def token_replay_loop(setup: Setup, batch: int, nodes: int, tile: Columns) -> Loop:
    """``replay_recover``, all layers in one launch; the window of the convolution is not moved."""
    shape = setup.shape
    arrays = inputs(shape, batch, nodes)[1:]
    stacked = tuple(jnp.tile(x, (shape.layers, *[1] * x.ndim)) for x in arrays)

    def step(state: Any, fixed: Any) -> Any:
        (k, v, log_decay, beta), path, count = fixed
        return replay_recover(k, v, log_decay, beta, state, path, count, **setup.baseline(tile))

    state = states(shape, batch)
    fixed = stacked, every_row(batch, np.arange(0, nodes, 2)), jnp.full(batch, nodes // 2, jnp.int32)
    return Loop(step, state, fixed, moved=2 * nbytes(state), launches=1, timing=setup.timing)


def difference(setup: Setup, batch: int, nodes: int, state: jax.Array) -> float | None:
    """The largest difference between the outputs of the three ways over the largest output; fp32 values, one layer.

    None where the states of the walk are too many.
    """
    if nodes * state.size >= MOST_ELEMENTS:
        return None
    q, k, v, log_decay, beta = inputs(setup.shape, batch, nodes)
    args = q, k, v.astype(jnp.float32), log_decay, beta, state
    parents, options = every_row(batch, tree(nodes)), setup.baseline((16, 2))
    ours, _ = jax.jit(functools.partial(gdn_verify, implementation=setup.implementation))(*args, parents)
    unset = jnp.zeros((batch, nodes, *setup.shape.state))
    walk, _ = jax.jit(functools.partial(walk_verify, **options), donate_argnums=7)(*args, parents, unset)
    replay = jax.jit(functools.partial(replay_verify, **options))(*args, *paths(parents))
    largest = jnp.max(jnp.abs(walk))
    return float(max(jnp.max(jnp.abs(other - walk)) / largest for other in (ours, replay)))
