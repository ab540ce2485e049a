"""A weight-streaming product in one Pallas Mosaic GPU launch, for Hopper.

A program takes 64 features, the 64 rows of weights that tensor cores take as their left operand; the tokens are the
right one. Weights and x come by TMA through a ring in shared memory, so that as much is on its way as the latency of
the memory asks for, and one warpgroup multiplies what has come.

1. Norm: sum_k (x_k scale_k) W_k / rms(x). x times the scale is rounded to bf16 where it lies, between its arrival and
   the product; the root mean square divides the sums, when all of x has passed by.
2. Few features: the programs of a cluster share the depth. Each of the others sends its sums into the shared memory of
   the first, which adds them in order.
3. The sums go through shared memory, which turns them: a token is a line of the output. SwiGLU has gate and up in one
   block. The residual was asked for at the start.

Bytes: the weights once; x once a program, from L2 but for the first.

Numerics: bf16 products, fp32 sums in the order of the depth, that of a cluster's parts last. Neither depends on the
number of tokens, nor on time: a token gets the same bits in every run and beside any others. The reference rounds x
times scale / rms(x), and so by as much, but not to the same bits.

Limits: bf16 weights, K a multiple of 64; a norm takes all of K in one program. Tokens are computed as the next of 8,
16, 32, 64. Shared memory of tensor cores comes in blocks of 8 tokens: where N is no multiple of 8, and where x is fp32,
x takes a way round through plain shared memory.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.mosaic import BLOCK
from kernels_pallas.stream_matmul.reference import GROUP
from kernels_pallas.stream_matmul.tiles import Tile, pick, within
from kernels_pallas.tiles import check_shared_memory

SWIZZLE = 128  # bytes
PIECE = SWIZZLE // 2  # columns of x that are scaled at a time
LINES = mosaic.pieces(2, PIECE, 4)  # a line over 16 lanes, whatever the number of tokens: sums in the same order
COMPILER = 3 * 1024  # bytes of shared memory that the compiler sets aside for sums across warps, and barriers
MULTIPROCESSOR = 228 * 1024  # bytes of its shared memory, of which every program takes 1 KB more than it asks for


def unsupported(dtype: Any, tokens: int, depth: int, features: int) -> str | None:
    """Why this kernel cannot take such weights and tokens, or None if it can."""
    if reason := mosaic.unsupported():
        return reason
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"weights must be bfloat16, got {jnp.dtype(dtype).name}"
    if tokens > 64:
        return f"x must hold at most 64 tokens, got {tokens}"
    if depth % 64:
        return f"x must have a multiple of 64 columns, got {depth}"
    if features % 8:
        return f"features must be a multiple of 8, got {features}"
    return None


def why_not(dtype: Any, tokens: int, depth: int, features: int) -> str | None:
    """Why this kernel cannot run here on such weights and tokens, or None if it can."""
    return mosaic.why_not() or unsupported(dtype, tokens, depth, features)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a launch is made for.

    Attributes:
        tokens: N; ``padded`` of them are computed.
        eps: of the norm; None without one.
        features: M.
        residual: its dtype, or None.
    """

    tokens: int
    depth: int
    x_dtype: Any
    eps: float | None
    swiglu: bool
    features: int
    residual: Any
    tile: Tile

    @property
    def padded(self) -> int:
        return max(8, 1 << (self.tokens - 1).bit_length())

    @property
    def steps(self) -> int:
        """Of a program."""
        return self.depth // (self.tile.split * self.tile.depth)

    @property
    def plain(self) -> bool:
        """Whether x comes into plain shared memory, from which it must be moved."""
        return self.tokens % 8 != 0 or self.x_dtype != jnp.bfloat16

    @property
    def prepares(self) -> bool:
        """Whether x passes through registers before it is multiplied."""
        return self.plain or self.eps is not None

    @property
    def columns(self) -> int:
        """Of the output, a block."""
        return GROUP if self.swiglu else BLOCK

    @property
    def out_dtype(self) -> Any:
        if self.residual is not None:
            return self.residual
        return jnp.dtype(jnp.bfloat16 if self.swiglu else jnp.float32)


def shared_bytes(plan: Plan) -> int:
    """Shared memory of a program: what ``_scratch`` asks for in whole KB, and what the compiler adds."""
    sizes = (
        math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
        for ref in _scratch(plan).values()
        if ref is not None and not isinstance(ref, plgpu.Barrier)
    )
    return sum(-(-size // 1024) * 1024 for size in sizes) + COMPILER


def fitted(plan: Plan) -> Plan:
    """This plan with no more stages than there are steps, and than fit beside the other programs; two must."""
    room = MULTIPROCESSOR // plan.tile.programs - 1024
    least, most = min(2, plan.steps), min(plan.tile.stages, plan.steps)
    plans = (replace(plan, tile=replace(plan.tile, stages=stages)) for stages in range(most, least - 1, -1))
    return next((fit for fit in plans if shared_bytes(fit) <= room or fit.tile.stages == least), plan)


def stream_matmul(
    x: jax.Array,
    weights: jax.Array,
    norm: tuple[jax.Array, float] | None,
    residual: jax.Array | None,
    swiglu: bool,
    features: int,
    tile: Tile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``api.stream_matmul``; the arguments are already checked. ``tile`` None: from the table."""
    (tokens, depth), rows = x.shape, weights.shape[0]
    if reason := unsupported(weights.dtype, tokens, depth, features):
        raise ValueError(f"stream_matmul cannot run as a Mosaic GPU kernel: {reason}")
    normed = norm is not None
    wanted = pick(tokens, rows, depth, normed) if tile is None else within(tile, depth, normed)
    plan = Plan(
        tokens=tokens,
        depth=depth,
        x_dtype=x.dtype,
        eps=float(norm[1]) if norm is not None else None,
        swiglu=swiglu,
        features=features,
        residual=None if residual is None else residual.dtype,
        tile=wanted,
    )
    plan = fitted(plan)
    check_shared_memory("stream_matmul", plan.tile, shared_bytes(plan), remedy="less depth")
    scale = norm[0].astype(jnp.float32) if norm is not None else None
    return _launch(x, weights, scale, residual, plan, interpret)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))  # lowered once for all layers
def _launch(
    x: jax.Array,
    weights: jax.Array,
    scale: jax.Array | None,
    residual: jax.Array | None,
    plan: Plan,
    interpret: bool,
) -> jax.Array:
    clusters: dict[str, Any] = {} if interpret else {"cluster": (plan.tile.split,), "cluster_names": ("part",)}
    inputs = [array for array in (x, weights, scale, residual) if array is not None]
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((plan.tokens, plan.features), plan.out_dtype),
        scratch_types=_scratch(plan),
        grid=(-(-plan.features // plan.columns),),
        grid_names=("block",),
        compiler_params=mosaic.params(),
        kernel_name="stream_matmul",
        interpret=plgpu.InterpretGPUParams() if interpret else None,  # pyrefly: ignore[missing-attribute]
        **clusters,
    )(*inputs)


def _scratch(plan: Plan) -> dict[str, Any]:
    """Shared memory of a program."""
    tile, padded = plan.tile, plan.padded
    stages, norm, residual = tile.stages, plan.eps is not None, plan.residual is not None
    parts = tile.split - 1
    return {
        "w_smem": mosaic.tiled((stages, BLOCK, tile.depth), SWIZZLE),
        "x_smem": plgpu.SMEM((stages, padded, tile.depth), plan.x_dtype)
        if plan.plain
        else mosaic.tiled((stages, padded, tile.depth), SWIZZLE),
        "moved_smem": mosaic.tiled((2, padded, tile.depth), SWIZZLE) if plan.plain else None,
        "scale_smem": plgpu.SMEM((stages, tile.depth), jnp.float32) if norm else None,
        "loaded": plgpu.Barrier(num_arrivals=2 + norm, num_barriers=stages),
        "square_smem": plgpu.SMEM((padded,), jnp.float32) if norm else None,
        "part_smem": _parts(parts, padded) if parts else None,
        "met": plgpu.Barrier(num_arrivals=parts) if parts else None,
        "y_smem": plgpu.SMEM((padded, BLOCK), jnp.float32),
        "h_smem": plgpu.SMEM((padded, BLOCK), plan.residual) if residual else None,
        "h_loaded": plgpu.Barrier() if residual else None,
        "o_smem": plgpu.SMEM((padded, plan.columns), plan.out_dtype) if plan.swiglu or residual else None,
    }


def _parts(parts: int, padded: int):
    """The sums of the other programs of a cluster."""
    swizzle = min(SWIZZLE, 4 * padded)
    transforms = (plgpu.TilingTransform((8, swizzle // 4)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((parts, BLOCK, padded), jnp.float32, transforms=transforms)


def _kernel(*refs, plan: Plan, interpret: bool, **smem) -> None:
    """``refs``: x [N, K], weights [P, K] bf16, scale [K] f32 and residual [N, M] if there are any, out [N, M]."""
    *inputs, o_ref = refs
    h_ref = inputs.pop() if plan.residual is not None else None
    block, parts = lax.axis_index("block"), plan.tile.split
    if parts == 1 or interpret:  # which stores into no other program's memory: one takes the parts in turn
        ys = [_stream(inputs, h_ref, block, part, plan, smem, interpret) for part in range(parts)]
        y = functools.reduce(jnp.add, ys)
        return _finish(y, h_ref, o_ref, block, plan, smem)

    part = lax.axis_index("part")
    y = _stream(inputs, h_ref, block, part, plan, smem, interpret)

    @pl.when(part > 0)
    def _():
        place: dict[str, Any] = {"cluster_idx": 0, "cluster_dim": "part", "optimized": False}
        plgpu.async_store_smem(y, smem["part_smem"].at[part - 1], smem["met"], **place)

    @pl.when(part == 0)
    def _():
        plgpu.barrier_wait(smem["met"])
        others = (mosaic.load(smem["part_smem"].at[i], plgpu.Layout.WGMMA) for i in range(parts - 1))
        _finish(functools.reduce(jnp.add, others, y), h_ref, o_ref, block, plan, smem)


def _stream(inputs: list, h_ref, block, part, plan: Plan, smem: dict[str, Any], interpret: bool) -> jax.Array:
    """The sums [64, N] f32 of a block over a part of the depth, normed. The first part asks for the residual."""
    x_ref, w_ref, *scale_ref = inputs
    steps, stages, depth = plan.steps, plan.tile.stages, plan.tile.depth
    rows, tokens = pl.ds(block * BLOCK, BLOCK), pl.ds(0, plan.tokens)

    def place(step) -> tuple[Any, Any, Any]:
        slot = lax.rem(step, stages)
        return slot, pl.ds((part * steps + step) * depth, depth), smem["loaded"].at[slot]

    def ask_weights(step) -> None:
        slot, columns, loaded = place(step)
        plgpu.copy_gmem_to_smem(w_ref.at[rows, columns], smem["w_smem"].at[slot], loaded)

    def ask_tokens(step) -> None:
        slot, columns, loaded = place(step)
        plgpu.copy_gmem_to_smem(x_ref.at[:, columns], smem["x_smem"].at[slot, tokens], loaded)
        for ref in scale_ref:
            plgpu.copy_gmem_to_smem(ref.at[columns], smem["scale_smem"].at[slot], loaded)

    for step in range(stages):
        ask_weights(step)
    # What the launch before this one wrote is read from here on, and nothing is written before.
    if plan.tile.overlap and not interpret:
        plgpu.griddepcontrol_wait()  # pyrefly: ignore[missing-attribute]
        plgpu.griddepcontrol_launch_dependents()  # pyrefly: ignore[missing-attribute]
    for step in range(stages):
        ask_tokens(step)
    if h_ref is not None:

        @pl.when((part == 0) & (block < plan.features // BLOCK))
        def _():
            own = pl.ds(block * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(h_ref.at[:, own], smem["h_smem"].at[tokens], smem["h_loaded"])

    def multiply(acc):
        def step(i, squares):
            slot, _, loaded = place(i)
            right = smem["moved_smem"].at[lax.rem(i, 2)] if plan.plain else smem["x_smem"].at[slot]
            plgpu.barrier_wait(loaded)
            if plan.prepares:
                squares = _prepare(slot, right, squares, plan, smem)
            plgpu.wgmma_wait(0)
            if plan.prepares:
                plgpu.commit_smem()
            else:
                mosaic.meet()
            plgpu.wgmma(acc, smem["w_smem"].at[slot], right.T)

            @pl.when((i > 0) & (i - 1 + stages < steps))  # all warps have met, so are done with the step before
            def _():
                ask_weights(i - 1 + stages)
                ask_tokens(i - 1 + stages)

            return squares

        squares = ()
        if plan.eps is not None:
            squares = plgpu.layout_cast(jnp.zeros((plan.padded, PIECE), jnp.float32), LINES)
        squares = lax.fori_loop(0, steps, step, squares)
        return acc[...], squares

    y, squares = pl.run_scoped(multiply, plgpu.ACC((BLOCK, plan.padded), jnp.float32))
    if plan.eps is None:
        return y
    smem["square_smem"][...] = jnp.sum(squares, axis=1)
    mosaic.meet()
    mean = mosaic.load(smem["square_smem"], plgpu.Layout.WGMMA.reduce(0)) * (1 / plan.depth)
    return y * lax.broadcast_in_dim(lax.rsqrt(mean + plan.eps), y.shape, (1,))


def _prepare(slot, right, squares, plan: Plan, smem: dict[str, Any]):
    """Put x of a step, times the scale, into ``right`` in bf16; adds its squares to ``squares``."""
    for start in range(0, plan.tile.depth, PIECE):
        piece = pl.ds(start, PIECE)
        x = mosaic.load(smem["x_smem"].at[slot, :, piece], LINES).astype(jnp.float32)
        if plan.eps is not None:
            scale = mosaic.load(smem["scale_smem"].at[slot, piece], LINES.reduce(0))
            squares = squares + x * x
            x = x * plgpu.layout_cast(lax.broadcast_in_dim(scale, x.shape, (1,)), LINES)
        right[:, piece] = x.astype(jnp.bfloat16)
    return squares


def _finish(y: jax.Array, h_ref, o_ref, block, plan: Plan, smem: dict[str, Any]) -> None:
    """From the sums [64, N] of a block to its columns of the output."""
    columns, (whole, rest) = plan.columns, divmod(plan.features, plan.columns)
    y_smem, o_smem = smem["y_smem"], smem["o_smem"]
    y_smem.T[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()

    @pl.when(block < whole)
    def _():
        def lines(start: int) -> jax.Array:  # [N, columns]
            layout = mosaic.pieces(2, columns, columns // 16)
            return mosaic.load(y_smem.at[:, pl.ds(start, columns)], layout)

        if o_smem is not None:
            h = None
            if h_ref is not None:
                plgpu.barrier_wait(smem["h_loaded"])
                h = mosaic.load(smem["h_smem"], LINES)
            o_smem[...] = _epilogue(lines, h, plan)
            plgpu.commit_smem()
        source = y_smem if o_smem is None else o_smem
        plgpu.copy_smem_to_gmem(source.at[pl.ds(0, plan.tokens)], o_ref.at[:, pl.ds(block * columns, columns)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    if not rest:
        return

    @pl.when(block == whole)  # a copy takes whole lines of shared memory
    def _():
        layout, own = mosaic.spread(rest), pl.ds(whole * columns, rest)

        def token(t, carry):
            h = None if h_ref is None else mosaic.load(h_ref.at[t, own], layout)
            o_ref[t, own] = _epilogue(lambda start: mosaic.load(y_smem.at[t, pl.ds(start, rest)], layout), h, plan)
            return carry

        lax.fori_loop(0, plan.tokens, token, ())


def _epilogue(sums: Callable[[int], jax.Array], residual: jax.Array | None, plan: Plan) -> jax.Array:
    """The output, of ``sums(start)`` from a column of the block on, and of the residual if there is one."""
    if plan.swiglu:
        y = jax.nn.silu(sums(0)) * sums(GROUP)
    else:
        y = sums(0) if residual is None else residual.astype(jnp.float32) + sums(0)
    return y.astype(plan.out_dtype)
