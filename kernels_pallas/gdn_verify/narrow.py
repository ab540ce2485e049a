"""The columns of a verification program for few heads: 16 or 32 of dv. See ``mosaic_gpu.py``.

64 rows of the state at a time are cut into bf16 parts in shared memory; [K; Q] times all of them is summed in one
accumulator, which gives X and X'. Then forward substitution and M' U on the tensor cores.

Columns are few so that there are more programs than multiprocessors; each then has all of its state on the way at once.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.gdn_verify.substitution import substitute
from kernels_pallas.mosaic import BLOCK
from kernels_pallas.precise import bf16_parts
from kernels_pallas.shapes import padded_nodes
from kernels_pallas.tiles import Tile

SWIZZLE = 128  # bytes, of [K; Q] in shared memory
PARTS = 2  # bf16 parts of a number of the state
SKEW = 8  # numbers between the rows of X, which puts the eight rows that a store writes into different banks
DEPTH = 64  # rows of the state that are cut into parts at a time


def shared_bytes(tile: Tile, nodes: int) -> int:
    """What ``scratch`` asks for."""
    block, columns = padded_nodes(nodes), tile.columns
    values = 2 * block * columns + BLOCK * (columns + _v_columns(columns, nodes))
    plain = BLOCK * (columns + SKEW) + block * columns
    return 2 * (tile.stages * DEPTH * PARTS * columns + values) + 4 * plain


def scratch(tile: Tile, nodes: int, interpret: bool) -> dict[str, Any]:
    """Shared memory of a program."""
    block, columns = padded_nodes(nodes), tile.columns
    return {
        "s": mosaic.tiled((tile.stages, DEPTH, PARTS * columns), 32),
        "u": mosaic.tiled((block, 2 * columns), 32),
        "v": mosaic.tiled((BLOCK, columns), 2 * columns)
        if nodes % 8 == 0
        else plgpu.SMEM((BLOCK, _v_columns(columns, nodes)), jnp.bfloat16),
        "o": plgpu.SMEM((BLOCK, columns), jnp.bfloat16),
        "x": plgpu.SMEM((BLOCK, columns + SKEW), jnp.float32),
        "value": plgpu.SMEM((block, columns), jnp.float32),
        "v_loaded": plgpu.Barrier(),
        "wide_copy": plgpu.SMEM((BLOCK, DEPTH), jnp.bfloat16) if interpret else None,
        "narrow_copy": plgpu.SMEM((BLOCK, block), jnp.bfloat16) if interpret else None,
    }


def _v_columns(columns: int, nodes: int) -> int:
    """Columns of v that a program copies: its own, or more, as a copy must be a multiple of 128 bytes."""
    return columns if columns * nodes % 64 == 0 else 64


def _v_start(smem: dict[str, Any], j) -> tuple[Any, int]:
    """The first of the own columns among those that are copied, and how many those are."""
    columns, copied = smem["o"].shape[1], smem["v"].shape[1]
    return (0 if copied == columns else j * columns % copied), copied


def ask(s_ref, v_ref, j, tile: Tile, smem: dict[str, Any]) -> list[jax.Array]:
    """The state [dk, dv] of the columns, and their v [N, dv] on its way."""
    first = j * tile.columns
    v_start, copied = _v_start(smem, j)
    plgpu.copy_gmem_to_smem(
        v_ref.at[:, pl.ds(first - v_start, copied)], smem["v"].at[pl.ds(0, v_ref.shape[0])], smem["v_loaded"]
    )
    own = pl.ds(first, tile.columns)
    cuts = range(0, s_ref.shape[0], DEPTH)
    return [mosaic.load(s_ref.at[pl.ds(start, DEPTH), own], mosaic.pieces(8, 16, 4)) for start in cuts]


def take(asked: list[jax.Array], tree, kq_smem, out, j, scale: float, smem: dict[str, Any]) -> None:
    """Compute u and o of the columns; ``out`` are their places, refs [N, dv]."""
    o_ref, u_ref = out
    nodes, block, columns = u_ref.shape[0], smem["u"].shape[0], smem["o"].shape[1]
    own = pl.ds(j * columns, columns)
    stages = smem["s"].shape[0]
    row_blocks = range(0, kq_smem.shape[0], BLOCK)

    def across(vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (BLOCK, columns), (0,))

    # [K; Q] S, then X and X'.
    def project(*accs) -> list[jax.Array]:
        for i, s in enumerate(asked):
            if i >= stages:  # all warps are done with what the ring held
                plgpu.wgmma_wait(PARTS * len(accs) * (stages - 1))
                mosaic.meet()
            stage, cut = smem["s"].at[i % stages], pl.ds(i * DEPTH, DEPTH)
            for part, x in enumerate(bf16_parts(s, PARTS)):
                stage[:, pl.ds(part * columns, columns)] = x
            plgpu.commit_smem()
            for m, acc in zip(row_blocks, accs, strict=True):
                left = mosaic.load(kq_smem.at[pl.ds(m, BLOCK), cut], plgpu.Layout.WGMMA, optimized=True)
                left = mosaic.operand(left, smem["wide_copy"])
                for part in reversed(range(PARTS)):  # small numbers first
                    plgpu.wgmma(acc, left, stage.at[:, pl.ds(part * columns, columns)])
        return [acc[...] for acc in accs]

    # v is needed later, but behind this wait the compiler leaves what waits for the state, which would hold up M.
    plgpu.barrier_wait(smem["v_loaded"])
    products = pl.run_scoped(project, *(plgpu.ACC((BLOCK, columns), jnp.float32) for _ in row_blocks))
    v_start, copied = _v_start(smem, j)
    v = smem["v"] if copied == columns else smem["v"].at[:, pl.ds(v_start, columns)]
    v = mosaic.load(v, plgpu.Layout.WGMMA).astype(jnp.float32)
    x_smem = smem["x"].at[:, pl.ds(0, columns)]
    x = v
    for m, product in zip(row_blocks, products, strict=True):
        committed = across(tree.from_root) * product
        row = plgpu.broadcasted_iota(jnp.int32, (BLOCK, columns), 0, layout=plgpu.Layout.WGMMA)
        x = jnp.where(row >= block - m, scale * committed, across(tree.beta) * (v - committed))
        x = jnp.where(across(tree.real) != 0, x, jnp.zeros_like(x))
        if m == 0:
            x_smem[...] = x
    mosaic.meet()

    substitute(x_smem, block, tree.m, smem["value"], interpret=smem["wide_copy"] is not None)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem["value"].at[pl.ds(0, nodes)], u_ref.at[:, own])

    # o, of the last rows of [K; Q]: those of queries.
    neighbours = min(4, block // 8)
    value = mosaic.load(smem["value"], mosaic.pieces(2 * neighbours, 16, neighbours))
    for part, half in enumerate(bf16_parts(value, 2)):
        smem["u"][:, pl.ds(part * columns, columns)] = half
    plgpu.commit_smem()
    weights = (mosaic.operand(part, smem["narrow_copy"]) for part in bf16_parts(tree.weights, 2))
    drafted = mosaic.product(zip(weights, itertools.repeat(smem["u"])))
    smem["o"][...] = (x + (drafted[:, columns:] + drafted[:, :columns])).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem["o"].at[pl.ds(block % BLOCK, nodes)], o_ref.at[:, own])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
