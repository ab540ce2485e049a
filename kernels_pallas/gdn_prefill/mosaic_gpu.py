"""Prefill whose walk along the chunks of a row is a Pallas Mosaic GPU kernel for Hopper: ``forward.scan``, faster.

A warpgroup keeps 64 columns of dv of a head's state in registers for the whole row, on their side: S^T [64, dk] is what
tensor cores add to and, cut into bf16 parts, their left operand. So are V^T and Z^T; what passes through shared memory
is only what comes from memory. Two warpgroups share a chunk's q, k and 64 x 64 matrices, and while one chunk is
computed the next one's are on their way.

The maths, the parts and the bytes are those of ``forward.py``. What comes before the walk, and a gradient, which wants
more from it, are the Triton kernels.

Limits: q, k, v in bf16, chunks of 64, dk and dv of 64, 128 or 256.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.gdn_prefill import triton
from kernels_pallas.gdn_prefill.forward import CHUNK, Prepared, Scanned
from kernels_pallas.gdn_prefill.tiles import MOSAIC
from kernels_pallas.mosaic import BLOCK
from kernels_pallas.precise import bf16_parts
from kernels_pallas.tiles import Tile, check_shared_memory, first

STAGES = 2  # chunks in shared memory
DEPTH = 32  # of dk, cut into parts at a time
PARTS = 2  # of the state beside k


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int) -> str | None:
    """Why the kernels do not take these inputs, or None if they do."""
    for size in (q.shape[-1], v.shape[-1]):
        if size not in (64, 128, 256):
            return f"head sizes must be 64, 128 or 256, got {size}"
    return mosaic.unsupported() or triton.unsupported(q, k, v, chunk)


def why_not(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int) -> str | None:
    """Why the kernels cannot run here on these inputs, or None if they can."""
    return mosaic.why_not() or unsupported(q, k, v, chunk)


def gdn_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array | None,
    scale: float,
    chunk: int,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See ``api.gdn_prefill``; the arguments are already checked. ``tile`` has 64 or 128 columns, one warpgroup or two.

    Raises:
        ValueError: the inputs are not for this kernel, or the tile does not fit.
    """
    if reason := unsupported(q, k, v, chunk):
        raise ValueError(f"gdn_prefill cannot run as a Mosaic GPU kernel: {reason}")
    dk, (value_heads, dv) = q.shape[-1], v.shape[2:]
    tile = (tile or first(MOSAIC, nodes=chunk, heads=q.shape[0] * value_heads)).within(dk, dv)
    if tile.columns not in (64, 128):
        raise ValueError(f"tile must have 64 or 128 columns, got {tile.columns}")
    check_shared_memory("gdn_prefill", tile, shared_bytes(tile, dk))
    inputs = q, k, v, log_decay, beta, state, lengths, scale, chunk
    return triton.gdn_prefill(*inputs, interpret=interpret, walk=_WALKS[tile.columns])


def shared_bytes(tile: Tile, dk: int) -> int:
    """Shared memory of a program."""
    groups = tile.columns // BLOCK
    return STAGES * (2 * CHUNK * (2 * dk + 3 * CHUNK + tile.columns) + 4 * 3 * CHUNK * groups) + 1024


@functools.partial(jax.jit, static_argnames=("groups", "scale", "interpret"))  # lowered once for all layers
def _scan(
    groups: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    prepared: Prepared,
    lengths: jax.Array,
    scale: float,
    interpret: bool,
) -> Scanned:
    tokens, dk = q.shape[1], q.shape[3]
    rows, _, value_heads, dv = v.shape
    padding = -tokens % CHUNK
    beta = jnp.pad(beta, ((0, 0), (0, padding), (0, 0))).transpose(0, 2, 1).reshape(prepared.since_start.shape)
    lines = jnp.stack([prepared.since_start, prepared.to_end, beta], axis=3)  # [B, HV, chunks, 3, 64]
    if not interpret:  # a copy reads zeros behind the end, if that is where a tile of the tensor cores' ends
        padding = -tokens % 8
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))

    o, last = plgpu.kernel(
        functools.partial(_kernel, scale=scale, groups=groups),
        out_type=(jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)),
        scratch_types=_scratch(groups, dk, interpret),
        grid=(dv // (groups * BLOCK), value_heads, rows),
        grid_names=("columns", "head", "row"),
        num_threads=groups,
        thread_name="group",
        compiler_params=mosaic.params(),
        kernel_name="gdn_prefill_scan",
        interpret=plgpu.InterpretGPUParams() if interpret else None,  # pyrefly: ignore[missing-attribute]
    )(lengths, state, q, k, v, prepared.high, prepared.low, prepared.weights, lines)
    return Scanned(o[:, :tokens], last)


def _scratch(groups: int, dk: int, interpret: bool) -> dict[str, Any]:
    """Shared memory of a program."""

    def operand(*shape: int):
        return mosaic.tiled((STAGES, *shape), 2 * DEPTH)

    return {
        "k_smem": operand(CHUNK, dk),
        "q_smem": operand(CHUNK, dk),
        "high_smem": operand(CHUNK, CHUNK),
        "low_smem": operand(CHUNK, CHUNK),
        "weights_smem": operand(CHUNK, CHUNK),
        "line_smem": plgpu.SMEM((STAGES, groups, 3, CHUNK), jnp.float32),
        "v_smem": plgpu.SMEM((STAGES, groups, CHUNK, BLOCK), jnp.bfloat16),
        "loaded": plgpu.Barrier(num_arrivals=7 * groups, num_barriers=STAGES),
        "met": plgpu.Barrier(num_arrivals=groups),
        "copies": plgpu.SMEM((groups, BLOCK, DEPTH), jnp.bfloat16) if interpret else None,
        "wide_copies": plgpu.SMEM((groups, BLOCK, CHUNK), jnp.bfloat16) if interpret else None,
    }


# One function for each, so that equal calls share a compiled program.
_WALKS = {BLOCK: functools.partial(_scan, 1), 2 * BLOCK: functools.partial(_scan, 2)}


def _kernel(
    lengths_ref,  # [B] i32
    state_ref,  # [B, HV, dk, dv] f32
    q_ref,  # [B, T, H, dk] bf16
    k_ref,  # [B, T, H, dk] bf16
    v_ref,  # [B, T, HV, dv] bf16
    high_ref,  # [B, HV, chunks, 64, 64] bf16
    low_ref,  # [B, HV, chunks, 64, 64] bf16
    weights_ref,  # [B, HV, chunks, 64, 64] bf16
    lines_ref,  # [B, HV, chunks, 3, 64] f32
    o_ref,  # [B, T, HV, dv] bf16
    last_ref,  # [B, HV, dk, dv] f32
    *,
    k_smem,
    q_smem,
    high_smem,
    low_smem,
    weights_smem,
    line_smem,
    v_smem,
    loaded,
    met,
    copies,
    wide_copies,
    scale: float,
    groups: int,
):
    j, h, b, group = (lax.axis_index(name) for name in ("columns", "head", "row", "group"))
    dk, chunks = k_smem.shape[2], high_ref.shape[2]
    key_head = h // (v_ref.shape[2] // k_ref.shape[2])
    own = pl.ds((j * groups + group) * BLOCK, BLOCK)
    share = pl.ds(group * (CHUNK // groups), CHUNK // groups)  # of the rows that the warpgroups copy together
    length = lengths_ref[b]
    stop = (length + CHUNK - 1) // CHUNK
    layout, interpret = plgpu.Layout.WGMMA, copies is not None
    copy, wide_copy = (None, None) if copies is None else (copies.at[group], wide_copies.at[group])

    def meet():
        if groups > 1:
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

    def ask(x):
        """All of chunk x, on its way."""
        stage = x % STAGES
        rows = pl.ds(x * CHUNK + group * (CHUNK // groups), CHUNK // groups)
        for ref, smem in ((k_ref, k_smem), (q_ref, q_smem)):
            plgpu.copy_gmem_to_smem(ref.at[b, rows, key_head], smem.at[stage, share], loaded.at[stage])
        for ref, smem in ((high_ref, high_smem), (low_ref, low_smem), (weights_ref, weights_smem)):
            plgpu.copy_gmem_to_smem(ref.at[b, h, x, share], smem.at[stage, share], loaded.at[stage])
        plgpu.copy_gmem_to_smem(lines_ref.at[b, h, x], line_smem.at[stage, group], loaded.at[stage])
        plgpu.copy_gmem_to_smem(v_ref.at[b, pl.ds(x * CHUNK, CHUNK), h, own], v_smem.at[stage, group], loaded.at[stage])

    pl.loop(0, jnp.minimum(STAGES, stop))(ask)

    def step(x, s):
        stage = x % STAGES
        plgpu.barrier_wait(loaded.at[stage])
        k, q, v = k_smem.at[stage], q_smem.at[stage], v_smem.at[stage, group]
        token = plgpu.broadcasted_iota(jnp.int32, (BLOCK, CHUNK), 1, layout=layout)
        real = token < length - x * CHUNK

        def line(i: int) -> jax.Array:
            vector = mosaic.load(line_smem.at[stage, group, i], layout.reduce(0))
            return lax.broadcast_in_dim(vector, (BLOCK, CHUNK), (1,))

        # Padding may hold anything: times zero it must be zero.
        @pl.when((x + 1) * CHUNK > length)
        def _():
            for start in range(0, dk, DEPTH * groups):
                piece = k.at[:, pl.ds(start + group * DEPTH, DEPTH)]
                row = plgpu.broadcasted_iota(jnp.int32, (CHUNK, DEPTH), 0, layout=layout)
                old = mosaic.load(piece, layout)
                piece[...] = jnp.where(row < length - x * CHUNK, old, jnp.zeros_like(old))
            plgpu.commit_smem()
            meet()

        def project(expected, seen):
            for start in range(0, dk, DEPTH):
                cut = pl.ds(start, DEPTH)
                high, low = bf16_parts(s[:, start : start + DEPTH], PARTS)
                plgpu.wgmma(expected, mosaic.operand(low, copy), k.at[:, cut].T)
                plgpu.wgmma(expected, mosaic.operand(high, copy), k.at[:, cut].T)
                plgpu.wgmma(seen, high if copy is None else copy, q.at[:, cut].T)
                plgpu.wgmma_wait(3)
            return expected[...], seen[...]

        accumulator = plgpu.ACC((BLOCK, CHUNK), jnp.float32)
        expected, seen = pl.run_scoped(project, accumulator, accumulator)
        since = line(0)
        [value] = mosaic.turn(mosaic.load(v, mosaic.interleaved(BLOCK)).astype(jnp.float32), interpret)
        rest = jnp.where(real, value - since * expected, jnp.zeros_like(value))
        high, low = bf16_parts(rest, 2)

        def solve(acc):
            for left, right in ((high, low_smem), (low, high_smem), (high, high_smem)):
                plgpu.wgmma(acc, mosaic.operand(left, wide_copy), right.at[stage].T)
            return acc[...]

        u = line(2) * pl.run_scoped(solve, accumulator)

        def output(acc):
            plgpu.wgmma(acc, mosaic.operand(u.astype(jnp.bfloat16), wide_copy), weights_smem.at[stage].T)

        o = mosaic.accumulate(scale * since * seen, output, interpret)
        added = bf16_parts(line(1) * u, 2)

        def add(acc):
            for part in reversed(added):
                plgpu.wgmma(acc, mosaic.operand(part, wide_copy), k)

        kept = line_smem[stage, group, 0, CHUNK - 1]
        v[...] = mosaic.turn_back([jnp.where(real, o, jnp.zeros_like(o))], interpret).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(v, o_ref.at[b, pl.ds(x * CHUNK, CHUNK), h, own])
        s = mosaic.accumulate(kept * s, add, interpret)

        @pl.when(x + STAGES < stop)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            meet()
            ask(x + STAGES)

        return s

    first = mosaic.load(state_ref.at[b, h, :, own], mosaic.interleaved(BLOCK))
    last = lax.fori_loop(0, stop, step, mosaic.turn(first, interpret)[0])
    last_ref[b, h, :, own] = mosaic.turn_back([last], interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    blank = v_smem.at[0, group]
    blank[...] = jnp.zeros((CHUNK, BLOCK), jnp.bfloat16)
    plgpu.commit_smem()

    def clear(x, carry):
        plgpu.copy_smem_to_gmem(blank, o_ref.at[b, pl.ds(x * CHUNK, CHUNK), h, own])
        return carry

    lax.fori_loop(stop, chunks, clear, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
