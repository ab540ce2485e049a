"""The columns of a verification program for many heads: 64, 128 or 256 of dv. See ``mosaic_gpu.py``.

The products are those of ``narrow.py`` on their side, dv as the rows: S^T comes into registers just as the tensor cores
take their left operand (``mosaic.turn``), S^T [K; Q]^T is X^T and X'^T, and with T = (I + M)^-1

    U^T = X^T T^T        O^T = X'^T + U^T M'^T

go from one product to the next in registers. T is made once a program, whatever the columns: unlike forward
substitution it costs no instructions for each of them. ``stages`` of the tile are the pieces of 16 rows of the state
that are on their way at a time.

Numerics: X and T in three bf16 parts each, whose products of more than 2^-24 are all there, as fp32 would have them.
"""

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.gdn_verify.substitution import identity, substitute
from kernels_pallas.mosaic import BLOCK
from kernels_pallas.precise import bf16_parts
from kernels_pallas.shapes import padded_nodes
from kernels_pallas.tiles import Tile

SWIZZLE = 32  # bytes, of what tensor cores read in shared memory
DEPTH = 16  # rows of the state that a tensor-core instruction takes
PARTS = 2  # bf16 parts of a number of the state


def shared_bytes(tile: Tile, nodes: int) -> int:
    """What ``scratch`` asks for."""
    block, columns = padded_nodes(nodes), tile.columns
    tiled = 3 * block * block + 2 * BLOCK * block
    return 2 * (tiled + block * columns) + 4 * block * columns


def scratch(tile: Tile, nodes: int, interpret: bool) -> dict[str, Any]:
    """Shared memory of a program: o takes the place of v, and u that of T."""
    block, columns = padded_nodes(nodes), tile.columns
    return {
        "v_or_o": plgpu.SMEM((block, columns), jnp.bfloat16),
        "t_or_u": plgpu.SMEM((block, columns), jnp.float32),
        "inverse": mosaic.tiled((block, 3 * block), SWIZZLE),
        "weights": mosaic.tiled((BLOCK, 2 * block), SWIZZLE),
        "lines": plgpu.SMEM((3, BLOCK), jnp.float32),
        "v_loaded": plgpu.Barrier(),
        "wide_copy": plgpu.SMEM((BLOCK, block), jnp.bfloat16) if interpret else None,
        "narrow_copy": plgpu.SMEM((BLOCK, DEPTH), jnp.bfloat16) if interpret else None,
    }


def ask(s_ref, v_ref, j, tile: Tile, smem: dict[str, Any]):
    """The first pieces of the state [dk, dv], then the others as they are taken; v [N, dv] is on its way."""
    own = pl.ds(j * tile.columns, tile.columns)
    plgpu.copy_gmem_to_smem(v_ref.at[:, own], smem["v_or_o"].at[pl.ds(0, v_ref.shape[0])], smem["v_loaded"])
    layout = mosaic.interleaved(tile.columns)
    later = (mosaic.load(s_ref.at[pl.ds(i, DEPTH), own], layout) for i in range(0, s_ref.shape[0], DEPTH))
    return collections.deque(itertools.islice(later, tile.stages)), later


def take(asked, tree, kq_smem, out, j, scale: float, smem: dict[str, Any]) -> None:
    """Compute u and o of the columns; ``out`` are their places, refs [N, dv]."""
    o_ref, u_ref = out
    nodes, (block, columns) = u_ref.shape[0], smem["t_or_u"].shape
    own = pl.ds(j * columns, columns)
    interpret = smem["narrow_copy"] is not None

    for i, numbers in enumerate((tree.from_root, tree.beta, tree.real)):
        smem["lines"][i, :] = numbers
    _put_parts(smem["weights"], tree.weights, 2)
    mosaic.meet()

    # T: its columns are those of I with the substitution done.
    t_smem = smem["t_or_u"].at[:, pl.ds(0, block)]
    t_smem[...] = identity(block)
    mosaic.meet()
    substitute(t_smem, block, tree.m, t_smem, interpret)
    mosaic.meet()
    neighbours = min(4, block // 8)
    _put_parts(smem["inverse"], mosaic.load(t_smem, mosaic.pieces(2 * neighbours, 16, neighbours)), 3)
    plgpu.commit_smem()

    # S^T [K; Q]^T
    def project(*accs) -> list[jax.Array]:
        coming, later = asked
        for i in range(0, kq_smem.shape[1], DEPTH):
            s = coming.popleft()
            coming.extend(itertools.islice(later, 1))
            right = kq_smem.at[pl.ds(0, 2 * block), pl.ds(i, DEPTH)].T
            for acc, x in zip(accs, mosaic.turn(s, interpret), strict=True):
                for part in reversed(bf16_parts(x, PARTS)):  # small numbers first
                    plgpu.wgmma(acc, mosaic.operand(part, smem["narrow_copy"]), right)
            plgpu.wgmma_wait(PARTS * len(accs))
        return [acc[...] for acc in accs]

    accs = (plgpu.ACC((BLOCK, 2 * block), jnp.float32) for _ in range(columns // BLOCK))
    products = pl.run_scoped(project, *accs)

    def by_node(i: int) -> jax.Array:
        numbers = mosaic.load(smem["lines"].at[i, pl.ds(0, block)], plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(numbers, (BLOCK, block), (1,))

    from_root, beta, real = by_node(0), by_node(1), by_node(2) != 0
    weights = smem["weights"].at[pl.ds(block % BLOCK, block)]
    plgpu.barrier_wait(smem["v_loaded"])
    vs = mosaic.turn(mosaic.load(smem["v_or_o"], mosaic.interleaved(columns)).astype(jnp.float32), interpret)
    us, os = [], []
    for product, v in zip(products, vs, strict=True):
        committed = from_root * product[:, :block], scale * from_root * product[:, block:]
        x, x_query = (jnp.where(real, y, jnp.zeros_like(y)) for y in (beta * (v - committed[0]), committed[1]))
        us.append(_times(x, smem["inverse"], 3, smem["wide_copy"]))
        os.append(x_query + _times(us[-1], weights, 2, smem["wide_copy"]))
    smem["t_or_u"][...] = mosaic.turn_back(us, interpret)
    smem["v_or_o"][...] = mosaic.turn_back(os, interpret).astype(jnp.bfloat16)
    plgpu.commit_smem()
    for name, ref in (("t_or_u", u_ref), ("v_or_o", o_ref)):
        plgpu.copy_smem_to_gmem(smem[name].at[pl.ds(0, nodes)], ref.at[:, own])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _put_parts(ref, x: jax.Array, parts: int) -> None:
    """bf16 parts of x side by side."""
    for i, part in enumerate(bf16_parts(x, parts)):
        ref[:, pl.ds(i * x.shape[1], x.shape[1])] = part


def _times(left: jax.Array, right, parts: int, copy_ref) -> jax.Array:
    """``left`` [64, N] times the transpose of what ``right`` holds in parts side by side; small products first."""
    block, lefts = left.shape[1], bf16_parts(left, parts)
    pairs = [(i, k) for i in range(parts) for k in range(parts - i)]
    return mosaic.product(
        (mosaic.operand(lefts[i], copy_ref), right.at[:, pl.ds(k * block, block)].T)
        for i, k in sorted(pairs, key=sum, reverse=True)
    )
