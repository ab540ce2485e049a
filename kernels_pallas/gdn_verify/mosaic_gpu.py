"""Verification in one Pallas Mosaic GPU launch, for Hopper.

A warpgroup takes one value head of one row and some columns of dv. Between the loads and the outputs everything stays
in shared memory and registers.

    u_t = X_t - sum_i M[t, i] u_i        o_t = X'_t + sum_i M'[t, i] u_i

1. q, k and v come by TMA; the state and the gates straight into registers, asked for at the start.
2. While they come, the path sums of the log decays; then [K; Q] K^T, K and Q one above the other, which the decays turn
   into M and M'.
3. [K; Q] S in bf16 parts on the tensor cores, X, u and o, in one of two ways:

   - few heads, ``narrow.py``: 16 or 32 columns a program, so that a card is full of programs;
   - many heads, ``wide.py``: 64 columns or more, the state on its side, and no more instructions than it takes to cut
     it into parts.

Bytes: S once; q, k, the gates and the ancestor bits once a program (from L2 but for the first); v, o and u once.

Numerics: two bf16 parts miss 2^-16 of a number of the state; the tests hold u to 4e-6 of its norm against float64. The
decay between two nodes is a difference of path sums whose coarse parts (multiples of ``decay.STEP``) are exact. o
carries as much as u of the drafted part, under the rounding to bf16.

Limits: see ``unsupported``. N is computed as the next of 16, 32, 64. Shared memory of the tensor cores comes in blocks
of 8 rows, so where N is no multiple of 8, q and k take a way round through plain shared memory.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.ancestors import ancestor_bits
from kernels_pallas.decay import STEP
from kernels_pallas.factors import Factors
from kernels_pallas.gdn_verify import narrow, wide
from kernels_pallas.gdn_verify.substitution import SKEW
from kernels_pallas.gdn_verify.tiles import MOSAIC
from kernels_pallas.mosaic import BLOCK
from kernels_pallas.shapes import padded_nodes
from kernels_pallas.tiles import Tile, check_shared_memory, first

COMPILER = 5 * 1024  # bytes of shared memory for sums across warps and alignment, as seen in compiled kernels


def unsupported(dk: int, dv: int, dtype, nodes: int) -> str | None:
    """Why this kernel cannot take such inputs, or None if it can."""
    if reason := mosaic.unsupported():
        return reason
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"q, k and v must be bfloat16, got {jnp.dtype(dtype).name}"
    if dk not in (64, 128, 256) or dv not in (64, 128, 256):
        return f"dk and dv must be 64, 128 or 256, got {dk} and {dv}"
    if not 1 <= nodes <= 64:
        return f"N must be 1 to 64, got {nodes}"
    return None


def why_not(dk: int, dv: int, dtype, nodes: int) -> str | None:
    """Why this kernel cannot run here on such inputs, or None if it can."""
    return mosaic.why_not() or unsupported(dk, dv, dtype, nodes)


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


def _way(tile: Tile):
    """The module of the columns: ``SWIZZLE``, ``shared_bytes``, ``scratch``, ``ask`` and ``take``."""
    return narrow if tile.columns < BLOCK else wide


def shared_bytes(tile: Tile, nodes: int, dk: int) -> int:
    """Shared memory of a program: what is asked for, and what the compiler adds for sums."""
    block = padded_nodes(nodes)
    stacked = max(2 * block, BLOCK) * (2 if nodes % 8 else 1)
    return 2 * stacked * dk + 4 * BLOCK * (block + SKEW) + _way(tile).shared_bytes(tile, nodes) + COMPILER


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
        functools.partial(_kernel, way=_way(tile), tile=tile, scale=scale, block=block),
        out_type=(jax.ShapeDtypeStruct((*head, dv), v.dtype), fp32((*head, dv)), fp32(head), fp32(head)),
        scratch_types=_scratch(tile, nodes, dk, interpret),
        grid=(dv // tile.columns, value_heads, rows),
        grid_names=("columns", "head", "row"),
        compiler_params=mosaic.params(),
        kernel_name="gdn_verify",
        interpret=plgpu.InterpretGPUParams() if interpret else None,  # pyrefly: ignore[missing-attribute]
    )(layer, states, q, k, v, log_decay, beta, bits)
    if num_nodes is not None:
        k = jnp.where((jnp.arange(nodes) < num_nodes[:, None])[..., None, None], k, 0)
    return o, Factors(k, u, total, total_low)


def _scratch(tile: Tile, nodes: int, dk: int, interpret: bool) -> dict[str, Any]:
    """Shared memory of a program."""
    block, way = padded_nodes(nodes), _way(tile)
    stacked = max(2 * block, BLOCK)  # rows of [K; Q]
    return {
        "kq_smem": mosaic.tiled((stacked, dk), way.SWIZZLE),
        "plain_smem": plgpu.SMEM((stacked, dk), jnp.bfloat16) if nodes % 8 else None,
        "m_smem": plgpu.SMEM((BLOCK, block + SKEW), jnp.float32),
        "gate_smem": plgpu.SMEM((2, block), jnp.float32),
        "sum_smem": plgpu.SMEM((2, BLOCK), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=2),
        "scratch": way.scratch(tile, nodes, interpret),
    }


class Tree(NamedTuple):
    """What of a row's tree and a head's gates the columns of dv share. Row t of [K; Q] is of node t modulo N.

    Attributes:
        m: [64, N + SKEW] fp32 in shared memory, M in its first N rows and columns.
        weights: [64, N], M' in its last N rows.
        beta, from_root, real: [64] by row; exp of the path sum of the log decays, and 1 for a node, 0 for padding.
    """

    m: jax.Ref
    weights: jax.Array
    beta: jax.Array
    from_root: jax.Array
    real: jax.Array


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
    m_smem,
    gate_smem,
    sum_smem,
    loaded,
    scratch,
    way,
    tile: Tile,
    scale: float,
    block: int,
):
    j, h, b = (lax.axis_index(name) for name in ("columns", "head", "row"))
    nodes, heads = q_ref.shape[1:3]
    stacked, dk = kq_smem.shape
    key_head = h // (v_ref.shape[2] // heads)
    layout = plgpu.Layout.WGMMA
    by_row, by_column = layout.reduce(1), layout.reduce(0)

    # 1. All loads.
    landing = kq_smem if plain_smem is None else plain_smem
    for i, ref in enumerate((k_ref, q_ref)):
        plgpu.copy_gmem_to_smem(ref.at[b, :, key_head], landing.at[pl.ds(i * block, nodes)], loaded)
    gates = [_by_node(ref.at[b, :, h], nodes) for ref in (g_ref, beta_ref)]
    words = [mosaic.load(bits_ref.at[b, w], by_row) for w in range(1 if block <= 32 else 2)]
    asked = way.ask(s_ref.at[layer_ref[0], b, h], v_ref.at[b, :, h], j, tile, scratch)

    for i, gate in enumerate(gates):
        _put(gate_smem.at[i], gate)
    mosaic.meet()

    # 2. Path sums of the decays, by row, then by column as well.
    def across(vector: jax.Array) -> jax.Array:  # one number a row
        return lax.broadcast_in_dim(vector, (BLOCK, block), (0,))

    def by_node(smem, i: int) -> jax.Array:  # one number a column
        vector = mosaic.load(smem.at[i, pl.ds(0, block)], by_column)
        return lax.broadcast_in_dim(vector, (BLOCK, block), (1,))

    def iota(axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (BLOCK, block), axis, layout=layout)

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
    mosaic.meet()
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
        for m, start in itertools.product(row_blocks, range(0, dk, 64)):
            piece = pl.ds(m, BLOCK), pl.ds(start, 64)
            kq_smem[piece] = mosaic.load(plain_smem.at[piece], layout)
        plgpu.commit_smem()

    weight = zero
    for m in row_blocks:
        similar = mosaic.product([(kq_smem.at[pl.ds(m, BLOCK)], kq_smem.at[pl.ds(0, block)].T)])
        gain = jnp.where(iota(0) >= block - m, zero + scale, across(beta))  # of queries, of keys
        weight = jnp.where(reach, gain * decay * similar, zero)  # what stands on M's diagonal is never read
        if m == 0:
            m_smem[:, pl.ds(0, block)] = weight
    tree = Tree(m_smem, weight, beta, jnp.exp(coarse_sum + fine_sum), real)
    out = tuple(ref.at[b, :, h] for ref in (o_ref, u_ref))
    way.take(asked, tree, kq_smem, out, j, scale, scratch)


def _by_node(ref, nodes: int) -> list[jax.Array]:
    """The first ``nodes`` numbers of ``ref``: a vector of as many as come in eights, then the others one by one."""
    whole = nodes // 8 * 8
    vector = [mosaic.load(ref.at[pl.ds(0, whole)], mosaic.spread(whole))] if whole else []
    return [*vector, *(ref[t] for t in range(whole, nodes))]


def _put(ref, numbers: list[jax.Array]) -> None:
    """Store what ``_by_node`` gave."""
    place = 0
    for x in numbers:
        ref[place if x.ndim == 0 else pl.ds(place, x.size)] = x
        place += x.size


def _round_to_step(x: jax.Array) -> jax.Array:
    return lax.round(x * (1 / STEP), lax.RoundingMethod.TO_NEAREST_EVEN) * STEP
