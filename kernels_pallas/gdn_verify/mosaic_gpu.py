"""Verification in one Pallas Mosaic GPU launch, for Hopper.

A warpgroup takes one value head of one row and some columns of dv. Between the loads and the outputs everything stays
in shared memory and registers.

    u_t = X_t - sum_i M[t, i] u_i        o_t = X'_t + sum_i M'[t, i] u_i

K and Q lie one above the other, so each product with them is one chain of tensor-core instructions:

1. q, k and v come by TMA; the tile of the state and the gates straight into registers, all asked for at the start.
2. While they come, the path sums of the log decays; then [K; Q] K^T, which the decays turn into M and M'.
3. 64 rows of the state at a time are cut into two bf16 parts in shared memory; [K; Q] times all of them is summed in
   one accumulator, which gives X and X'.
4. Forward substitution: a thread owns a column of dv, and all read the same entry of M from shared memory. (Warps that
   have no column of their own repeat another's work: no value has to be handed over.)
5. M' U on the tensor cores, two bf16 parts each.

Bytes: S once; q, k, the gates and the ancestor bits once a program (from L2 but for the first); v, o and u once.

Numerics: two parts miss 2^-18 of a number of the state; the tests hold u to 4e-6 of its norm against float64. The
decay between two nodes is a difference of path sums whose coarse parts (multiples of ``decay.STEP``) are
exact. o carries as much as u of the drafted part, under the rounding to bf16.

Many heads (measured, H200): a program that takes a whole head, 64 columns at a time, makes M once for all of them and
issues half the instructions of four programs. The parts of the state pass through a ring of ``stages``, so that two
programs share a multiprocessor; more of them, with fewer columns each, were no faster.

Limits: see ``unsupported``. N is computed as the next of 16, 32, 64. Shared memory of the tensor cores comes in blocks
of 8 rows, so where N is no multiple of 8, q and k take a way round through plain shared memory.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.ancestors import ancestor_bits
from kernels_pallas.decay import STEP
from kernels_pallas.factors import Factors
from kernels_pallas.gdn_verify.tiles import MOSAIC
from kernels_pallas.implementations import no_gpu
from kernels_pallas.shapes import padded_nodes
from kernels_pallas.tiles import Tile, check_shared_memory, first

BLOCK = 64  # rows of one tensor-core instruction
PARTS = 2  # bf16 parts of a state: 16 bits and their sign, an error of 2^-18
SKEW = 8  # numbers between the rows of X, which puts the eight rows that a store writes into different banks
WIDEST = 64  # columns that are taken at a time
COMPILER = 5 * 1024  # bytes of shared memory for sums across warps and alignment, as seen in compiled kernels
DEPTH = 64  # rows of the state that are cut into parts at a time
ROWS = 32  # nodes of one straight line of forward substitution: more would outgrow the instruction cache


def unsupported(dk: int, dv: int, dtype, nodes: int) -> str | None:
    """Why this kernel cannot take such inputs, or None if it can."""
    if jax.__version_info__ < (0, 11):
        return f"the Mosaic GPU kernel needs jax 0.11 or newer, this is {jax.__version__}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"q, k and v must be bfloat16, got {jnp.dtype(dtype).name}"
    if dk not in (64, 128, 256) or dv not in (64, 128, 256):
        return f"dk and dv must be 64, 128 or 256, got {dk} and {dv}"
    if not 1 <= nodes <= 64:
        return f"N must be 1 to 64, got {nodes}"
    return None


def why_not(dk: int, dv: int, dtype, nodes: int) -> str | None:
    """Why this kernel cannot run here on such inputs, or None if it can."""
    if reason := no_gpu():
        return reason
    capability = str(jax.devices()[0].compute_capability)
    if capability != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0), this one has {capability}"
    return unsupported(dk, dv, dtype, nodes)


def gdn_verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    parents: jax.Array,
    num_nodes: jax.Array | None,
    scale: float,
    layer: int | None = None,
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Factors]:
    """See ``api.gdn_verify``; the arguments are already checked.

    Of ``tile`` the columns (16, 32, 64, 128 or 256) and the stages count. None: from the table.
    """
    rows, nodes, _, dk = q.shape
    value_heads, dv = v.shape[2:]
    reason = unsupported(dk, dv, v.dtype, nodes)
    if reason is not None:
        raise ValueError(f"gdn_verify cannot run as a Mosaic GPU kernel: {reason}")
    tile = (tile or first(MOSAIC, nodes=nodes, heads=rows * value_heads)).within(dk, dv)
    if tile.columns not in (16, 32, 64, 128, 256):
        raise ValueError(f"tile must have 16, 32, 64, 128 or 256 columns, got {tile.columns}")
    check_shared_memory("gdn_verify", tile, shared_bytes(tile, nodes, dk))
    # The layer is data: as a constant it would make, and compile, another kernel for each layer.
    states, index = (state[None], 0) if layer is None else (state, layer)
    index = jnp.full(1, index, jnp.int32)
    return _launch(index, states, q, k, v, log_decay, beta, parents, num_nodes, scale, tile, interpret)


def shared_bytes(tile: Tile, nodes: int, dk: int) -> int:
    """Shared memory of a program: what ``_scratch`` asks for, and what the compiler adds for sums."""
    block, columns = padded_nodes(nodes), min(tile.columns, WIDEST)
    stacked = max(2 * block, BLOCK) * (2 if nodes % 8 else 1)
    values = 2 * block * columns + BLOCK * (columns + _v_columns(columns, nodes))
    operands = 2 * (stacked * dk + tile.stages * DEPTH * PARTS * columns + values)
    plain = 4 * (BLOCK * (columns + SKEW) + BLOCK * block + block * columns + (ROWS * columns if block > ROWS else 0))
    return operands + plain + COMPILER


def _v_columns(columns: int, nodes: int) -> int:
    """Columns of v that a program copies: its own, or more, as a copy must be a multiple of 128 bytes."""
    return columns if columns * nodes % 64 == 0 else 64


@functools.partial(jax.jit, static_argnames=("scale", "tile", "interpret"))  # traced once for all layers
def _launch(
    layer: jax.Array,
    states: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    parents: jax.Array,
    num_nodes: jax.Array | None,
    scale: float,
    tile: Tile,
    interpret: bool,
) -> tuple[jax.Array, Factors]:
    rows, nodes, _, dk = q.shape
    value_heads, dv = v.shape[2:]
    block = padded_nodes(nodes)

    low, high = (jnp.pad(word, [(0, 0), (0, block - nodes)]) for word in ancestor_bits(parents, num_nodes))
    bits = jnp.tile(jnp.stack([low, high], axis=1), (1, 1, BLOCK // block))  # [B, 2, 64]

    fp32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    head = (rows, nodes, value_heads)
    o, u, total, total_low = plgpu.kernel(
        functools.partial(_kernel, scale=scale, block=block, steps=max(1, tile.columns // WIDEST)),
        out_type=(jax.ShapeDtypeStruct((*head, dv), v.dtype), fp32((*head, dv)), fp32(head), fp32(head)),
        scratch_types=_scratch(tile, nodes, dk, interpret),
        grid=(dv // tile.columns, value_heads, rows),
        grid_names=("columns", "head", "row"),
        compiler_params=_params(),
        kernel_name="gdn_verify",
        interpret=plgpu.InterpretGPUParams() if interpret else None,  # pyrefly: ignore[missing-attribute]
    )(layer, states, q, k, v, log_decay, beta, bits)
    if num_nodes is not None:
        k = jnp.where((jnp.arange(nodes) < num_nodes[:, None])[..., None, None], k, 0)
    return o, Factors(k, u, total, total_low)


def _params():
    """No barriers but those that the kernel asks for, and no layouts but those that it names.

    Inferring the layouts of all these scalars and vectors takes many times longer, for about as many instructions.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def _scratch(tile: Tile, nodes: int, dk: int, interpret: bool) -> dict:
    """Shared memory of a program. Tiled and swizzled: what the tensor cores read."""
    block, columns = padded_nodes(nodes), min(tile.columns, WIDEST)
    stacked = max(2 * block, BLOCK)  # rows of [K; Q]

    def operand(shape: tuple[int, ...], swizzle: int):
        transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    return {
        "kq_smem": operand((stacked, dk), 128),
        "plain_smem": plgpu.SMEM((stacked, dk), jnp.bfloat16) if nodes % 8 else None,
        "s_smem": operand((tile.stages, DEPTH, PARTS * columns), 32),
        "u_smem": operand((block, 2 * columns), 32),
        "v_smem": operand((BLOCK, columns), 2 * columns)
        if nodes % 8 == 0
        else plgpu.SMEM((BLOCK, _v_columns(columns, nodes)), jnp.bfloat16),
        "o_smem": plgpu.SMEM((BLOCK, columns), jnp.bfloat16),
        "x_smem": plgpu.SMEM((BLOCK, columns + SKEW), jnp.float32),
        "m_smem": plgpu.SMEM((BLOCK, block), jnp.float32),
        "rest_smem": plgpu.SMEM((ROWS, columns), jnp.float32) if block > ROWS else None,
        "value_smem": plgpu.SMEM((block, columns), jnp.float32),
        "gate_smem": plgpu.SMEM((2, block), jnp.float32),
        "sum_smem": plgpu.SMEM((2, BLOCK), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=2),
        "v_loaded": plgpu.Barrier(),
        "wide_copy": plgpu.SMEM((BLOCK, DEPTH), jnp.bfloat16) if interpret else None,
        "narrow_copy": plgpu.SMEM((BLOCK, block), jnp.bfloat16) if interpret else None,
    }


def _kernel(
    layer_ref,  # [1] i32
    s_ref,  # [L, B, HV, dk, dv] f32
    q_ref,  # [B, N, H, dk] bf16
    k_ref,  # [B, N, H, dk] bf16
    v_ref,  # [B, N, HV, dv] bf16
    g_ref,  # [B, N, HV] f32
    beta_ref,  # [B, N, HV] f32
    bits_ref,  # [B, 2, 64] i32, by row of [K; Q]
    o_ref,  # [B, N, HV, dv] bf16
    u_ref,  # [B, N, HV, dv] f32
    total_ref,  # [B, N, HV] f32
    low_ref,  # [B, N, HV] f32
    *,
    kq_smem,
    plain_smem,
    s_smem,
    u_smem,
    v_smem,
    o_smem,
    x_smem,
    m_smem,
    rest_smem,
    value_smem,
    gate_smem,
    sum_smem,
    loaded,
    v_loaded,
    wide_copy,
    narrow_copy,
    scale: float,
    block: int,
    steps: int,
):
    j, h, b = (lax.axis_index(name) for name in ("columns", "head", "row"))
    nodes, heads = q_ref.shape[1:3]
    (stacked, dk), columns, stages = kq_smem.shape, o_smem.shape[1], s_smem.shape[0]
    key_head = h // (v_ref.shape[2] // heads)
    wgmma_layout = plgpu.Layout.WGMMA
    by_row, by_column = wgmma_layout.reduce(1), wgmma_layout.reduce(0)

    # 1. All loads.
    landing = kq_smem if plain_smem is None else plain_smem
    for i, ref in enumerate((k_ref, q_ref)):
        plgpu.copy_gmem_to_smem(ref.at[b, :, key_head], landing.at[pl.ds(i * block, nodes)], loaded)
    layer = layer_ref[0]
    gates = [_by_node(ref.at[b, :, h], nodes) for ref in (g_ref, beta_ref)]
    words = [_load(bits_ref.at[b, w], by_row) for w in range(1 if block <= 32 else 2)]
    cuts = [pl.ds(start, DEPTH) for start in range(0, dk, DEPTH)]

    wide = v_smem.shape[1]
    v_start = 0 if wide == columns else j * columns % wide  # of the own columns among those of the copy

    def load(step) -> list[jax.Array]:
        """The state of the columns of a step, and their v on its way."""
        first = (j * steps + step) * columns
        plgpu.copy_gmem_to_smem(v_ref.at[b, :, h, pl.ds(first - v_start, wide)], v_smem.at[pl.ds(0, nodes)], v_loaded)
        return [_load(s_ref.at[layer, b, h, cut, pl.ds(first, columns)], _pieces(8, 16, 4)) for cut in cuts]

    early = load(0) if steps == 1 else None

    for i, gate in enumerate(gates):
        _put(gate_smem.at[i], gate)
    _meet()

    # 2. Path sums of the decays, by row, then by column as well. Row t is of node t modulo ``block``, so where [K; Q]
    # takes two instructions what is of a node holds for both.
    def across(vector: jax.Array, n: int = block) -> jax.Array:  # one number a row
        return lax.broadcast_in_dim(vector, (BLOCK, n), (0,))

    def by_node(smem, i: int) -> jax.Array:  # one number a column
        vector = _load(smem.at[i, pl.ds(0, block)], by_column)
        return lax.broadcast_in_dim(vector, (BLOCK, block), (1,))

    def iota(axis: int, n: int = block) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (BLOCK, n), axis, layout=wgmma_layout)

    def choose(m: int, n: int, query: jax.Array, key: jax.Array) -> jax.Array:
        """``query`` [64, n] in the rows of queries, ``key`` in those of keys, of the rows from ``m`` of [K; Q]."""
        if block < BLOCK:
            return jnp.where(iota(0, n) >= block, query, key)
        return query if m else key

    def row_sum(x: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(where, x, zero), axis=1)

    zero = jnp.zeros((BLOCK, block), jnp.float32)
    place = iota(1)
    itself = (iota(0) & (block - 1)) == place
    word = across(words[0]) if block <= 32 else jnp.where(place < 32, across(words[0]), across(words[1]))
    reach = ((word >> (place & 31)) & 1) != 0
    decays = by_node(gate_smem, 0)
    coarse = _round_to_step(decays)
    coarse_sum, fine_sum = row_sum(coarse, reach), row_sum(decays - coarse, reach)
    beta = row_sum(by_node(gate_smem, 1), itself)
    real = row_sum(zero + 1, itself & reach)
    sum_smem[0, :] = coarse_sum
    sum_smem[1, :] = fine_sum
    _meet()
    since = (across(coarse_sum) - by_node(sum_smem, 0)) + (across(fine_sum) - by_node(sum_smem, 1))
    decay = jnp.exp(jnp.where(reach, since, zero))

    @pl.when(j == 0)
    def _():
        first, second = (_by_node(sum_smem.at[part], nodes) for part in range(2))
        total = [x + y for x, y in zip(first, second, strict=True)]
        _put(total_ref.at[b, :, h], total)
        _put(low_ref.at[b, :, h], [(x - t) + y for x, t, y in zip(first, total, second, strict=True)])

    # [K; Q] K^T, then M and M'.
    plgpu.barrier_wait(loaded)
    row_blocks = range(0, stacked, BLOCK)
    if plain_smem is not None:
        for m, cut in itertools.product(row_blocks, cuts):
            kq_smem[pl.ds(m, BLOCK), cut] = _load(plain_smem.at[pl.ds(m, BLOCK), cut], wgmma_layout)
        plgpu.commit_smem()

    weights = []
    for m in row_blocks:
        similar = _product([kq_smem.at[pl.ds(m, BLOCK)]], kq_smem.at[pl.ds(0, block)].T)
        gain = choose(m, block, zero + scale, across(beta))
        weight = jnp.where(reach, gain * decay * similar, zero)
        weights.append(jnp.where(itself, choose(m, block, weight, zero), weight))  # u of a node does not enter itself
        if m < block:
            m_smem[...] = weights[-1]

    from_root = jnp.exp(coarse_sum + fine_sum)

    def take(step, s: list[jax.Array]) -> None:
        """All that is of the columns of one step."""
        own = pl.ds((j * steps + step) * columns, columns)
        surprises = []

        # 3. [K; Q] S, then X and X'.
        def project(*accs) -> list[jax.Array]:
            for i, cut in enumerate(cuts):
                if i >= stages:  # all warps are done with what the ring held
                    plgpu.wgmma_wait(PARTS * len(accs) * (stages - 1))
                    _meet()
                stage = s_smem.at[i % stages]
                for part, x in enumerate(_split(s[i], PARTS)):
                    stage[:, pl.ds(part * columns, columns)] = x
                plgpu.commit_smem()
                for m, acc in zip(row_blocks, accs, strict=True):
                    left = _operand(_load(kq_smem.at[pl.ds(m, BLOCK), cut], wgmma_layout, optimized=True), wide_copy)
                    for part in reversed(range(PARTS)):  # small numbers first
                        plgpu.wgmma(acc, left, stage.at[:, pl.ds(part * columns, columns)])
            return [acc[...] for acc in accs]

        accs = [plgpu.ACC((BLOCK, columns), jnp.float32) for _ in row_blocks]
        plgpu.barrier_wait(v_loaded)
        for m, product in zip(row_blocks, pl.run_scoped(project, *accs), strict=True):
            committed = across(from_root, columns) * product
            own_v = v_smem if wide == columns else v_smem.at[:, pl.ds(v_start, columns)]
            v = _load(own_v, wgmma_layout).astype(jnp.float32)
            x = choose(m, columns, scale * committed, across(beta, columns) * (v - committed))
            surprises.append(jnp.where(across(real, columns) != 0, x, jnp.zeros_like(x)))
            if m < block:
                x_smem[:, pl.ds(0, columns)] = surprises[-1]
        _meet()

        # 4. u. Nothing is stored where a slower warp may still read.
        u = _substitute([_vector(x_smem.at[:, pl.ds(0, columns)], t) for t in range(min(block, ROWS))], m_smem, 0)
        if block > ROWS:

            def reduce(t, carry):
                rest = _vector(x_smem.at[:, pl.ds(0, columns)], ROWS + t)
                for i in range(ROWS):
                    rest = rest - m_smem[ROWS + t, i] * u[i]
                rest_smem[t] = rest
                return carry

            lax.fori_loop(0, ROWS, reduce, 0)
            _meet()
            u += _substitute([_vector(rest_smem, t) for t in range(ROWS)], m_smem, ROWS)
        for t in range(block):
            value_smem[t] = u[t]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(value_smem.at[pl.ds(0, nodes)], u_ref.at[b, :, h, own])

        # 5. o, of the last rows of [K; Q]: those of queries.
        vector = min(4, block // 8)
        value = _load(value_smem, _pieces(2 * vector, 16, vector))
        for part, x in enumerate(_split(value, 2)):
            u_smem[:, pl.ds(part * columns, columns)] = x
        plgpu.commit_smem()
        drafted = _product((_operand(x, narrow_copy) for x in _split(weights[-1], 2)), u_smem)
        o = surprises[-1] + (drafted[:, columns:] + drafted[:, :columns])
        o_smem[...] = o.astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(block % BLOCK, nodes)], o_ref.at[b, :, h, own])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    if early is not None:
        take(0, early)
    else:  # other programs compute while this one loads: asking ahead measured slower

        @pl.loop(0, steps)
        def _(step):
            take(step, load(step))


def _load(ref, layout, optimized: bool = False) -> jax.Array:
    """What ``ref`` holds, spread over the threads; if ``optimized``, an error where banks would conflict."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyrefly: ignore[missing-argument]


def _by_node(ref, nodes: int) -> list[jax.Array]:
    """The first ``nodes`` numbers of ``ref``: a vector of as many as come in eights, then the others one by one."""
    whole = nodes // 8 * 8
    vector = [_load(ref.at[pl.ds(0, whole)], _spread(whole))] if whole else []
    return [*vector, *(ref[t] for t in range(whole, nodes))]


def _put(ref, numbers: list[jax.Array]) -> None:
    """Store what ``_by_node`` gave."""
    place = 0
    for x in numbers:
        ref[place if x.ndim == 0 else pl.ds(place, x.size)] = x
        place += x.size


def _vector(ref, t) -> jax.Array:
    return _load(ref.at[t], _spread(ref.shape[1]))


def _substitute(x: list[jax.Array], m_smem, start: int) -> list[jax.Array]:
    """The u of the nodes from ``start``; x is what all nodes before leave to do."""
    u = list(x)
    for t in range(len(u)):
        for i in range(t):
            u[t] = u[t] - m_smem[start + t, start + i] * u[i]
    return u


def _meet() -> None:
    """A barrier of the warpgroup, for what plain stores hand to plain loads.

    No copy is under way when it is called, so waiting for copies is nothing but the barrier behind it. Unlike
    ``commit_smem`` it does not wait for the loads of the state.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _product(lefts: Iterable[Any], right) -> jax.Array:
    """The sum of ``left @ right`` [64, n] in fp32 over the lefts; the right one is in shared memory."""

    def multiply(acc):
        for left in lefts:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((BLOCK, right.shape[1]), jnp.float32))


def _operand(left: jax.Array, copy_ref):
    """``left`` as tensor cores take it: from registers. The interpreter takes it from shared memory, ``copy_ref``."""
    if copy_ref is None:
        return left
    copy_ref[...] = left
    return copy_ref


def _split(x: jax.Array, parts: int) -> list[jax.Array]:
    """bf16 parts of fp32, largest first; two miss at most 2^-18 of x.

    By adding and cutting bits: a compiler may drop a conversion there and back as excess precision, never a mask.
    """
    found = []
    for _ in range(parts - 1):
        bits = (lax.bitcast_convert_type(x, jnp.int32) + jnp.int32(2**15)) & jnp.int32(-(2**16))
        head = lax.bitcast_convert_type(bits, jnp.float32)
        found.append(head.astype(jnp.bfloat16))
        x = x - head
    return [*found, x.astype(jnp.bfloat16)]


def _round_to_step(x: jax.Array) -> jax.Array:
    return lax.round(x * (1 / STEP), lax.RoundingMethod.TO_NEAREST_EVEN) * STEP


def _spread(size: int):
    """Layout of a vector: neighbouring lanes hold neighbours; where there are more threads than numbers, copies."""
    if size % 64 == 0:
        tiling = plgpu.Tiling(((64,), (32,), (1,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3, plgpu.Replicated(2)), lane_dims=(-2,), vector_dim=-1)
    lanes = next(n for n in (32, 16, 8) if size % n == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((lanes,), (1,))),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2,) if lanes == 32 else (-2, plgpu.Replicated(32 // lanes)),
        vector_dim=-1,
    )


def _pieces(rows: int, columns: int, vector: int):
    """Layout of a matrix: a warp holds pieces of ``rows`` x ``columns``, a thread ``vector`` neighbours of a row.

    16 columns are what a row of the tensor cores' tiles in shared memory holds where the swizzle is 32 bytes.
    """
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4 * rows, columns), (rows, columns), (vector,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
