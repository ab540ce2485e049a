"""Verification in one Pallas-Triton launch: a program takes one value head of one row and some columns of dv.

Everything but the state is small, so each program builds the N x N matrices for itself and meets no other program: S is
read once, from wherever it lies in the stacked buffer, and nothing of it is written.

Two phases. First tensor cores give K S, Q S, K K^T and Q K^T, and the gates turn them into X (what u and o would be
without other nodes) and M (what the u of other nodes add):

    u_t = X_t - sum_i M[t, i] u_i        o_t = X'_t + sum_i M'[t, i] u_i

Then each thread owns columns of dv and substitutes forward without a word to another thread: a row of X is a vector, an
entry of M a scalar. Blocks of 16 nodes reach each other through products, as o reaches all u. X and M pass between the
phases, and between layouts, through a scratch in global memory that stays in the cache.

What the time goes by at batch 1 (measured, H200): first the loads that wait for one another, so all of dk is loaded
ahead and no load stands behind a store; then the number of instructions, as a multiprocessor has few warps to switch
between; code for 32 nodes in one straight line outgrows the instruction cache.

Bytes: S once; q, k, the gates and the ancestor bits once a program (from L2 but for the first); v, o and u once.

Numerics: fp32-accurate products (``pallas_triton.matmul``), forward substitution in plain fp32. The decay between two
nodes is a difference of path sums whose coarse parts (multiples of 2^-8) are exact, so it keeps an absolute error near
1e-8 however strong the decay above both nodes is.

Limits: head sizes 16 to 256, powers of two; N up to 64, of which a program computes the next of 16, 32, 64.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas.ancestors import ancestor_bits
from kernels_pallas.decay import STEP
from kernels_pallas.factors import Factors
from kernels_pallas.gdn_verify.tiles import TABLE
from kernels_pallas.pallas_triton import matmul, params
from kernels_pallas.shapes import padded_nodes
from kernels_pallas.tiles import Tile, check_shared_memory, first

ROWS = 16  # nodes that forward substitution holds in registers: more would outgrow the instruction cache


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
    """See ``api.gdn_verify``; the arguments are already checked. ``tile`` None: from the table."""
    rows, nodes, _, dk = q.shape
    value_heads, dv = v.shape[2:]
    tile = (tile or first(TABLE, nodes=nodes, heads=rows * value_heads)).within(dk, dv)
    needed = shared_bytes(tile, padded_nodes(nodes), k.dtype.itemsize) if nodes > 1 else 0
    check_shared_memory("gdn_verify", tile, needed)
    states, index = (state[None], 0) if layer is None else (state, layer)
    # The layer is data: as a constant it would make, and compile, another kernel for each layer. The short kernel of
    # one node is worth that: it would wait for the number before it could ask for the state.
    layer_of_one = index if nodes == 1 else None
    index = jnp.full(1, index, jnp.int32)
    return _launch(index, states, q, k, v, log_decay, beta, parents, num_nodes, scale, layer_of_one, tile, interpret)


@functools.partial(jax.jit, static_argnames=("scale", "layer_of_one", "tile", "interpret"))  # traced once for a tree
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
    layer_of_one: int | None,
    tile: Tile,
    interpret: bool,
) -> tuple[jax.Array, Factors]:
    rows, nodes, heads, dk = q.shape
    value_heads, dv = v.shape[2:]
    group = value_heads // heads
    block = padded_nodes(nodes)

    def shared(*shape: int) -> pl.BlockSpec:  # of a key head: one copy for all columns and the group
        return pl.BlockSpec((None, nodes, None, *shape), lambda j, h, b: (b, 0, h // group, *[0] * len(shape)))

    def private(*shape: int) -> pl.BlockSpec:  # of one program
        return pl.BlockSpec((None, None, None, *shape), lambda j, h, b: (b, h, j, *[0] * len(shape)))

    one = pl.BlockSpec((None,), lambda j, h, b: (0,))
    gate = pl.BlockSpec((None, nodes, None), lambda j, h, b: (b, 0, h))
    own = pl.BlockSpec((None, nodes, None, tile.columns), lambda j, h, b: (b, 0, h, j))
    bits = pl.BlockSpec((None, nodes), lambda j, h, b: (b, 0))
    layers, at = (states.shape[0], 0) if layer_of_one is None else (None, layer_of_one)
    state_tile = pl.BlockSpec((layers, None, None, dk, tile.columns), lambda j, h, b: (at, b, h, 0, j))
    columns = dv // tile.columns
    scratch = [(block, tile.columns), (block, tile.columns), (block, block)] if nodes > 1 else []

    fp32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    if nodes == 1:
        kernel = functools.partial(_one_node, scale=scale)
    else:
        sizes = {"nodes": nodes, "block": block, "depth": tile.rows}
        kernel = functools.partial(_tree, scale=scale, barrier=not interpret, **sizes)
    o, u, total, low, *_ = pl.pallas_call(
        kernel,
        grid=(columns, value_heads, rows),
        in_specs=[one, state_tile, shared(dk), shared(dk), own, gate, gate, bits, bits],
        out_specs=[own, own, gate, gate, *(private(*shape) for shape in scratch)],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            *(fp32(v.shape), fp32(beta.shape), fp32(beta.shape)),
            *[fp32((rows, value_heads, columns, *shape)) for shape in scratch],
        ],
        compiler_params=params(tile.warps, tile.stages),
        interpret=interpret,
        name="gdn_verify",
    )(layer, states, q, k, v, log_decay, beta, *ancestor_bits(parents, num_nodes))
    if num_nodes is not None:
        k = jnp.where((jnp.arange(nodes) < num_nodes[:, None])[..., None, None], k, 0)
    return o, Factors(k, u, total, low)


def shared_bytes(tile: Tile, block: int, itemsize: int) -> int:
    """Shared memory of a program, an upper estimate: cuts that are loaded ahead, parts of operands, matrices."""
    ahead = max(tile.stages - 1, 1) * tile.rows * (4 * tile.columns + 2 * itemsize * block)
    return ahead + 4 * (3 * tile.rows + block) * (tile.columns + block)


def _one_node(
    _layer, s_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, bits_ref, _high, o_ref, u_ref, total_ref, low_ref,
    *, scale: float,
):  # fmt: skip
    """A decode step: two sums over dk in fp32, no tensor core. The state is [dk, columns], of one layer."""
    s = s_ref[...]
    k, q, v = (ref[0].astype(jnp.float32) for ref in (k_ref, q_ref, v_ref))
    g, beta, real = g_ref[0], beta_ref[0], bits_ref[0] != 0
    key_state = jnp.sum(s * k[:, None], axis=0)
    query_state = jnp.sum(s * q[:, None], axis=0)
    decay = jnp.exp(g)
    u = beta * (v - decay * key_state)
    o = scale * (decay * query_state + jnp.sum(q * k) * u)
    o_ref[0] = jnp.where(real, o, 0).astype(o_ref.dtype)
    u_ref[0] = jnp.where(real, u, 0)

    @pl.when(pl.program_id(0) == 0)
    def _():
        total_ref[0] = jnp.where(real, g, 0)
        low_ref[0] = jnp.zeros_like(g)


def _tree(
    layer_ref,  # [] i32
    s_ref,  # [L, dk, columns] f32
    q_ref,  # [N, dk]
    k_ref,  # [N, dk]
    v_ref,  # [N, columns]
    g_ref,  # [N] f32
    beta_ref,  # [N] f32
    low_bits_ref,  # [N] i32
    high_bits_ref,  # [N] i32
    o_ref,  # [N, columns]
    u_ref,  # [N, columns] f32
    total_ref,  # [N] f32
    low_ref,  # [N] f32
    x_ref,  # [block, columns] f32 scratch
    solved_ref,  # [block, columns] f32 scratch
    m_ref,  # [block, block] f32 scratch
    *,
    scale: float,
    nodes: int,
    block: int,
    depth: int,
    barrier: bool,
):
    def wait() -> None:  # for what other threads stored
        if barrier:
            pltriton.debug_barrier()

    o, weights = _matrices(
        *(layer_ref, s_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, low_bits_ref, high_bits_ref),
        *(total_ref, low_ref, x_ref, m_ref),
        scale=scale,
        nodes=nodes,
        block=block,
        depth=depth,
    )
    if nodes < block:  # places that no node fills
        solved_ref[...] = jnp.zeros(solved_ref.shape, jnp.float32)
    wait()
    _substitute(x_ref, m_ref, solved_ref, u_ref, nodes=nodes, barrier=wait)
    o += matmul(weights, solved_ref[...])
    pltriton.store(o_ref.at[pl.ds(0, block)], o.astype(o_ref.dtype), mask=(jnp.arange(block) < nodes)[:, None])


def _matrices(
    layer_ref, s_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, low_bits_ref, high_bits_ref,
    total_ref, low_ref, x_ref, m_ref, *, scale: float, nodes: int, block: int, depth: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The first phase: X and M into the scratch, the path sums out; X' [block, columns] and M' [block, block]."""
    node = jnp.arange(block)
    inside = node < nodes
    here = pl.ds(0, block)
    layer = layer_ref[...]

    def by_node(ref) -> jax.Array:
        mask = inside if len(ref.shape) == 1 else inside[:, None]
        return pltriton.load(ref.at[here], mask=mask, other=0)

    def cut(start) -> list[jax.Array]:
        part = pl.ds(start, depth)
        q, k = (pltriton.load(ref.at[here, part], mask=inside[:, None], other=0) for ref in (q_ref, k_ref))
        return [q, k, s_ref[layer, part, :]]

    def add(i, sums):
        q, k, s = cut(i * depth)
        found = matmul(k, s), matmul(q, s), matmul(k, k.T), matmul(q, k.T)
        return tuple(a + b for a, b in zip(sums, found, strict=True))

    v, g, beta, low_bits, high_bits = (by_node(ref) for ref in (v_ref, g_ref, beta_ref, low_bits_ref, high_bits_ref))
    by_state, by_key = (jnp.zeros((block, n), jnp.float32) for n in (v_ref.shape[1], block))
    start = by_state, by_state, by_key, by_key
    key_state, query_state, key_key, query_key = lax.fori_loop(0, k_ref.shape[1] // depth, add, start)

    low, high = low_bits[:, None], high_bits[:, None]
    reach = _bit(low if block <= 32 else jnp.where(node[None, :] < 32, low, high), node[None, :])  # i is t or above it
    real = _bit(jnp.where(node < 32, low_bits, high_bits), node)
    coarse = jnp.floor(g / STEP + 0.5) * STEP
    coarse_sum, fine_sum = (jnp.sum(jnp.where(reach, x[None, :], 0), axis=1) for x in (coarse, g - coarse))
    total = coarse_sum + fine_sum
    since = (coarse_sum[:, None] - coarse_sum[None, :]) + (fine_sum[:, None] - fine_sum[None, :])
    decay = jnp.exp(jnp.where(reach, since, 0))
    itself = node[:, None] == node[None, :]

    @pl.when(pl.program_id(0) == 0)
    def _():
        pltriton.store(total_ref.at[here], total, mask=inside)
        pltriton.store(low_ref.at[here], (coarse_sum - total) + fine_sum, mask=inside)

    # `where` and not zero gates: padding may hold NaN
    from_root, real = jnp.exp(total)[:, None], real[:, None]
    m_ref[...] = jnp.where(reach & ~itself, beta[:, None] * decay * key_key, 0)
    surprise = beta[:, None] * (v.astype(jnp.float32) - from_root * key_state)
    x_ref[...] = jnp.where(real, surprise, 0)
    return (
        jnp.where(real, scale * from_root * query_state, 0),
        jnp.where(reach, scale * decay * query_key, 0),
    )


def _bit(word: jax.Array, place: jax.Array) -> jax.Array:
    return ((word >> (place & 31)) & 1) != 0


def _substitute(x_ref, m_ref, solved_ref, u_ref, *, nodes: int, barrier: Callable[[], None]) -> None:
    """The second phase: u from X and M, ``ROWS`` nodes at a time; into ``solved_ref`` too, which has all places."""

    def solve(start, count: int = ROWS) -> None:
        """The u of ``count`` nodes; X holds what all nodes before ``start`` leave to do."""
        u = [x_ref[start + t] for t in range(count)]
        for t in range(count):
            for i in range(t):
                u[t] -= m_ref[start + t, start + i] * u[i]
        # After the last load of M, as the compiler moves no load across a store; and not over X, which warps that do
        # the same work may yet have to read.
        for t in range(count):
            solved_ref[start + t] = u[t]
            pltriton.store(u_ref.at[jnp.int32(start + t)], u[t], mask=jnp.full(u[t].shape, start + t < nodes))
        barrier()

    def next_block(b, carry):
        rows = pl.ds(b * ROWS, ROWS)

        def add(i, total):
            columns = pl.ds(i * ROWS, ROWS)
            return total + matmul(m_ref[rows, columns], solved_ref[columns, :])

        left = x_ref[rows, :] - lax.fori_loop(0, b, add, jnp.zeros((ROWS, x_ref.shape[1]), jnp.float32))
        barrier()  # all have read X
        x_ref[rows, :] = left
        barrier()
        solve(b * ROWS)
        return carry

    solve(0, min(nodes, ROWS))
    if nodes > ROWS:
        lax.fori_loop(1, pl.cdiv(nodes, ROWS), next_block, 0)
