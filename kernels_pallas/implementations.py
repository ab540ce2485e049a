"""The choice of an implementation by name, the same for every op.

The choice is an argument and never an environment variable or a global. A name that cannot run fails at once and says
why; only ``None`` may pick for itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax

Implementation = Literal["reference", "mosaic_gpu", "triton"]

F = TypeVar("F", bound=Callable[..., Any])

_KNOWN = ("reference", "mosaic_gpu", "triton")


def no_gpu() -> str | None:
    """Why no kernel for an NVIDIA GPU can run here, or None if there is such a GPU."""
    backend = jax.default_backend()
    return None if backend == "gpu" else f"it needs an NVIDIA GPU, the default backend is {backend!r}"


def choose(
    op: str, implementation: str | None, available: Mapping[str, F], cannot: Mapping[str, str | None] | None = None
) -> F:
    """The function of ``available`` that ``implementation`` names; for ``None`` the first one that can run.

    ``available`` is ordered, the best first; ``cannot`` says of some of them why they cannot run on these inputs here
    (None: they can).

    Raises ``ValueError`` for a name that is unknown, not written for this op, or cannot run.
    """
    cannot = cannot or {}
    if implementation is None:
        return next(run for name, run in available.items() if cannot.get(name) is None)
    if implementation in available:
        reason = cannot.get(implementation)
        if reason is None:
            return available[implementation]
        raise ValueError(f"implementation {implementation!r} of {op} cannot run: {reason}")
    why = f"is not written for {op} yet" if implementation in _KNOWN else "is unknown"
    raise ValueError(f"implementation {implementation!r} {why}: {op} has {', '.join(map(repr, available))}, or None")
