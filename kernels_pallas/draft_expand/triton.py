"""The children of a level of drafting in two Pallas-Triton launches: the best of each chunk of logits, then the rest.

One program cannot read the logits of a level fast enough, and programs that wait for each other are slower than a
second launch. So the first launch leaves, of each node and chunk, the ``branch`` best logits, their tokens and the sum
of the exponentials. A program of the second launch makes one node of the next level, of one row: it merges what the
chunks of all nodes left, ranks the children, and copies and norms what its own child reads. The merge is the same in
all programs of a row, so none waits for another; that of the first child writes what they share.

Bytes: the logits once, and the two rows of D that each child reads.

Numerics: as in the reference, but for the order of the sums.

Limits: not differentiable. Where logits are not finite, what is chosen is unspecified but exists.
"""

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import pallas_triton
from kernels_pallas.draft_expand.reference import Expansion, Frontier
from kernels_pallas.draft_expand.tiles import Tile, pick
from kernels_pallas.norm import rms_norm


@functools.partial(jax.jit, static_argnames=("eps", "branch", "tile", "interpret"))  # traced once for all levels
def draft_expand(
    logits: jax.Array,
    hidden: jax.Array,
    log_prob: jax.Array,
    ancestors: jax.Array,
    level: jax.Array,
    temperature: jax.Array,
    embedding: jax.Array,
    embedding_scale: jax.Array,
    hidden_scale: jax.Array,
    draft_to_target: jax.Array | None,
    *,
    eps: float,
    branch: int,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Expansion:
    """See ``api.draft_expand``; the arguments are already checked. ``tile`` None takes the one of the table."""
    rows, nodes, vocabulary = logits.shape
    width, slots, both = hidden.shape[2], ancestors.shape[2], embedding.shape[1] + hidden.shape[2]
    tile = tile or pick(rows * nodes, vocabulary)
    chunks = pl.cdiv(vocabulary, tile.chunk)

    def of_node(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda c, t, b: (b, t, *(0 for _ in shape)))

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda c, b: (b, *(0 for _ in shape)))

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    def scalar(grid: int) -> pl.BlockSpec:
        return pl.BlockSpec((None,), (lambda c, b: (0,)) if grid == 2 else (lambda c, t, b: (0,)))

    shapes = (branch, chunks), (branch, chunks), (chunks,)
    best, tokens, sums = pl.pallas_call(
        functools.partial(_chunk_kernel, branch=branch, chunk=tile.chunk),
        grid=(chunks, nodes, rows),
        in_specs=[scalar(3), of_node(vocabulary)],
        out_specs=[of_node(*shape) for shape in shapes],
        out_shape=[
            jax.ShapeDtypeStruct((rows, nodes, *shape), dtype)
            for shape, dtype in zip(shapes, (jnp.float32, jnp.int32, jnp.float32))
        ],
        compiler_params=pallas_triton.params(tile.warps),
        interpret=interpret,
        name="draft_expand_chunks",
    )(temperature[None], logits)

    shared = [embedding, embedding_scale, hidden_scale, *([] if draft_to_target is None else [draft_to_target])]
    shapes = (nodes * branch,), (nodes * branch,), (branch,), (branch,), (branch,)
    shapes = *shapes, (branch, width), (branch, slots), (branch, both)
    dtypes = jnp.int32, jnp.float32, jnp.int32, jnp.int32, jnp.float32, hidden.dtype, jnp.bool_, hidden.dtype
    children, child_log_prob, chosen, *frontier = pl.pallas_call(
        functools.partial(_child_kernel, vocabulary=vocabulary, eps=eps),
        grid=(branch, rows),
        in_specs=[
            *(scalar(2), scalar(2)),
            *(of_row(*x.shape[1:]) for x in (best, tokens, sums, log_prob, ancestors, hidden)),
            *(whole(x) for x in shared),
        ],
        out_specs=[of_row(*shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in zip(shapes, dtypes)],
        compiler_params=pallas_triton.params(tile.child_warps),
        interpret=interpret,
        name="draft_expand_children",
    )(level[None], temperature[None], best, tokens, sums, log_prob, ancestors, hidden, *shared)
    return Expansion(children, child_log_prob, chosen, Frontier(*frontier))


def _chunk_kernel(
    temperature_ref,  # [] fp32
    logits_ref,  # [V], of the program's node
    best_ref,  # [branch, chunks] fp32, best first
    tokens_ref,  # [branch, chunks] i32
    sums_ref,  # [chunks] fp32, of the exponentials of what lies below the best
    *,
    branch: int,
    chunk: int,
):
    here, last = pl.program_id(0), logits_ref.shape[0] - 1
    token = here * chunk + jnp.arange(chunk, dtype=jnp.int32)
    x = pltriton.load(logits_ref.at[token], mask=token <= last, other=-jnp.inf)
    peak = jnp.max(x)
    sums_ref[here] = jnp.sum(jnp.exp((x - peak) / temperature_ref[...]))
    for place in range(branch):
        peak = jnp.max(x)
        found = jnp.min(jnp.where(x == peak, token, last))
        best_ref[jnp.int32(place), here] = peak
        tokens_ref[jnp.int32(place), here] = found
        x = jnp.where(token == found, -jnp.inf, x)


def _child_kernel(
    level_ref,  # [] i32
    temperature_ref,  # [] fp32
    best_ref,  # [T, branch, chunks] fp32
    tokens_ref,  # [T, branch, chunks] i32
    sums_ref,  # [T, chunks] fp32
    log_prob_ref,  # [T] fp32
    ancestors_ref,  # [T, S] bool
    hidden_ref,  # [T, D]
    embedding_ref,  # [Vt, Dt]
    embedding_scale_ref,  # [Dt]
    hidden_scale_ref,  # [D]
    *refs,  # draft_to_target [V] i32 where there is one, and the outputs
    vocabulary: int,
    eps: float,
):
    *map_ref, children_ref, child_log_prob_ref, chosen_ref, token_ref, next_log_prob_ref = refs[:-3]
    feature_ref, next_ancestors_ref, pair_ref = refs[-3:]
    nodes, branch, chunks = best_ref.shape
    child, temperature = pl.program_id(0), temperature_ref[...]
    node, rank, chunk = (_padded(size)[0] for size in (nodes, branch, chunks))
    row = node[:, None]

    # The best of a node are the best of its chunks, each of which is in order: only the heads have to be compared.
    in_chunk = (row < nodes) & (chunk < chunks)

    def of_chunks(ref, *place: jax.Array, other: float) -> jax.Array:
        index = (jnp.broadcast_to(x, in_chunk.shape) for x in (row, *place, chunk))
        return pltriton.load(ref.at[(*index,)], mask=in_chunk, other=other)

    places = [jnp.int32(i) for i in range(branch)]
    values = [of_chunks(best_ref, i, other=-jnp.inf) for i in places]
    tokens = [of_chunks(tokens_ref, i, other=vocabulary - 1) for i in places]
    sums = of_chunks(sums_ref, other=0)
    heads = values[0]
    best, token = [], []
    for _ in range(branch):
        best.append(jnp.max(values[0], axis=1))
        token.append(jnp.min(jnp.where(values[0] == best[-1][:, None], tokens[0], vocabulary - 1), axis=1))
        won = tokens[0] == token[-1][:, None]
        values = [jnp.where(won, below, x) for x, below in pairwise(values)]
        tokens = [jnp.where(won, below, x) for x, below in pairwise(tokens)]
    total = jnp.sum(sums * jnp.exp((heads - best[0][:, None]) / temperature), axis=1)

    # [T, branch] from here on, and flat for the ranking.
    real = (row < nodes) & (rank < branch)
    index = row * branch + rank

    def beside(columns: list[jax.Array]) -> jax.Array:
        """[T, branch] of ``branch`` times [T]."""
        out = jnp.zeros(real.shape, columns[0].dtype)
        for i, column in enumerate(columns):
            out = jnp.where(rank == i, column[:, None], out)
        return out

    step = (beside(best) - best[0][:, None]) / temperature - jnp.log(total)[:, None]
    log_prob = pltriton.load(log_prob_ref.at[node], mask=node < nodes, other=0)[:, None] + step
    children = beside(token)
    if map_ref:
        children = pltriton.load(map_ref[0].at[children], mask=real, other=0)

    flat_log_prob, flat_real = log_prob.reshape(-1), real.reshape(-1)
    position = jnp.arange(flat_real.size, dtype=jnp.int32)
    above = flat_log_prob[None, :] > flat_log_prob[:, None]
    above |= (flat_log_prob[None, :] == flat_log_prob[:, None]) & (position[None, :] < position[:, None])
    place = jnp.sum((above & flat_real[None, :]).astype(jnp.int32), axis=1)
    own = flat_real & (place == child)
    # Maxima and no sums: several are its own where a log-probability is NaN, and what is read must exist.
    chosen = jnp.max(jnp.where(own, index.reshape(-1), 0))
    token = jnp.max(jnp.where(own, children.reshape(-1), 0))
    parent = chosen // branch
    chosen_ref[child] = chosen
    token_ref[child] = token
    next_log_prob_ref[child] = jnp.max(jnp.where(own, flat_log_prob, -jnp.inf))

    @pl.when(child == 0)
    def _():
        pltriton.store(children_ref.at[index], children, mask=real)
        pltriton.store(child_log_prob_ref.at[index], log_prob, mask=real)

    slot, exists = _padded(ancestors_ref.shape[1])
    inherited = pltriton.load(ancestors_ref.at[parent, slot], mask=exists, other=False)
    own_slot = (level_ref[...] - 1) * branch + parent  # below the root's level 0, where no node has one
    pltriton.store(next_ancestors_ref.at[child, slot], inherited | (slot == own_slot), mask=exists)

    dtype, start = feature_ref.dtype, embedding_ref.shape[1]
    column, exists = _padded(start)
    embedded = pltriton.load(embedding_ref.at[token, column], mask=exists, other=0).astype(dtype)
    scale = pltriton.load(embedding_scale_ref.at[column], mask=exists, other=0)
    normed = rms_norm(embedded, scale, eps, start).astype(dtype)
    pltriton.store(pair_ref.at[child, column], normed, mask=exists)

    column, exists = _padded(hidden_ref.shape[1])
    feature = pltriton.load(hidden_ref.at[parent, column], mask=exists, other=0)
    scale = pltriton.load(hidden_scale_ref.at[column], mask=exists, other=0)
    normed = rms_norm(feature, scale, eps, hidden_ref.shape[1]).astype(dtype)
    pltriton.store(feature_ref.at[child, column], feature, mask=exists)
    pltriton.store(pair_ref.at[child, start + column], normed, mask=exists)


def _padded(size: int) -> tuple[jax.Array, jax.Array]:
    """Indices of as many elements as the next power of two, and which of them exist."""
    index = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
    return index, index < size
