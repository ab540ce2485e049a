"""Weight-streaming products in one Pallas Mosaic GPU launch, for Hopper.

As many programs as the card has multiprocessors run all of the products, one after another. Two neighbours take blocks
of features, each half of the depth: rows of weights are what tensor cores take as their left operand, the tokens are
the right one. What a program reads of all products, in order, is one stream of steps through a ring in shared memory.
Of its three warpgroups one asks for weights, as soon as a slot is free, one for x, and one multiplies. So the ring
stays full: when the programs wait for each other between two products, the first weights of the next are on their way.

0. A norm of x by heads, if there is one: a block of it has 8 tokens of a head.
1. Weights and x come by TMA, x of a product only when the product before it is complete.
2. Norm: (x W^T) / rms(x), with the squares summed beside the products.
3. The second of two neighbours sends its sums into the shared memory of the first, which adds them.
4. The sums go through shared memory, which turns them: a token is a line of the output. SwiGLU has gate and up in one
   block.
5. A program that has written a block counts it as arrived; whoever needs the product waits for all of its blocks.

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
from kernels_pallas.stream_matmul.reference import GROUP, Ends, HeadNorm, Product

SWIZZLE = 128  # bytes
DEPTH = 256  # columns of weights of a step: fewer make more steps than a program can take at the memory's speed
DEEP_ROWS = 16  # with more of x, half as many, which leaves room for more slots; no sum changes
PARTS = 2  # of the depth: programs of a cluster, two because multiprocessors come in pairs
PIECE = SWIZZLE // 2  # columns of x whose squares are summed at a time
LINES = mosaic.pieces(2, PIECE, 4)  # a line over 16 lanes, whatever the number of tokens: sums in the same order
ROOM = 227 * 1024  # bytes of shared memory of a program
COMPILER = 4 * 1024  # bytes of it that the compiler sets aside for sums across warps, and barriers
COUNTERS = 8  # of a launch: its products and the norm before them, at most
GROUP_ROWS = 8  # tokens of a block of the norm by heads
BF16 = jnp.dtype(jnp.bfloat16)


def unsupported(
    rows: int, x: Any, products: Sequence[Product], residual: Any, heads: HeadNorm | None = None
) -> str | None:
    """Why this kernel cannot take these products of ``rows`` tokens, padding included, or None if it can."""
    if reason := mosaic.unsupported():
        return reason
    if rows > 64 or rows % 8:
        return f"there must be 8, 16, ... or 64 rows, got {rows}"
    if heads is not None and heads.size not in (64, 128, 256):
        return f"heads.size must be 64, 128 or 256, got {heads.size}"
    for name, array in (("x", x), ("residual", residual), *((f"products[{i}]", p[0]) for i, p in enumerate(products))):
        if array is not None and array.dtype != BF16:
            return f"{name} must be bfloat16, got {array.dtype}"
    if len(products) >= COUNTERS:
        return f"products must hold at most {COUNTERS - 1}, got {len(products)}"
    for i, product in enumerate(products):
        depth, width = product.weights.shape[1], product.width
        if depth % (PARTS * DEPTH):
            return f"products[{i}] must have a multiple of {PARTS * DEPTH} columns, got {depth}"
        if product.ends != "plain" and width % (GROUP if product.ends == "swiglu" else BLOCK):
            return f"products[{i}] must have a multiple of 64 features, of 32 for SwiGLU, got {width}"
        if width % 8:
            return f"products[{i}] must have a multiple of 8 features, got {width}"
    return None


def why_not(rows: int, x: Any, products: Sequence[Product], residual: Any, heads: HeadNorm | None = None) -> str | None:
    """Why this kernel cannot run these products here, or None if it can."""
    return mosaic.why_not() or unsupported(rows, x, products, residual, heads)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What is static of a norm by heads: ``count`` heads of ``size``; ``start`` of the gate, None without one."""

    size: int
    count: int
    start: int | None


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
    heads: Heads | None

    @property
    def step(self) -> int:
        """Columns of weights of a step; without a product, of none."""
        return self.stages[0].step if self.stages else PIECE

    @property
    def head_blocks(self) -> int:
        """Of the norm by heads."""
        return 0 if self.heads is None else self.heads.count * (self.rows // GROUP_ROWS)

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
    heads: HeadNorm | None = None,
) -> Plan:
    """The blocks of each product, dealt out to the pairs in turn; ``slots`` None: as many as fit."""
    stages: list[Stage] = []
    pairs = max(1, programs // PARTS)
    step = DEPTH if rows <= DEEP_ROWS else DEPTH // 2
    normed, dealt = None, 0
    if heads is not None:
        start = None if heads.gate is None else heads.start
        normed = Heads(size=heads.size, count=products[0].weights.shape[1] // heads.size, start=start)
        dealt = -(-normed.count * (rows // GROUP_ROWS) // PARTS)
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
    plan = Plan(stages=tuple(stages), tokens=tokens, rows=rows, eps=eps, pairs=pairs, slots=1, heads=normed)
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
    heads: HeadNorm | None = None,
    arrivals: tuple[Any, int] | None = None,
    programs: int | None = None,
    slots: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See ``api.stream_matmul``; the arguments are already checked. ``programs`` None: one a multiprocessor."""
    rows = x.shape[0] if residual is None else residual.shape[0]
    if reason := unsupported(rows, x, products, residual, heads):
        raise ValueError(f"stream_matmul cannot run as a Mosaic GPU kernel: {reason}")
    programs = programs or mosaic.multiprocessors()
    eps = 0.0 if eps is None else float(eps)  # None is for products without a norm
    if interpret:  # which runs one program after another, none of which could wait for the others
        return _one_by_one(x, products, residual, tokens, eps, heads, programs, slots)
    plan = make_plan(products, tokens, rows, eps, programs, slots, heads)
    weights, gate = tuple(product.weights for product in products), None if heads is None else heads.gate
    if len(products) == 1 and heads is None:
        return _launch(x, residual, gate, weights, None, None, plan, interpret)
    counters, launch = (no_arrivals(1), 0) if arrivals is None else arrivals
    # The row is data: as a constant it would make, and compile, another kernel for each launch.
    outs = _launch(x, residual, gate, weights, counters, jnp.full(1, launch, jnp.int32), plan, interpret)
    return outs[-len(products) :]


def _one_by_one(x, products, residual, tokens, eps, heads, programs, slots) -> tuple[jax.Array, ...]:
    """The stages of a launch, each in a launch of its own, with the blocks that it has among the others."""
    rows = x.shape[0] if residual is None else residual.shape[0]
    whole = make_plan(products, tokens, rows, eps, programs, slots, heads)
    if heads is not None:
        (x,) = _launch(x, None, heads.gate, (), None, None, replace(whole, stages=()), True)
    outs = []
    for product, stage in zip(products, whole.stages, strict=True):
        needed = residual if product.ends == "residual" else None
        plan = replace(whole, stages=(stage,), heads=None)
        (x,) = _launch(x, needed, None, (product.weights,), None, None, plan, True)
        residual = x if product.ends == "residual" else residual
        outs.append(x)
    return tuple(outs)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))  # lowered once for all layers
def _launch(
    x: jax.Array,
    residual: jax.Array | None,
    gate: jax.Array | None,
    weights: tuple[jax.Array, ...],
    arrivals: Any,
    launch: jax.Array | None,
    plan: Plan,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    inputs = {"x": x, "residual": residual, "gate": gate, "arrivals": arrivals, "launch": launch}
    inputs = {name: array for name, array in inputs.items() if array is not None}
    outs = tuple(
        jax.ShapeDtypeStruct((plan.tokens if stage.ends == "plain" else plan.rows, stage.width), stage.dtype)
        for stage in plan.stages
    )
    if plan.heads is not None:
        outs = (jax.ShapeDtypeStruct((plan.rows, plan.heads.count * plan.heads.size), BF16), *outs)
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
    tile = next(size for size in (32, 16, 8) if rows % size == 0)  # numbers of a swizzle
    transforms = (plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(4 * tile))
    ends = {stage.ends for stage in plan.stages}
    return {
        "w_smem": mosaic.tiled((slots, BLOCK, plan.step), SWIZZLE),
        "x_smem": mosaic.tiled((slots, rows, plan.step), SWIZZLE),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        "free": plgpu.Barrier(num_barriers=slots),
        "part_smem": plgpu.SMEM((1 + plan.normed, BLOCK, rows), jnp.float32, transforms=transforms),
        # A barrier each: of an index, jax 0.11 takes the place twice when it looks for the barrier of another program.
        "part_loaded": plgpu.Barrier(),
        "squares_loaded": plgpu.Barrier() if plan.normed else None,
        "part_taken": None if interpret else plgpu.ClusterBarrier(collective_axes=("part",)),
        "square_smem": plgpu.SMEM((rows,), jnp.float32) if plan.normed else None,
        "y_smem": plgpu.SMEM((rows, BLOCK), jnp.float32),
        "h_smem": plgpu.SMEM((rows, BLOCK), BF16) if "residual" in ends else None,
        "h_loaded": plgpu.Barrier() if "residual" in ends else None,
        "o_smem": plgpu.SMEM((rows, GROUP), BF16) if "swiglu" in ends else None,
        "head_smem": plgpu.SMEM((GROUP_ROWS, plan.heads.size), BF16) if plan.heads else None,
        "gate_smem": plgpu.SMEM((GROUP_ROWS, plan.heads.size), jnp.float32) if plan.heads else None,
        "head_loaded": plgpu.Barrier(num_arrivals=1 if plan.heads.start is None else 2) if plan.heads else None,
    }


def _kernel(*refs, plan: Plan, names: tuple[str, ...], interpret: bool, **smem) -> None:
    """``refs``: the inputs by ``names``, weights [P, K] bf16, outputs."""
    count = len(plan.stages)
    named, others = dict(zip(names, refs)), refs[len(names) :]
    weights, outs = others[:count], others[count:]
    before, outs = ((), outs) if plan.heads is None else (outs[:1], outs[1:])
    reads = (*(before or (named["x"],)), *outs)
    pair, pairs = lax.axis_index("pair"), plan.pairs
    loaded, free = smem["loaded"], smem["free"]

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
        """Of the blocks that have arrived: of the norm by heads, then of every stage."""
        return named["arrivals"].at[named["launch"][0], i]

    def place(i: int, part, start, k) -> tuple[Any, Any]:
        """The slot of a step and its columns of the depth."""
        return lax.rem(start + k, plan.slots), pl.ds((part * plan.stages[i].steps + k) * plan.step, plan.step)

    def ask_weights(i: int, block, part, start, k) -> None:
        slot, columns = place(i, part, start, k)
        piece = weights[i].at[pl.ds(block * BLOCK, BLOCK), columns]
        plgpu.copy_gmem_to_smem(piece, smem["w_smem"].at[slot], loaded.at[slot])

    def ask_tokens(i: int, part, start, k) -> None:
        slot, columns = place(i, part, start, k)
        plgpu.copy_gmem_to_smem(reads[i].at[:, columns], smem["x_smem"].at[slot], loaded.at[slot])

    def norm_heads(part) -> None:
        def block(turn) -> None:
            number = PARTS * (pair + turn * pairs) + part

            @pl.when(number < plan.head_blocks)
            def _():
                _norm_heads(number, plan, named["x"], named.get("gate"), before[0], smem)
                if count:
                    mosaic.arrive(counter(0))

        if before:
            repeat(-(-plan.head_blocks // (PARTS * pairs)), block)

    def finish(i: int, block, y, squares) -> None:
        _finish(_normed(y, squares, plan.stages[i], plan), block, plan.stages[i], plan, outs[i], smem)
        if i + 1 < count:
            mosaic.arrive(counter(i + 1))

    def ask_residual(i: int, block) -> None:
        earlier = [j for j in range(i) if plan.stages[j].ends == "residual"]
        h_ref = outs[earlier[-1]] if earlier else named.get("residual")
        if h_ref is not None and plan.stages[i].ends == "residual":
            here = h_ref.at[:, pl.ds(block * BLOCK, BLOCK)]
            plgpu.copy_gmem_to_smem(here, smem["h_smem"], smem["h_loaded"])

    if interpret:  # one warpgroup in the place of six
        for part in range(PARTS):
            norm_heads(part)
        for i, stage in enumerate(plan.stages):

            def all_of(block, start, i=i, stage=stage) -> None:
                ask_residual(i, block)
                sums = []
                for part in range(PARTS):

                    def ask(k, part=part) -> None:
                        ask_weights(i, block, part, start, k)
                        ask_tokens(i, part, start, k)

                    sums.append(_sums(stage, plan, start, ask, None, smem))
                finish(i, block, *_add(*sums))

            blocks(i, all_of)
        return

    part = lax.axis_index("part")

    arrived = smem["part_loaded"], smem["squares_loaded"]

    def received(n: int) -> jax.Array:
        plgpu.barrier_wait(arrived[n])
        return mosaic.load(smem["part_smem"].at[n], plgpu.Layout.WGMMA)

    def multiply(i: int, block, start) -> None:
        def begin(k) -> None:  # x of the first step is there, and so is what was made before it
            pl.when((k == 0) & (part == 0))(lambda: ask_residual(i, block))

        y, squares = _sums(plan.stages[i], plan, start, None, (begin, free), smem)

        @pl.when(part > 0)
        def _():
            pl.when(start > 0)(lambda: plgpu.barrier_wait(smem["part_taken"]))
            for n, numbers in enumerate((y, squares)):
                if numbers is not None:
                    to: dict[str, Any] = {"cluster_idx": 0, "cluster_dim": "part", "optimized": False}
                    plgpu.async_store_smem(numbers, smem["part_smem"].at[n], arrived[n], **to)
            plgpu.barrier_arrive(smem["part_taken"])

        @pl.when(part == 0)
        def _():
            other, other_squares = received(0), None if squares is None else received(1)
            mosaic.meet()
            plgpu.barrier_arrive(smem["part_taken"])
            finish(i, block, *_add((y, squares), (other, other_squares)))
            plgpu.barrier_wait(smem["part_taken"])

    def when_free(start, k, ask) -> None:
        number = start + k
        pl.when(number >= plan.slots)(lambda: plgpu.barrier_wait(free.at[lax.rem(number, plan.slots)]))
        ask()

    role = lax.axis_index("role")

    @pl.when(role == 0)
    def _():
        for i in range(count):
            blocks(i, lambda block, start, i=i: multiply(i, block, start))
        # The first program still arrives in the shared memory of the second, which must stay until then.
        pl.when((part > 0) & (starts[-1] > 0))(lambda: plgpu.barrier_wait(smem["part_taken"]))

    @pl.when(role == 1)
    def _():
        for i, stage in enumerate(plan.stages):

            def stream(block, start, i=i, stage=stage) -> None:
                repeat(stage.steps, lambda k: when_free(start, k, lambda: ask_weights(i, block, part, start, k)))

            blocks(i, stream)

    @pl.when(role == 2)
    def _():
        norm_heads(part)
        for i, stage in enumerate(plan.stages):
            needed = (plan.head_blocks, *(stage.blocks for stage in plan.stages))[i]
            if needed:
                pl.when(shares[i] > 0)(lambda i=i, needed=needed: mosaic.wait_for(counter(i), needed))

            def stream(block, start, i=i, stage=stage) -> None:
                repeat(stage.steps, lambda k: when_free(start, k, lambda: ask_tokens(i, part, start, k)))

            blocks(i, stream)


def _norm_heads(block, plan: Plan, x_ref, gate_ref, o_ref, smem: dict[str, Any]) -> None:
    """A block of the norm by heads: 8 tokens of a head, or as many as there are."""
    heads = plan.heads
    if heads is None:
        return
    group, head = lax.div(block, heads.count), lax.rem(block, heads.count)
    whole, rest = divmod(plan.tokens, GROUP_ROWS)

    def ask(tokens: int) -> None:
        here = pl.ds(group * GROUP_ROWS, tokens)
        copies = [(x_ref.at[here, pl.ds(head * heads.size, heads.size)], smem["head_smem"])]
        if heads.start is not None:
            copies.append((gate_ref.at[here, pl.ds(heads.start + head * heads.size, heads.size)], smem["gate_smem"]))
        for source, landing in copies:
            plgpu.copy_gmem_to_smem(source, landing.at[pl.ds(0, tokens)], smem["head_loaded"])

    @pl.when(group * GROUP_ROWS < plan.tokens)  # there may be rows of padding alone
    def _():
        if whole:
            pl.when(group < whole)(lambda: ask(GROUP_ROWS))
        if rest:
            pl.when(group == whole)(lambda: ask(rest))
        plgpu.barrier_wait(smem["head_loaded"])

    pieces = [pl.ds(start, PIECE) for start in range(0, heads.size, PIECE)]
    xs = [mosaic.load(smem["head_smem"].at[:, piece], LINES).astype(jnp.float32) for piece in pieces]
    squares = functools.reduce(jnp.add, (x * x for x in xs))
    scale = lax.rsqrt(jnp.sum(squares, axis=1) * (1 / heads.size) + plan.eps)
    scale = plgpu.layout_cast(lax.broadcast_in_dim(scale, squares.shape, (0,)), LINES)
    for piece, x in zip(pieces, xs, strict=True):
        x = x * scale
        if heads.start is not None:
            gate = mosaic.load(smem["gate_smem"].at[:, piece], LINES).astype(jnp.bfloat16).astype(jnp.float32)
            x = x * jax.nn.silu(gate)
        smem["head_smem"][:, piece] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    here = pl.ds(group * GROUP_ROWS, GROUP_ROWS), pl.ds(head * heads.size, heads.size)
    plgpu.copy_smem_to_gmem(smem["head_smem"], o_ref.at[here])
    plgpu.wait_smem_to_gmem(0)


Sums = tuple[jax.Array, jax.Array | None]


def _sums(stage: Stage, plan: Plan, start, ask, watch, smem: dict[str, Any]) -> Sums:
    """The sums [64, T] f32 over half the depth of a block, and of the squares of x, the same in all rows, if normed.

    ``start``: number of its first step. Either ``ask(k)`` asks for a step before the wait for it, or others do, and
    ``watch`` is a function ``begin(k)`` to call after the wait, and a barrier a slot for who waits to fill it again.
    """
    w_smem, x_smem = smem["w_smem"], smem["x_smem"]
    begin, free = watch or (None, None)

    def release(k) -> None:
        if free is not None:
            plgpu.barrier_arrive(free.at[lax.rem(start + k, plan.slots)])

    def multiply(acc):
        def step(k, squares):
            if ask is not None:
                ask(k)
            slot = lax.rem(start + k, plan.slots)
            plgpu.barrier_wait(smem["loaded"].at[slot])
            if begin is not None:
                begin(k)
            plgpu.wgmma(acc, w_smem.at[slot], x_smem.at[slot].T)
            if stage.normed:
                for column in range(0, stage.step, PIECE):
                    x = mosaic.load(x_smem.at[slot, :, pl.ds(column, PIECE)], LINES).astype(jnp.float32)
                    squares = squares + x * x
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
    if not stage.normed:
        return y, None
    smem["square_smem"][...] = jnp.sum(squares, axis=1)
    mosaic.meet()
    squares = mosaic.load(smem["square_smem"], plgpu.Layout.WGMMA.reduce(0))
    mosaic.meet()  # before the next block's
    return y, lax.broadcast_in_dim(squares, y.shape, (1,))


def _add(one: Sums, other: Sums) -> Sums:
    squares = None if one[1] is None or other[1] is None else one[1] + other[1]
    return one[0] + other[0], squares


def _normed(y: jax.Array, squares: jax.Array | None, stage: Stage, plan: Plan) -> jax.Array:
    return y if squares is None else y * lax.rsqrt(squares * (1 / stage.depth) + plan.eps)


def _finish(y: jax.Array, block, stage: Stage, plan: Plan, o_ref, smem: dict[str, Any]) -> None:
    """From the sums [64, T] of a block to its columns of the output, which are there when this ends."""
    columns, (whole, rest) = stage.columns, divmod(stage.width, stage.columns)
    tokens = o_ref.shape[0]
    y_smem = smem["y_smem"]
    # The residual's place takes the sum of both, number by number.
    o_smem = {"plain": None, "residual": smem["h_smem"], "swiglu": smem["o_smem"]}[stage.ends]
    y_smem.T[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()

    @pl.when(block < whole)
    def _():
        layout = mosaic.pieces(2, columns, columns // 16)
        if o_smem is not None:
            h = None
            if stage.ends == "residual":
                plgpu.barrier_wait(smem["h_loaded"])
                h = mosaic.load(smem["h_smem"], layout)
            o_smem[...] = _end(stage, lambda start: mosaic.load(y_smem.at[:, pl.ds(start, columns)], layout), h)
            plgpu.commit_smem()
        source = y_smem if o_smem is None else o_smem
        plgpu.copy_smem_to_gmem(source.at[pl.ds(0, tokens)], o_ref.at[:, pl.ds(block * columns, columns)])
        plgpu.wait_smem_to_gmem(0)

    if not rest:
        return

    @pl.when(block == whole)  # a copy takes whole lines of shared memory
    def _():
        layout, here = mosaic.spread(rest), pl.ds(whole * columns, rest)

        def token(t, carry):
            o_ref[t, here] = _end(stage, lambda start: mosaic.load(y_smem.at[t, pl.ds(start, rest)], layout), None)
            return carry

        lax.fori_loop(0, tokens, token, ())
        mosaic.meet()


def _end(stage: Stage, sums, residual: jax.Array | None) -> jax.Array:
    """The output, of ``sums(start)`` from a row of the block on, and of the residual if there is one."""
    if stage.ends == "swiglu":
        y = jax.nn.silu(sums(0)) * sums(GROUP)
    else:
        y = sums(0) if residual is None else residual.astype(jnp.float32) + sums(0)
    return y.astype(stage.dtype)
