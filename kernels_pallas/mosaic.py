"""What the Pallas Mosaic GPU kernels share: matrices on their side for the tensor cores, fp32 numbers in bf16 parts.

A tensor-core instruction takes its left operand from registers, 64 rows of it. A state [dk, dv] comes from memory with
dv along the lines, and the products want dv as the 64 rows: ``interleaved`` is how threads load it so that each holds
just the numbers that it must hand to the tensor cores, ``turn`` the renaming, ``turn_back`` its inverse for what goes
to memory again. Nothing passes through shared memory and no number changes its thread.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.implementations import no_gpu

BLOCK = 64  # rows of one tensor-core instruction


def why_not() -> str | None:
    """Why no Mosaic GPU kernel of this package can run here, or None if they can."""
    if reason := no_gpu():
        return reason
    capability = str(jax.devices()[0].compute_capability)
    if capability != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0), this one has {capability}"
    return unsupported()


def unsupported() -> str | None:
    """Why this JAX has no such kernels, or None if it has."""
    if jax.__version_info__ < (0, 11):
        return f"the Mosaic GPU kernel needs jax 0.11 or newer, this is {jax.__version__}"
    return None


def params():
    """No barriers but those that the kernel asks for, and no layouts but those that it names.

    Inferring the layouts of all these scalars and vectors takes many times longer, for about as many instructions.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def load(ref, layout, optimized: bool = False) -> jax.Array:
    """What ``ref`` holds, spread over the threads; if ``optimized``, an error where banks would conflict."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyrefly: ignore[missing-argument]


def load_of(ref, layout, *, axis: int, program: int) -> jax.Array:
    """What ``ref`` of another program of the cluster holds, ``load``ed from there: the one at ``program`` of an axis.

    Between the other's stores and this there must be ``commit_smem``, by which they are in shared memory, and a barrier
    of the cluster. A release for the cluster would do the same, and wait for all of global memory besides.
    """
    made = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=made)
    def read(_, ref):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import gpu
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        theirs = utils.get_cluster_ref(ref, gpu.Dimension(axis), utils.c(program, ir.IndexType.get()))
        return mgpu.FragmentedArray.load_untiled(theirs, layout=layout.to_mgpu(), optimized=False)

    return read(ref)


def meet() -> None:
    """A barrier of the warpgroup, for what plain stores hand to plain loads.

    No copy is under way when it is called, so waiting for copies is nothing but the barrier behind it. Unlike
    ``commit_smem`` it does not wait for loads that are on their way.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def multiprocessors() -> int:
    """Of the first device; those of an H200 where there is no GPU."""
    return jax.devices()[0].core_count if jax.default_backend() == "gpu" else 132


def arrive(counter) -> None:
    """Add 1 to ``counter``, an int32 in global memory.

    What the warpgroup has written to global memory before a barrier of its own, or copied and waited for, is seen by
    whoever ``wait_for`` lets pass. The release is needed for copies too: others do not always see at once what the wait
    for a copy says is there.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, ref) -> None:
        _by_one_thread(ref, [], "@$0 red.release.gpu.global.add.s32 [$1], 1;")

    add(counter)


def wait_for(counter, count: int) -> None:
    """Wait until ``counter`` is ``count``, and for the other threads. What was counted may be read, by TMA too."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def poll(_, ref) -> None:
        asm = """{
            .reg .pred few;
            .reg .s32 seen;
            @!$0 bra past_${:uid};
            again_${:uid}:
            ld.acquire.gpu.global.s32 seen, [$1];
            setp.lt.s32 few, seen, $2;
            @few bra again_${:uid};
            fence.proxy.async.global;
            past_${:uid}:
        }"""
        _by_one_thread(ref, [count], asm)

    poll(counter)
    meet()


def _by_one_thread(ref, numbers: list[int], asm: str) -> None:
    """Inline PTX: $0 is true for one thread of the warpgroup, the one that asks for copies; $1 is the address."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import llvm
    from jax.experimental.mosaic.gpu import utils

    i32 = ir.IntegerType.get_signless(32)
    values = [utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP), utils.memref_ptr(ref)]
    values += [utils.c(number, i32) for number in numbers]
    kinds = ",".join(["b", "l", *("r" for _ in numbers)])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), values, asm, kinds, has_side_effects=True)


def tiled(shape: tuple[int, ...], swizzle: int):
    """bf16 in shared memory as the tensor cores read it."""
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def spread(size: int):
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


def holds(size: int, interpret: bool):
    """Whether the own warp is the first of those that hold the same numbers of a vector ``spread`` over the threads."""
    if interpret:
        return True
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(), return_type=scalar)
    def warp(_):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        return mgpu.FragmentedArray.splat(utils.warp_idx(), (), is_signed=True)

    return warp() % (2 if size % 64 == 0 else 4) == 0


def pieces(rows: int, columns: int, vector: int):
    """Layout of a matrix: a warp holds pieces of ``rows`` x ``columns``, a thread ``vector`` neighbours of a row.

    16 columns are what a row of the tensor cores' tiles in shared memory holds where the swizzle is 32 bytes.
    """
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4 * rows, columns), (rows, columns), (vector,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def operand(left: jax.Array, copy_ref):
    """``left`` as tensor cores take it: from registers. The interpreter takes it from shared memory, ``copy_ref``."""
    if copy_ref is None:
        return left
    copy_ref[...] = left
    return copy_ref


def product(pairs: Iterable[tuple[Any, Any]]) -> jax.Array:
    """The sum of ``left @ right`` [64, n] in fp32 over the pairs; the right ones are in shared memory."""
    pairs = iter(pairs)
    first = next(pairs)

    def multiply(acc):
        for left, right in itertools.chain([first], pairs):
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((BLOCK, first[1].shape[1]), jnp.float32))


def accumulate(start: jax.Array, multiply: Callable[[Any], None], interpret: bool) -> jax.Array:
    """fp32 ``start`` [64, n] and what ``multiply`` adds to the accumulator that it is given."""
    if interpret:  # the interpreter has no accumulator with a start
        rows, columns = start.shape

        def multiply_only(acc):
            multiply(acc)
            return acc[...]

        return start + pl.run_scoped(multiply_only, plgpu.ACC((rows, columns), jnp.float32))
    accumulator: Any = plgpu.ACC.init(start)
    return pl.run_state(multiply)(accumulator)


def interleaved(columns: int):
    """Layout of [8 i, columns], columns 64, 128 or 256: of 8 rows a thread holds two, of a row neighbouring columns."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, columns), (8, columns // 4), (8, columns // 8), (2, columns // BLOCK))),
        warp_dims=(-7,),
        lane_dims=(-3, -4),
        vector_dim=-1,
    )


def turn(x: jax.Array, interpret: bool) -> list[jax.Array]:
    """fp32 x [rows, columns], ``interleaved``, as n = columns / 64 matrices [64, rows], of every nth column."""
    rows, columns = x.shape
    count = columns // BLOCK
    if interpret:
        return [x[:, m::count].T for m in range(count)]
    turned = plgpu.ShapeDtypeStruct((BLOCK, rows), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(interleaved(columns),), return_type=(turned,) * count)
    def rename(_, array):
        old = array.registers.reshape(rows // 8, 2, 2)  # eight rows, half of the warp's columns, row of a pair
        return tuple(
            _array(plgpu.Layout.WGMMA, (BLOCK, rows), [[_pick(pair, m) for pair in halves] for halves in old])
            for m in range(count)
        )

    return list(rename(x))


def turn_back(xs: list[jax.Array], interpret: bool) -> jax.Array:
    """fp32 matrices [64, rows], one from each of the columns that ``turn`` tells apart, as [rows, columns]."""
    rows, columns = xs[0].shape[1], BLOCK * len(xs)
    if interpret:
        return jnp.stack([x.T for x in xs], axis=-1).reshape(rows, columns)
    layout = interleaved(columns)
    whole = plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * len(xs), return_type=whole)
    def rename(_, *arrays):
        old = np.stack([array.registers.reshape(rows // 8, 2) for array in arrays], axis=-1)
        new = [[[_pick(vectors, e) for e in range(2)] for vectors in halves] for halves in old]
        return _array(layout, (rows, columns), new)

    return rename(*xs)


def _pick(vectors, i: int):
    """The ith numbers of registers, in one register."""
    from jax.experimental.mosaic.gpu import utils

    return utils.vector_concat([utils.vector_slice(vector, slice(i, i + 1)) for vector in vectors])


def _array(layout, shape: tuple[int, int], registers):
    from jax.experimental.mosaic import gpu as mgpu

    layout = layout.to_mgpu()
    registers = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
