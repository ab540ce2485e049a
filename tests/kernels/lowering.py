"""Lowering for a Hopper GPU on a machine without one: catches what interpretation forgives."""

import re

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

TRITON_CALL = "__gpu$xla.gpu.triton"


def lower_for_cuda(op, *specs) -> str:
    """The lowered module of ``op`` for arguments like ``specs`` (arrays or ``ShapeDtypeStruct``s)."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(op).trace(*specs).lower(lowering_platforms=("cuda",)).as_text()


def beside_kernels(text: str) -> set[str]:
    """The operations of a lowered module that are no custom calls."""
    return set(re.findall(r"(?<!#)stablehlo\.(\w+)", text)) - {"custom_call"}
