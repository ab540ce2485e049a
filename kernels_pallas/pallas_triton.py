"""What the Pallas-Triton kernels share: fp32-accurate products on tensor cores, and when they can run.

Tensor cores multiply bf16 by bf16, or TF32 by TF32, exactly and add in fp32. An fp32 number is the exact sum of three
bf16 numbers of 8 bits each, and to 22 bits the sum of two TF32 numbers of 11.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from kernels_pallas.implementations import no_gpu
from kernels_pallas.precise import bf16_parts


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` of [M, K] and [K, N] in fp32, nearly as accurate as fp32 products; bf16 or fp32 on either side.

    bf16 times bf16 is exact in one product. Beside a bf16 side an fp32 side goes in three bf16 parts, 24 bits. Two fp32
    sides go in two TF32 parts each, 22 bits, and the product of the low parts is left out.
    """
    if a.dtype == b.dtype == jnp.bfloat16:
        return pltriton.dot(a, b)
    if jnp.bfloat16 in (a.dtype, b.dtype):
        high, *small = [(x, y) for x in _parts(a) for y in _parts(b)]
    else:
        (a_high, a_low), (b_high, b_low) = _split_tf32(a), _split_tf32(b)
        high, *small = (a_high, b_high), (a_high, b_low), (a_low, b_high)
    rest = [pltriton.dot(x, y, allow_tf32=True) for x, y in small]
    return pltriton.dot(*high, allow_tf32=True) + (rest[0] + rest[1])


def _parts(x: jax.Array) -> list[jax.Array]:
    return [x] if x.dtype == jnp.bfloat16 else bf16_parts(x.astype(jnp.float32), 3)


def _split_tf32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -(2**13), jnp.float32)
    return high, x - high


def params(warps: int, stages: int = 1) -> pltriton.CompilerParams:
    """Compiler parameters; naming the class keeps the choice of the backend ours in every JAX version."""
    return pltriton.CompilerParams(num_warps=warps, num_stages=stages)


def why_not(*sizes: int) -> str | None:
    """Why the kernels cannot run here for head sizes ``sizes``, or None if they can."""
    return no_gpu() or unsupported(*sizes)


def unsupported(*sizes: int) -> str | None:
    """Why head sizes ``sizes`` do not suit the kernels, or None if they do."""
    bad = [size for size in sizes if size not in (16, 32, 64, 128, 256)]
    return f"head sizes must be 16, 32, 64, 128 or 256, got {bad[0]}" if bad else None
