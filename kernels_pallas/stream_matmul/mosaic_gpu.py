"""Weight-streaming products in one Pallas Mosaic GPU launch, for Hopper.

As many programs as the card has multiprocessors run all of the products, one after another. Two neighbours take blocks
of features, each half of the depth: rows of weights are what tensor cores take as their left operand, the tokens are
the right one. What a program reads of all products, in order, is one stream of steps through a ring in shared memory.
Of its three warpgroups one asks for weights, as soon as a slot is free, one for x, and one multiplies. So the ring
stays full: when the programs wait for each other between two products, the first weights of the next are on their way.

1. Weights and x come by TMA, x of a product only when the product before it is complete.
2. Norm: (x W^T) / rms(x), with the squares summed beside the products.
3. Either of two neighbours puts its sums into its shared memory, turned: a token is a line, as in the output. The first
   one reads both, adds them and finishes the block. SwiGLU has gate and up in one block.
4. A program that has written a block counts it as arrived; whoever needs the product waits for all of its blocks.

Bytes: the weights once; x once a block, from L2 but for the first.

Numerics: bf16 products, fp32 sums in the order of the depth, of either half. Neither depends on the number of tokens,
nor on time: a token gets the same bits in every run and beside any others.

Limits: see ``unsupported``. All programs must run at the same time, one a multiprocessor: this is no kernel for a card
that other processes share with it (MPS), where it could wait forever.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.mosaic import BLOCK
from kernels_pallas.stream_matmul.reference import GROUP, Ends, Product

SWIZZLE = 128  # bytes
DEPTH = 256  # columns of weights of a step: fewer make more steps than a program can take at the memory's speed
DEEP_ROWS = 16  # with more of x, half as many, which leaves room for more slots; no sum changes
AHEAD = 64 * 1024  # bytes of weights that a program has asked for and not got: more make whatever else it asks for late
PARTS = 2  # of the depth: programs of a cluster, two because multiprocessors come in pairs
PIECE = SWIZZLE // 2  # columns of x whose squares are summed at a time
LINES = mosaic.pieces(2, PIECE, 4)  # a line over 16 lanes, whatever the number of tokens: sums in the same order
ROOM = 227 * 1024  # bytes of shared memory of a program
COMPILER = 4 * 1024  # bytes of it that the compiler sets aside for sums across warps, and barriers
COUNTERS = 8  # of a launch: its products, at most
BF16 = jnp.dtype(jnp.bfloat16)


def unsupported(rows: int, x: Any, products: Sequence[Product], residual: Any) -> str | None:
    """Why this kernel cannot take these products of ``rows`` tokens, padding included, or None if it can."""
    if reason := mosaic.unsupported():
        return reason
    if rows > 64 or rows % 8:
        return f"there must be 8, 16, ... or 64 rows, got {rows}"
    for name, array in (("x", x), ("residual", residual), *((f"products[{i}]", p[0]) for i, p in enumerate(products))):
        if array is not None and array.dtype != BF16:
            return f"{name} must be bfloat16, got {array.dtype}"
    if len(products) > COUNTERS:
        return f"products must hold at most {COUNTERS}, got {len(products)}"
    for i, product in enumerate(products):
        depth, width = product.weights.shape[1], product.width
        if depth % (PARTS * DEPTH):
            return f"products[{i}] must have a multiple of {PARTS * DEPTH} columns, got {depth}"
        if product.ends != "plain" and width % (GROUP if product.ends == "swiglu" else BLOCK):
            return f"products[{i}] must have a multiple of 64 features, of 32 for SwiGLU, got {width}"
        if width % 8:
            return f"products[{i}] must have a multiple of 8 features, got {width}"
    return None


def why_not(rows: int, x: Any, products: Sequence[Product], residual: Any) -> str | None:
    """Why this kernel cannot run these products here, or None if it can."""
    return mosaic.why_not() or unsupported(rows, x, products, residual)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is static of a product.

    Attributes:
        blocks: of 64 rows of weights, for the features that there are.
        first: the pair of programs that takes the first one.
        step: columns of weights of a step.
    """

    depth: int
    width: int
    ends: Ends
    normed: bool
    blocks: int
    first: int
    step: int

    @property
    def columns(self) -> int:
        """Of the output, a block."""
        return GROUP if self.ends == "swiglu" else BLOCK

    @property
    def steps(self) -> int:
        """Of a block, for either program."""
        return self.depth // (PARTS * self.step)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.float32) if self.ends == "plain" else BF16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a launch is made for: N tokens in T rows; ``slots`` of the ring, ``pairs`` of programs."""

    stages: tuple[Stage, ...]
    tokens: int
    rows: int
    eps: float
    pairs: int
    slots: int

    @property
    def step(self) -> int:
        """Columns of weights of a step."""
        return self.stages[0].step

    @property
    def ahead(self) -> int:
        """Steps of weights that may be on their way."""
        return min(self.slots, AHEAD // (2 * BLOCK * self.step))

    def rounds(self, stage: Stage) -> int:
        """Blocks of a pair at most."""
        return -(-stage.blocks // self.pairs)

    @property
    def normed(self) -> bool:
        return any(stage.normed for stage in self.stages)


def no_arrivals(launches: int) -> Any:
    """Counters for that many launches of several products: a reference of int32 zeros, a row each."""
    return jax.new_ref(jnp.zeros((launches, COUNTERS), jnp.int32))


def make_plan(
    products: Sequence[Product],
    tokens: int,
    rows: int,
    eps: float,
    programs: int,
    slots: int | None = None,
) -> Plan:
    """The blocks of each product, dealt out to the pairs in turn; ``slots`` None: as many as fit.

    Raises ValueError for a single slot where a block has several steps: a slot is free only when the next is full.
    """
    stages: list[Stage] = []
    pairs = max(1, programs // PARTS)
    step = DEPTH if rows <= DEEP_ROWS else DEPTH // 2
    dealt = 0
    for product in products:
        blocks = -(-product.width // (GROUP if product.ends == "swiglu" else BLOCK))
        stage = Stage(
            depth=product.weights.shape[1],
            width=product.width,
            ends=product.ends,
            normed=product.normed,
            blocks=blocks,
            first=dealt % pairs,
            step=step,
        )
        stages.append(stage)
        dealt += blocks
    if slots == 1 and any(stage.steps > 1 for stage in stages):
        raise ValueError("slots must be 2 or more for blocks of several steps, got 1")
    plan = Plan(stages=tuple(stages), tokens=tokens, rows=rows, eps=eps, pairs=pairs, slots=1)
    steps = sum(stage.steps * plan.rounds(stage) for stage in stages)
    most = min(slots or steps, steps, ROOM // (2 * step * (BLOCK + rows)))
    return next(fit for n in range(most, 0, -1) if shared_bytes(fit := replace(plan, slots=n)) <= ROOM or n == 1)


def shared_bytes(plan: Plan) -> int:
    """Shared memory of a program: what ``_scratch`` asks for in whole KB, and what the compiler adds."""
    barriers = plgpu.Barrier, plgpu.ClusterBarrier
    arrays = [ref for ref in _scratch(plan, False).values() if ref is not None and not isinstance(ref, barriers)]
    sizes = (math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in arrays)
    return sum(-(-size // 1024) * 1024 for size in sizes) + COMPILER


def stream_matmul(
    x: jax.Array,
    products: Sequence[Product],
    residual: jax.Array | None,
    tokens: int,
    eps: float | None,
    arrivals: tuple[Any, int] | None = None,
    programs: int | None = None,
    slots: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See ``api.stream_matmul``; the arguments are already checked. ``programs`` None: one a multiprocessor."""
    if reason := unsupported(x.shape[0], x, products, residual):
        raise ValueError(f"stream_matmul cannot run as a Mosaic GPU kernel: {reason}")
    eps = 0.0 if eps is None else float(eps)  # None is for products without a norm
    plan = make_plan(products, tokens, x.shape[0], eps, programs or mosaic.multiprocessors(), slots)
    if interpret:  # which runs one program after another, none of which could wait for the others
        return _one_by_one(x, products, residual, plan)
    weights = tuple(product.weights for product in products)
    if len(products) == 1:
        return _launch(x, residual, weights, None, None, plan, interpret)
    counters, launch = (no_arrivals(1), 0) if arrivals is None else arrivals
    # The row is data: as a constant it would make, and compile, another kernel for each launch.
    return _launch(x, residual, weights, counters, jnp.full(1, launch, jnp.int32), plan, interpret)


def _one_by_one(x, products, residual, whole: Plan) -> tuple[jax.Array, ...]:
    """The products of a launch, each in a launch of its own, with the blocks that it has among the others."""
    outs = []
    for product, stage in zip(products, whole.stages, strict=True):
        needed = residual if product.ends == "residual" else None
        (x,) = _launch(x, needed, (product.weights,), None, None, replace(whole, stages=(stage,)), True)
        residual = x if product.ends == "residual" else residual
        outs.append(x)
    return tuple(outs)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))  # lowered once for all layers
def _launch(
    x: jax.Array,
    residual: jax.Array | None,
    weights: tuple[jax.Array, ...],
    arrivals: Any,
    launch: jax.Array | None,
    plan: Plan,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    inputs = {"x": x, "residual": residual, "arrivals": arrivals, "launch": launch}
    inputs = {name: array for name, array in inputs.items() if array is not None}
    outs = tuple(
        jax.ShapeDtypeStruct((plan.tokens if stage.ends == "plain" else plan.rows, stage.width), stage.dtype)
        for stage in plan.stages
    )
    roles: dict[str, Any] = {"num_threads": 3, "thread_name": "role", "cluster": (PARTS,), "cluster_names": ("part",)}
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan, names=tuple(inputs), interpret=interpret),
        out_type=outs,
        scratch_types=_scratch(plan, interpret),
        grid=(plan.pairs,),
        grid_names=("pair",),
        compiler_params=mosaic.params(),
        kernel_name="stream_matmul",
        interpret=plgpu.InterpretGPUParams() if interpret else None,  # pyrefly: ignore[missing-attribute]
        **({} if interpret else roles),
    )(*inputs.values(), *weights)


def _scratch(plan: Plan, interpret: bool) -> dict[str, Any]:
    """Shared memory of a program."""
    slots, rows = plan.slots, plan.rows
    ends = {stage.ends for stage in plan.stages}
    pair = None if interpret else plgpu.ClusterBarrier(collective_axes=("part",))
    return {
        "w_smem": mosaic.tiled((slots, BLOCK, plan.step), SWIZZLE),
        "x_smem": mosaic.tiled((slots, rows, plan.step), SWIZZLE),
        "w_loaded": plgpu.Barrier(num_barriers=slots),
        "x_loaded": plgpu.Barrier(num_barriers=slots),
        "free": plgpu.Barrier(num_barriers=slots),
        "y_smem": plgpu.SMEM((rows, BLOCK), jnp.float32),
        "square_smem": plgpu.SMEM((rows,), jnp.float32) if plan.normed else None,
        "scale_smem": plgpu.SMEM((rows,), jnp.float32) if plan.normed else None,
        "there": pair,
        "taken": pair,
        "h_smem": plgpu.SMEM((rows, BLOCK), BF16) if "residual" in ends else None,
        "h_loaded": plgpu.Barrier() if "residual" in ends else None,
    }


def _kernel(*refs, plan: Plan, names: tuple[str, ...], interpret: bool, **smem) -> None:
    """``refs``: the inputs by ``names``, weights [P, K] bf16, outputs."""
    count = len(plan.stages)
    named, others = dict(zip(names, refs)), refs[len(names) :]
    weights, outs = others[:count], others[count:]
    reads = (named["x"], *outs)
    pair, pairs = lax.axis_index("pair"), plan.pairs
    free = smem["free"]
    launch = named["launch"][0] if "launch" in named else None  # once: it would be read before every count

    # The pair's own blocks of each stage: own, own + pairs, ... Its steps count through all stages.
    own = [lax.rem(pair + (pairs - stage.first), pairs) for stage in plan.stages]
    shares = [lax.div(s.blocks + (pairs - 1) - mine, pairs) for s, mine in zip(plan.stages, own, strict=True)]
    starts = [jnp.int32(0)]
    for stage, share in zip(plan.stages, shares, strict=True):
        starts.append(starts[-1] + share * stage.steps)

    def repeat(times: int, body) -> None:
        lax.fori_loop(0, times, lambda i, carry: (body(i), carry)[1], ())

    def blocks(i: int, body) -> None:
        """``body(block, number of its first step)`` for the own ones of a stage."""
        stage = plan.stages[i]

        def turn(t) -> None:
            block = own[i] + t * pairs
            pl.when(block < stage.blocks)(lambda: body(block, starts[i] + t * stage.steps))

        repeat(plan.rounds(stage), turn)

    def counter(i: int):
        """Of the blocks of a stage that have arrived."""
        return named["arrivals"].at[launch, i]

    def place(i: int, part, start, k) -> tuple[Any, Any]:
        """The slot of a step and its columns of the depth."""
        return lax.rem(start + k, plan.slots), pl.ds((part * plan.stages[i].steps + k) * plan.step, plan.step)

    def ask_weights(i: int, block, part, start, k) -> None:
        slot, columns = place(i, part, start, k)
        piece = weights[i].at[pl.ds(block * BLOCK, BLOCK), columns]
        plgpu.copy_gmem_to_smem(piece, smem["w_smem"].at[slot], smem["w_loaded"].at[slot])

    def ask_tokens(i: int, part, start, k) -> None:
        slot, columns = place(i, part, start, k)
        plgpu.copy_gmem_to_smem(reads[i].at[:, columns], smem["x_smem"].at[slot], smem["x_loaded"].at[slot])

    def ask_residual(i: int, block) -> None:
        earlier = [j for j in range(i) if plan.stages[j].ends == "residual"]
        h_ref = outs[earlier[-1]] if earlier else named.get("residual")
        if h_ref is not None and plan.stages[i].ends == "residual":
            here = h_ref.at[:, pl.ds(block * BLOCK, BLOCK)]
            plgpu.copy_gmem_to_smem(here, smem["h_smem"], smem["h_loaded"])

    if interpret:  # one warpgroup in the place of six
        for i, stage in enumerate(plan.stages):

            def all_of(block, start, i=i, stage=stage) -> None:
                ask_residual(i, block)
                sums = []
                for part in range(PARTS):

                    def ask(k, part=part) -> None:
                        ask_weights(i, block, part, start, k)
                        ask_tokens(i, part, start, k)

                    sums.append(_sums(stage, plan, start, start == starts[i], ask, None, smem))
                (y, squares), (other, others) = sums
                _put(y + other, None if squares is None or others is None else squares + others, smem)
                _finish(block, start == starts[i], stage, plan, outs[i], smem, [mosaic.load], lambda: None)

            blocks(i, all_of)
        return

    part = lax.axis_index("part")
    readers = [mosaic.load, functools.partial(mosaic.load_of, axis=0, program=1)]

    def multiply(i: int, block, start) -> None:
        def begin(k) -> None:  # x of the first step is there, and so is what was made before it
            pl.when((k == 0) & (part == 0))(lambda: ask_residual(i, block))

        first = start == starts[i]  # of this stage, whose x has the same squares for all blocks
        sums = _sums(plan.stages[i], plan, start, first, None, (begin, free), smem)
        pl.when(start > 0)(lambda: plgpu.barrier_wait(smem["taken"]))
        _put(*sums, smem)
        plgpu.barrier_arrive(smem["there"])
        plgpu.barrier_wait(smem["there"])

        def taken() -> None:
            plgpu.barrier_arrive(smem["taken"])

        @pl.when(part == 0)
        def _():
            _finish(block, first, plan.stages[i], plan, outs[i], smem, readers, taken)
            if i + 1 < count:
                mosaic.arrive(counter(i))

        pl.when(part > 0)(taken)

    def when_free(start, k, ask) -> None:
        number = start + k
        pl.when(number >= plan.slots)(lambda: plgpu.barrier_wait(free.at[lax.rem(number, plan.slots)]))
        ask()

    role = lax.axis_index("role")

    @pl.when(role == 0)
    def _():
        for i in range(count):
            blocks(i, lambda block, start, i=i: multiply(i, block, start))
        # What the first program still reads is in the shared memory of the second, which must stay until then.
        pl.when(starts[-1] > 0)(lambda: plgpu.barrier_wait(smem["taken"]))

    @pl.when(role == 1)
    def _():
        for i, stage in enumerate(plan.stages):

            def stream(block, start, i=i, stage=stage) -> None:
                def ask(k) -> None:
                    when_free(start, k, lambda: ask_weights(i, block, part, start, k))
                    earlier = start + k + (1 - plan.ahead)
                    pl.when(earlier >= 0)(lambda: plgpu.barrier_wait(smem["w_loaded"].at[lax.rem(earlier, plan.slots)]))

                repeat(stage.steps, ask)

            blocks(i, stream)

    @pl.when(role == 2)
    def _():
        for i, stage in enumerate(plan.stages):
            if i:
                needed = plan.stages[i - 1].blocks
                pl.when(shares[i] > 0)(lambda i=i, needed=needed: mosaic.wait_for(counter(i - 1), needed))

            def stream(block, start, i=i, stage=stage) -> None:
                repeat(stage.steps, lambda k: when_free(start, k, lambda: ask_tokens(i, part, start, k)))

            blocks(i, stream)


def _sums(
    stage: Stage, plan: Plan, start, first, ask, watch, smem: dict[str, Any]
) -> tuple[jax.Array, jax.Array | None]:
    """The sums [64, T] f32 over half the depth of a block, and those of the squares of x [T] if it is normed.

    The squares are zeros but for the ``first`` block.

    ``start``: number of its first step. Either ``ask(k)`` asks for a step before the wait for it, or others do, and
    ``watch`` is a function ``begin(k)`` to call after the wait, and a barrier a slot for who waits to fill it again.
    """
    w_smem, x_smem = smem["w_smem"], smem["x_smem"]
    begin, free = watch or (None, None)

    def release(k) -> None:
        if free is not None:
            plgpu.barrier_arrive(free.at[lax.rem(start + k, plan.slots)])

    def add_squares(slot, squares: jax.Array) -> jax.Array:
        for column in range(0, stage.step, PIECE):
            x = mosaic.load(x_smem.at[slot, :, pl.ds(column, PIECE)], LINES).astype(jnp.float32)
            squares = squares + x * x
        return squares

    def multiply(acc):
        def step(k, squares):
            if ask is not None:
                ask(k)
            slot = lax.rem(start + k, plan.slots)
            plgpu.barrier_wait(smem["w_loaded"].at[slot])
            plgpu.barrier_wait(smem["x_loaded"].at[slot])
            if begin is not None:
                begin(k)
            plgpu.wgmma(acc, w_smem.at[slot], x_smem.at[slot].T)
            if stage.normed:
                squares = lax.cond(first, lambda sums: add_squares(slot, sums), lambda sums: sums, squares)
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: release(k - 1))
            return squares

        squares = ()
        if stage.normed:
            squares = plgpu.layout_cast(jnp.zeros((plan.rows, PIECE), jnp.float32), LINES)
        squares = lax.fori_loop(0, stage.steps, step, squares)
        return acc[...], squares

    y, squares = pl.run_scoped(multiply, plgpu.ACC((BLOCK, plan.rows), jnp.float32))
    release(stage.steps - 1)
    return y, jnp.sum(squares, axis=1) if stage.normed else None


def _put(y: jax.Array, squares: jax.Array | None, smem: dict[str, Any]) -> None:
    """The sums into shared memory, where ``_finish`` finds them."""
    smem["y_smem"].T[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
    if squares is not None:
        smem["square_smem"][...] = squares
    plgpu.commit_smem()


def _finish(block, first, stage: Stage, plan: Plan, o_ref, smem: dict[str, Any], readers, taken) -> None:
    """From what the programs have put to a block's columns of the output, which are there when this ends.

    ``readers``: of shared memory, one a program, the own one first, called like ``mosaic.load``. ``taken()`` is called
    when all is read.
    """
    columns, tokens = stage.columns, o_ref.shape[0]
    layout, shape = mosaic.pieces(2, columns, columns // 16), (plan.rows, columns)
    y_smem, scale_smem = smem["y_smem"], smem["scale_smem"]
    here = o_ref.at[:, pl.ds(block * columns, columns)]

    def read(ref, layout) -> jax.Array:
        return functools.reduce(jnp.add, [reader(ref, layout) for reader in readers])

    def make_scale() -> None:
        squares = read(smem["square_smem"], mosaic.spread(plan.rows))
        scale_smem[...] = lax.rsqrt(squares * (1 / stage.depth) + plan.eps)
        mosaic.meet()

    def sums(start: int) -> jax.Array:
        """From a row of the block on."""
        y = read(y_smem.at[:, pl.ds(start, columns)], layout)
        if not stage.normed:
            return y
        scale = mosaic.load(scale_smem, layout.reduce(1))
        return y * plgpu.layout_cast(lax.broadcast_in_dim(scale, shape, (0,)), layout)

    if stage.normed:
        pl.when(first)(make_scale)
    if stage.ends == "swiglu":
        y = jax.nn.silu(sums(0)) * sums(GROUP)
    else:
        y = sums(0)
    if stage.ends == "residual":
        plgpu.barrier_wait(smem["h_loaded"])
        y = mosaic.load(smem["h_smem"], layout).astype(jnp.float32) + y
    plain = stage.ends == "plain"
    (y_smem if plain else here)[...] = y.astype(
        stage.dtype
    )  # stores are there sooner, but others wait for no plain one
    plgpu.commit_smem()
    taken()
    if plain:  # a copy leaves out what of the last block is beyond the features
        plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(0, tokens)], here)
        plgpu.wait_smem_to_gmem(0)
