"""The attention of a level of drafting in one Pallas-Triton launch: rotation, keys and values of the drafts, softmax.

A program takes one key head of one row and the T * H / K queries that share it, filled up to 16 rows for the tensor
cores. It starts the softmax with each node's own key, which every node sees and no other of its level does; then come
the ring and the draft slots above the level, a tile at a time, in a loop that the compiler pipelines. No program reads
the rows that are written, so updating them in place needs no order.

Splitting the ring over more programs would need a second launch to join the parts, which by estimate costs what the
split saves at 512 slots.

Bytes: the slots of the ring that hold anything, once; tiles past the length are left out. The drafts' keys and values
alias the results: without donation XLA copies them first.

Numerics: scores, softmax and sums in fp32. Weights are rounded to the dtype of the ring before they are divided by
their sum, where the reference rounds them after it; both miss as much. fp32 products as in ``pallas_triton.py``.

Limits: head sizes of 64 and 128, windows that are multiples of 64, at most 64 queries a key head; not differentiable.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import pallas_triton
from kernels_pallas.draft_attention.reference import held_position, rotate
from kernels_pallas.draft_attention.tiles import SLOTS, Tile, pick
from kernels_pallas.implementations import no_gpu
from kernels_pallas.pallas_triton import matmul
from kernels_pallas.shapes import padded_nodes
from kernels_pallas.tiles import check_shared_memory

MAX_QUERIES = 64


def unsupported(size: int, window: int, queries: int) -> str | None:
    """Why the kernel cannot take such heads, rings and queries a key head, or None if it can."""
    if size not in (64, 128):
        return f"head sizes must be 64 or 128, got {size}"
    if window % SLOTS:
        return f"ring_key must have a multiple of {SLOTS} slots, got {window}"
    if queries > MAX_QUERIES:
        return f"num_heads must make at most {MAX_QUERIES} queries a key head, got {queries}"
    return None


def why_not(size: int, window: int, queries: int) -> str | None:
    """Why the kernel cannot run here on such inputs, or None if it can."""
    return no_gpu() or unsupported(size, window, queries)


def draft_attention(
    qkv: jax.Array,
    ring_key: jax.Array,
    ring_value: jax.Array,
    draft_key: jax.Array,
    draft_value: jax.Array,
    ancestors: jax.Array,
    length: jax.Array,
    level: jax.Array,
    *,
    num_heads: int,
    theta: float,
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``api.draft_attention``; the arguments are already checked. ``tile`` None takes the one of the table."""
    nodes = qkv.shape[1]
    rows, window, key_heads, size = ring_key.shape
    reason = unsupported(size, window, nodes * num_heads // key_heads)
    if reason is not None:
        raise ValueError(reason)
    dtype = ring_key.dtype
    tile = tile or pick(rows * key_heads, dtype)
    check_shared_memory("draft_attention", tile, shared_bytes(tile, size, dtype), remedy="fewer stages")
    arrays = qkv, ring_key, ring_value, draft_key, draft_value, ancestors, length, level
    return _launch(*arrays, num_heads=num_heads, theta=theta, tile=tile, interpret=interpret)


def shared_bytes(tile: Tile, size: int, dtype: jnp.dtype) -> int:
    """Shared memory of a program: the keys and values of every stage."""
    return tile.stages * tile.slots * 2 * size * dtype.itemsize


@functools.partial(jax.jit, static_argnames=("num_heads", "theta", "tile", "interpret"))  # traced once for all levels
def _launch(
    qkv: jax.Array,
    ring_key: jax.Array,
    ring_value: jax.Array,
    draft_key: jax.Array,
    draft_value: jax.Array,
    ancestors: jax.Array,
    length: jax.Array,
    level: jax.Array,
    *,
    num_heads: int,
    theta: float,
    tile: Tile,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, nodes, _ = qkv.shape
    window, key_heads, size = ring_key.shape[1:]
    slots, group = draft_key.shape[1], num_heads // key_heads
    heads = qkv.reshape(rows, nodes, -1, size)

    def of_head(many: int, per_head: int | None, skipped: int = 0) -> pl.BlockSpec:
        """All ``many`` tokens of the program's head, or of its ``per_head`` heads."""
        return pl.BlockSpec((None, many, per_head, size), lambda h, b: (b, 0, skipped + h, 0))

    query_spec, ring_spec, draft_spec = of_head(nodes, group), of_head(window, None), of_head(slots, None)
    mixed, draft_key, draft_value = pl.pallas_call(
        functools.partial(_kernel, theta=theta, tile=tile),
        grid=(key_heads, rows),
        in_specs=[
            pl.BlockSpec((None,), lambda h, b: (b,)),
            pl.BlockSpec((None,), lambda h, b: (0,)),
            query_spec,
            of_head(nodes, None, num_heads),
            of_head(nodes, None, num_heads + key_heads),
            *(ring_spec, ring_spec),
            pl.BlockSpec((None, nodes, slots), lambda h, b: (b, 0, 0)),
            *(draft_spec, draft_spec),
        ],
        out_specs=[query_spec, draft_spec, draft_spec],
        out_shape=[
            jax.ShapeDtypeStruct((rows, nodes, num_heads, size), ring_key.dtype),
            jax.ShapeDtypeStruct(draft_key.shape, draft_key.dtype),
            jax.ShapeDtypeStruct(draft_value.shape, draft_value.dtype),
        ],
        input_output_aliases={8: 1, 9: 2},
        compiler_params=pallas_triton.params(tile.warps, tile.stages),
        interpret=interpret,
        name="draft_attention",
    )(length, level[None], heads, heads, heads, ring_key, ring_value, ancestors, draft_key, draft_value)
    return mixed.reshape(rows, nodes, -1), draft_key, draft_value


def _kernel(
    length_ref,  # [] i32
    level_ref,  # [] i32
    query_ref,  # [T, H / K, dh], as they were projected
    key_ref,  # [T, dh]
    value_ref,  # [T, dh]
    ring_key_ref,  # [W, dh]
    ring_value_ref,  # [W, dh]
    ancestors_ref,  # [T, S] bool
    old_key_ref,  # [S, dh], the memory of the new ones
    old_value_ref,  # [S, dh]
    mixed_ref,  # [T, H / K, dh]
    draft_key_ref,  # [S, dh]
    draft_value_ref,  # [S, dh]
    *,
    theta: float,
    tile: Tile,
):
    nodes, group, size = query_ref.shape
    window, slots, dtype = ring_key_ref.shape[0], draft_key_ref.shape[0], ring_key_ref.dtype
    half = size // 2
    length, level = length_ref[...], level_ref[...]
    position, first = length - 1 + level, (level - 1) * nodes
    row = jnp.arange(padded_nodes(nodes * group), dtype=jnp.int32)  # a query: a head of the group and a node
    head, node, real = row // nodes, row % nodes, row < nodes * group

    def at(ref, *place: jax.Array, start: jax.Array | int = 0, columns: int = size):
        """``columns`` from ``start`` on of every query's ``place``."""
        shape = (row.size, columns)
        column = start + jnp.arange(columns, dtype=jnp.int32)
        return ref.at[(*(jnp.broadcast_to(x[:, None], shape) for x in place), jnp.broadcast_to(column, shape))]

    def load(ref, mask: jax.Array) -> jax.Array:
        return pltriton.load(ref, mask=jnp.broadcast_to(mask[:, None], ref.shape), other=0)

    def store(ref, mask: jax.Array, value: jax.Array) -> None:
        pltriton.store(ref, value, mask=jnp.broadcast_to(mask[:, None], ref.shape))

    def rotated(ref, *place: jax.Array) -> list[jax.Array]:
        """Both halves of the heads at ``place``."""
        projected = (load(at(ref, *place, start=start, columns=half), real).astype(dtype) for start in (0, half))
        return [x.astype(dtype) for x in rotate(projected, position, theta)]

    query, key = rotated(query_ref, node, head), rotated(key_ref, node)
    value = load(at(value_ref, node), real).astype(dtype)
    products = [q.astype(jnp.float32) * k.astype(jnp.float32) for q, k in zip(query, key)]
    peak = jnp.sum(products[0] + products[1], axis=1) * size**-0.5

    def attend(carry, keys: list[jax.Array], values: jax.Array, seen: jax.Array):
        peak, total, mixed = carry
        scores = (matmul(query[0], keys[0].T) + matmul(query[1], keys[1].T)) * size**-0.5
        scores = jnp.where(seen, scores, -jnp.inf)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights, kept = jnp.exp(scores - higher[:, None]), jnp.exp(peak - higher)
        mixed = kept[:, None] * mixed + matmul(weights.astype(dtype), values)
        return higher, kept * total + jnp.sum(weights, axis=1), mixed

    def of_ring(i, carry):
        slot, here = i * tile.slots + jnp.arange(tile.slots, dtype=jnp.int32), pl.ds(i * tile.slots, tile.slots)
        held = held_position(length, slot, window)
        keys = [ring_key_ref[here, pl.ds(start, half)] for start in (0, half)]
        seen = (held >= 0) & (held > position - window)
        return attend(carry, keys, ring_value_ref[here, :], seen[None, :])

    block = min(tile.slots, padded_nodes(slots))

    def of_drafts(i, carry):
        slot, here = i * block + jnp.arange(block, dtype=jnp.int32), pl.ds(i * block, block)
        above = slot < first
        keys = [load(draft_key_ref.at[here, pl.ds(start, half)], above) for start in (0, half)]
        values = load(draft_value_ref.at[here, :], above)
        seen = (slot // nodes + 1 > level - window) & above
        marks = at(ancestors_ref, node, start=i * block, columns=block)
        marked = pltriton.load(marks, mask=real[:, None] & above[None, :], other=False)
        return attend(carry, keys, values, marked & seen[None, :])

    tiles = (jnp.minimum(length, window) + tile.slots - 1) // tile.slots
    carry = peak, jnp.ones_like(peak), value.astype(jnp.float32)
    carry = lax.fori_loop(0, tiles, of_ring, carry)
    _, total, mixed = lax.fori_loop(0, (first + block - 1) // block, of_drafts, carry)
    store(at(mixed_ref, node, head), real, (mixed / total[:, None]).astype(dtype))

    here, written = pl.ds(first, row.size), row < jnp.minimum(nodes, slots - first)
    for start, x in zip((0, half), key):
        store(draft_key_ref.at[here, pl.ds(start, half)], written, x)
    store(draft_value_ref.at[here, :], written, value)
