"""Recovery in one Pallas-Triton launch for all layers and rows, in place: state and window.

A program takes one tile of one state, or some channels of one window. It walks from ``last`` up to the root itself, so
nothing is computed outside the kernel, and it reads the factors of the nodes on the path only: what lies off the path
is never looked at. A tree of few nodes is folded by rank-1 updates along the path, so the work follows the accepted
length and a single token costs one update; more nodes are folded by one product over all of them, with the factors off
the path set to zero.

Bytes: each state is read once and written once, 8 dk dv a head; the factors of the path come from L2 but for the first
program that asks for them. A row with ``last`` = -1 costs a load of ``last`` a program and stores nothing. The state
and the window alias the results: without donation XLA copies them first.

Numerics: rank-1 updates are plain fp32, from the last node up to the root; products are fp32-accurate
(``pallas_triton.py``). Differences of G are taken in both parts (``factors.py``), masked before the exponential.

Limits: head sizes 16 to 256, powers of two; keys and windows of any float type; not differentiable.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas.factors import Factors
from kernels_pallas.gdn_recover.tiles import CHANNELS, RANK_ONE, STEP, TABLE
from kernels_pallas.pallas_triton import matmul, params
from kernels_pallas.shapes import padded_nodes
from kernels_pallas.tiles import Tile, check_shared_memory, first


def gdn_recover(
    state: jax.Array,
    factors: Factors,
    parents: jax.Array,
    last: jax.Array,
    window: jax.Array | None = None,
    conv_inputs: jax.Array | None = None,
    tile: Tile | None = None,
    rank_one: int = RANK_ONE,
    step: int = STEP,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``api.gdn_recover``; the arguments are already checked. ``tile`` None: from the table.

    Trees of up to ``rank_one`` nodes are folded by rank-1 updates, ``step`` nodes at a time.
    """
    *lead, value_heads, dk, dv = state.shape
    rows, nodes = parents.shape
    heads = factors.key.shape[-2]
    group = value_heads // heads
    states = state.reshape(-1, value_heads, dk, dv)
    tile = (tile or first(TABLE, nodes=nodes, heads=states.shape[0] * value_heads)).within(dk, dv)
    depth, columns = tile.rows, tile.columns
    cuts = (dk // depth) * (dv // columns)  # tiles of a state
    fold = functools.partial(_fold_by_updates, step=min(step, nodes))
    if nodes > rank_one:
        fold = _fold_by_product
        check_shared_memory("gdn_recover", tile, shared_bytes(depth, columns, nodes, factors.key.dtype))
    state_programs = value_heads * cuts

    def flat(x: jax.Array) -> jax.Array:  # [*L, B, ..] to [L * B, ..]
        return x.reshape(-1, *x.shape[len(lead) :])

    # Axis 0 of the grid: the tiles of all heads, then blocks of channels. Axis 1: layers times rows.
    def by_tile(shape: tuple[int | None, ...], place: Callable[..., tuple]) -> pl.BlockSpec:
        def index_map(p, r):
            p = jnp.minimum(p, state_programs - 1)  # a program of the window is given a tile, and leaves it alone
            return place(r, p // cuts, p % cuts // (dv // columns), p % (dv // columns))

        return pl.BlockSpec(shape, index_map)

    def by_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda p, r: (r, *[0] * len(shape)))

    gate = by_tile((None, nodes, None), lambda r, h, i, j: (r, 0, h))
    state_tile = by_tile((None, None, depth, columns), lambda r, h, i, j: (r, h, i, j))
    inputs = [
        (last, pl.BlockSpec((None,), lambda p, r: (r % rows,))),
        (parents, pl.BlockSpec((None, nodes), lambda p, r: (r % rows, 0))),
        (flat(factors.key), by_tile((None, nodes, None, depth), lambda r, h, i, j: (r, 0, h // group, i))),
        (flat(factors.value), by_tile((None, nodes, None, columns), lambda r, h, i, j: (r, 0, h, j))),
        (flat(factors.log_decay), gate),
        (flat(jnp.zeros_like(factors.log_decay) if factors.log_decay_low is None else factors.log_decay_low), gate),
        (states, state_tile),
    ]
    results, aliases, window_programs, block = [inputs[-1]], {len(inputs) - 1: 0}, 0, 0
    if window is not None and conv_inputs is not None and window.size:
        length, channels = window.shape[-2:]
        block = min(CHANNELS, 1 << (channels - 1).bit_length())
        window_programs = pl.cdiv(channels, block)
        inputs += [(flat(conv_inputs), by_row(nodes, channels)), (flat(window), by_row(length, channels))]
        results.append(inputs[-1])
        aliases[len(inputs) - 1] = 1

    new_state, *new_window = pl.pallas_call(
        functools.partial(_kernel, fold=fold, state_programs=state_programs, block=block, interpret=interpret),
        grid=(state_programs + window_programs, states.shape[0]),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in results],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results],
        input_output_aliases=aliases,
        compiler_params=params(tile.warps, tile.stages),
        interpret=interpret,
        name="gdn_recover",
    )(*(x for x, _ in inputs))
    if window is not None and new_window:
        window = new_window[0].reshape(window.shape)
    return new_state.reshape(state.shape), window


def shared_bytes(depth: int, columns: int, nodes: int, dtype: jnp.dtype) -> int:
    """Shared memory of a program that folds by a product: the parts of both operands, and a tile that changes hands."""
    parts = 1 if dtype == jnp.bfloat16 else 3
    return 2 * padded_nodes(nodes) * (parts * depth + 3 * columns) + 4 * depth * columns


def _kernel(
    last_ref,  # [] i32
    parents_ref,  # [N] i32
    key_ref,  # [N, depth]
    value_ref,  # [N, columns] f32
    decay_ref,  # [N] f32
    low_ref,  # [N] f32
    state_ref,  # [depth, columns] f32
    *refs,  # if there is a window: x [N, C], window [V, C]; the new state; if there is a window: the new one
    fold: Callable[..., jax.Array],
    state_programs: int,
    block: int,
    interpret: bool,
):
    program = pl.program_id(0)
    last = jnp.minimum(last_ref[...], parents_ref.shape[0] - 1)
    new_state_ref = refs[2] if block else refs[0]

    @pl.when((last >= 0) & (program < state_programs))
    def _():
        state = state_ref[...]  # asked for before the small things: it comes from afar
        new_state_ref[...] = fold(last, parents_ref, key_ref, value_ref, decay_ref, low_ref, state)

    if block:

        @pl.when((last >= 0) & (program >= state_programs))
        def _():
            _move(last, parents_ref, refs[0], refs[3], (program - state_programs) * block, block, interpret)


def _fold_by_updates(last, parents_ref, key_ref, value_ref, decay_ref, low_ref, state: jax.Array, step: int):
    """``state`` [depth, columns] after the path, by a rank-1 update a node."""
    whole, whole_low = decay_ref[last], low_ref[last]

    def climb(node) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """The next ``step`` nodes of the path, as pairs of k and weighted u, and the node above them.

        Past the root the last node stands in with weight zero: its factors are finite.
        """
        found = []
        for _ in range(step):
            on_path = node >= 0
            place = jnp.where(on_path, node, last)
            since = (whole - decay_ref[place]) + (whole_low - low_ref[place])
            weight = jnp.exp(jnp.where(on_path, since, -jnp.inf))
            found.append((key_ref[place, :], weight * value_ref[place, :]))
            node = jnp.where(on_path, _above(parents_ref, place), -1)
        return node, found

    def add(total: jax.Array, found: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for key, value in found:
            total += key.astype(jnp.float32)[:, None] * value[None, :]
        return total

    def more(carry):
        node, found = climb(carry[0])
        return node, add(carry[1], found)

    node, found = climb(last)
    total = add(jnp.exp(whole + whole_low) * state, found)
    if step < parents_ref.shape[0]:
        _, total = lax.while_loop(lambda carry: carry[0] >= 0, more, (node, total))
    return total


def _fold_by_product(last, parents_ref, key_ref, value_ref, decay_ref, low_ref, state: jax.Array):
    """``state`` [depth, columns] after the path, by one product over the nodes."""
    nodes = parents_ref.shape[0]
    whole, whole_low = decay_ref[last], low_ref[last]

    def climb(carry):
        node, low_bits, high_bits = carry
        bit = jnp.int32(1) << (node & 31)
        low_bits = jnp.where(node < 32, low_bits | bit, low_bits)
        high_bits = jnp.where(node < 32, high_bits, high_bits | bit)
        return _above(parents_ref, node), low_bits, high_bits

    start = (last, jnp.int32(0), jnp.int32(0))
    _, low_bits, high_bits = lax.while_loop(lambda carry: carry[0] >= 0, climb, start)
    row = jnp.arange(padded_nodes(nodes))
    word = low_bits if nodes <= 32 else jnp.where(row < 32, low_bits, high_bits)
    on_path = ((word >> (row & 31)) & 1) != 0

    def by_node(ref) -> jax.Array:
        mask = on_path if len(ref.shape) == 1 else on_path[:, None]
        return pltriton.load(ref.at[pl.ds(0, row.shape[0])], mask=mask, other=0)

    since = (whole - by_node(decay_ref)) + (whole_low - by_node(low_ref))
    weights = jnp.exp(jnp.where(on_path, since, -jnp.inf))
    update = matmul(by_node(key_ref).T, weights[:, None] * by_node(value_ref))
    return jnp.exp(whole + whole_low) * state + update


def _move(last, parents_ref, x_ref, window_ref, start, block: int, interpret: bool):
    """``block`` channels of the window from ``start`` on, moved in place.

    Places count along [window, nodes], as in ``ancestors.walk_up``. ``window_ref`` is that of the result, which holds
    the old window until it is written: the compiler then sees that reads and writes meet.
    """
    length, channels = window_ref.shape
    here = pl.ds(start, block)
    inside = start + jnp.arange(block) < channels
    place, values = last + length, []
    for _ in range(length):
        is_node = place >= length
        node, old = jnp.where(is_node, place - length, 0), jnp.where(is_node, 0, place)
        x = pltriton.load(x_ref.at[node, here], mask=inside & is_node, other=0)
        kept = pltriton.load(window_ref.at[old, here], mask=inside & ~is_node, other=0)
        values.append(jnp.where(is_node, x.astype(kept.dtype), kept))
        place = jnp.where(is_node, _above(parents_ref, node) + length, jnp.maximum(place - 1, 0))
    if not interpret:
        pltriton.debug_barrier()  # all threads have read before any of them writes
    for slot, value in zip(reversed(range(length)), values, strict=True):
        pltriton.store(window_ref.at[jnp.int32(slot), here], value, mask=inside)


def _above(parents_ref, node) -> jax.Array:
    """The parent of ``node``, -1 for the committed prefix; a parent that breaks the order counts as -1."""
    parent = parents_ref[node]
    return jnp.where((parent >= 0) & (parent < node), parent, -1)
