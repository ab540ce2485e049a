"""The front of a mixer for a draft tree in one Pallas-Triton launch: convolution, silu, heads, L2 norm and gates.

Why a kernel: in XLA this is a dozen small launches a layer, each shorter than the gap before it. Here nothing is
carried from node to node: XLA follows the parents once a round for all layers (``_places``), and a program gathers all
that its nodes read at the same time. A node is a vector of one head's channels and its places are scalars, so values
never change hands between threads but for the sum of the norm.

Bytes moved: the q, k, v, a and b columns of the projection once from memory and up to W times from cache, the window
and the taps, and the outputs once. At one row and 16 nodes of 8 heads of 256 that is under 1 MB, so the time is that of
a launch and two dependent loads.

Numerics: as in reference.py. fp32 sums from the oldest tap to the newest; inputs, silu and unit vectors are rounded to
the dtype of the model, gates never. Differences from the reference are those of exp, rsqrt and fused products.

Limits: head sizes that are powers of two from 16 to 256.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels_pallas import pallas_triton
from kernels_pallas.ancestors import walk_up
from kernels_pallas.tree_conv.reference import MixerInputs, gates, l2_norm
from kernels_pallas.tree_conv.tiles import Tile, pick


def tree_conv(
    projected: jax.Array,
    window: jax.Array | None,
    weight: jax.Array | None,
    A_log: jax.Array,
    dt_bias: jax.Array,
    parents: jax.Array,
    num_nodes: jax.Array | None,
    *,
    key_heads: int,
    dk: int,
    dv: int,
    dtype: jnp.dtype,
    max_beta: float,
    layer: int | None,
    tile: Tile | None = None,
    interpret: bool = False,
) -> MixerInputs:
    """See ``api.tree_conv``; the arguments are already checked. ``tile`` None takes the one of the table."""
    rows, nodes, _ = projected.shape
    if num_nodes is None:
        num_nodes = jnp.full(rows, nodes, jnp.int32)
    # The layer is data: as a constant it would make, and compile, another kernel for each layer.
    index = jnp.full(1, layer or 0, jnp.int32)
    windows = window[None] if layer is None and window is not None else window
    sizes = {"key_heads": key_heads, "dk": dk, "dv": dv, "dtype": dtype, "max_beta": max_beta}
    sizes |= {"tile": tile or pick(rows, nodes), "interpret": interpret}
    return _launch(projected, index, windows, weight, A_log, dt_bias, parents, num_nodes, **sizes)


_STATIC = ("key_heads", "dk", "dv", "dtype", "max_beta", "tile", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)  # traced once for all layers
def _launch(
    projected: jax.Array,
    layer: jax.Array,
    windows: jax.Array | None,
    weight: jax.Array | None,
    A_log: jax.Array,
    dt_bias: jax.Array,
    parents: jax.Array,
    num_nodes: jax.Array,
    *,
    key_heads: int,
    dk: int,
    dv: int,
    dtype: jnp.dtype,
    max_beta: float,
    tile: Tile,
    interpret: bool,
) -> MixerInputs:
    rows, nodes, width = projected.shape
    value_heads = A_log.size
    channels = 2 * key_heads * dk + value_heads * dv
    block = tile.nodes
    length = 0 if windows is None else windows.shape[-2]

    def kernel(projected_ref, A_log_ref, dt_bias_ref, num_nodes_ref, *refs: Any):
        *conv_refs, q_ref, k_ref, v_ref, log_decay_ref, beta_ref, inputs_ref = refs
        weight_ref, places_ref, layer_ref, window_ref = conv_refs + [None] * (4 - len(conv_refs))
        segment, first = pl.program_id(0), pl.program_id(1) * block
        mine = [first + n for n in range(block)]  # the last block may reach past the tree
        num_real = num_nodes_ref[...]

        def convolved(start: jax.Array, size: int) -> list[jax.Array]:
            """The silu of the convolution at ``size`` channels from ``start``, of each node; writes the inputs too."""
            channels = pl.ds(start, size)

            def read(ref, *place: jax.Array, where: jax.Array) -> jax.Array:
                return pltriton.load(ref.at[(*place, channels)], mask=jnp.broadcast_to(where, size), other=0)

            def above(t: jax.Array, place: jax.Array) -> jax.Array:
                """What node ``t`` reads at ``place``, in the window or of another node, in fp32."""
                is_node = place >= length
                new = read(projected_ref, place - length, where=(t < nodes) & is_node).astype(dtype)
                old = read(window_ref, layer_ref[...], place, where=(t < nodes) & ~is_node)
                return jnp.where(is_node, new.astype(jnp.float32), old.astype(jnp.float32))

            # Every load before the first store: the compiler may not move a load across one.
            places = [
                [pltriton.load(places_ref.at[jnp.int32(j), t], mask=t < nodes, other=0) for j in range(length)]
                for t in mine
            ]
            inputs = [read(projected_ref, t, where=t < nodes).astype(dtype) for t in mine]
            if weight_ref is None:
                sums = [x.astype(jnp.float32) for x in inputs]
            else:
                taps = [weight_ref[jnp.int32(j), channels].astype(jnp.float32) for j in range(length + 1)]
                lines = [
                    [*(above(t, place) for place in of_node), x.astype(jnp.float32)]
                    for t, of_node, x in zip(mine, places, inputs)
                ]
                sums = [sum((tap * x for tap, x in zip(taps, line)), jnp.float32(0)) for line in lines]
            for t, x in zip(mine, inputs):
                write(inputs_ref, t, start, x)
            return [jnp.where(t < num_real, jax.nn.silu(x), 0).astype(dtype) for t, x in zip(mine, sums)]

        def write(ref, t: jax.Array, start: jax.Array, x: jax.Array) -> None:
            pltriton.store(ref.at[t, pl.ds(start, x.size)], x, mask=jnp.broadcast_to(t < nodes, x.shape))

        @pl.when(segment < 2 * key_heads)
        def _():
            unit = [l2_norm(y).astype(dtype) for y in convolved(segment * dk, dk)]
            for ref, head in ((q_ref, segment), (k_ref, segment - key_heads)):

                @pl.when((head >= 0) & (head < key_heads))
                def _(ref=ref, head=head):
                    for t, x in zip(mine, unit):
                        write(ref, t, head * dk, x)

        @pl.when(segment >= 2 * key_heads)
        def _():
            head = segment - 2 * key_heads
            t = first + jnp.arange(block, dtype=jnp.int32)
            at = pl.ds(first, block)
            a, b = (
                pltriton.load(projected_ref.at[at, width - back * value_heads + head], mask=t < nodes, other=0)
                for back in (2, 1)
            )
            A, dt = A_log_ref[head], dt_bias_ref[head]
            for n, y in enumerate(convolved(2 * key_heads * dk + head * dv, dv)):
                write(v_ref, mine[n], head * dv, y)
            for ref, gate in zip((log_decay_ref, beta_ref), gates(a, b, A, dt, max_beta)):
                pltriton.store(ref.at[at, head], jnp.where(t < num_real, gate, 0), mask=t < nodes)

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda s, i, b: (b, *(0 for _ in shape)))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda s, i, b: tuple(0 for _ in shape))

    arrays = [projected, A_log, dt_bias, num_nodes]
    specs = [row(nodes, width), whole(value_heads), whole(value_heads), row()]
    if weight is not None:
        arrays.append(weight)
        specs.append(whole(length + 1, channels))
    if windows is not None and length:
        arrays += [_places(parents, length), layer, windows]
        specs += [row(length, nodes), pl.BlockSpec((None,), lambda s, i, b: (0,))]
        specs.append(pl.BlockSpec((windows.shape[0], None, length, channels), lambda s, i, b: (0, b, 0, 0)))

    out = {"q": key_heads * dk, "k": key_heads * dk, "v": value_heads * dv}
    out |= {"log_decay": value_heads, "beta": value_heads, "inputs": channels}
    fp32 = ("log_decay", "beta")
    q, k, v, log_decay, beta, inputs = pl.pallas_call(
        kernel,
        grid=(2 * key_heads + value_heads, pl.cdiv(nodes, block), rows),
        in_specs=specs,
        out_specs=[row(nodes, size) for size in out.values()],
        out_shape=[
            jax.ShapeDtypeStruct((rows, nodes, size), jnp.float32 if name in fp32 else dtype)
            for name, size in out.items()
        ],
        compiler_params=pallas_triton.params(tile.warps),
        interpret=interpret,
        name="tree_conv",
    )(*arrays)
    q, k = (x.reshape(rows, nodes, key_heads, dk) for x in (q, k))
    return MixerInputs(q, k, v.reshape(rows, nodes, value_heads, dv), log_decay, beta, inputs)


def _places(parents: jax.Array, length: int) -> jax.Array:
    """Where the taps but the last read, along ``[window, nodes]``, oldest first: [B, W-1, N].

    The same for all layers, so XLA computes it once.
    """
    rows, nodes = parents.shape
    start = jnp.broadcast_to(length + jnp.arange(nodes, dtype=jnp.int32), (rows, nodes))
    places = walk_up(parents, start, length, length + 1)
    return jnp.minimum(jnp.stack(places[:0:-1], axis=1), length + nodes - 1)
