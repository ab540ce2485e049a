"""The choice of an implementation by name, the same for every op.

The choice is an argument and never an environment variable or a global. A name that cannot run fails at once and says
why; only ``None`` may pick for itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

Implementation = Literal["reference", "mosaic_gpu", "triton"]

F = TypeVar("F", bound=Callable[..., Any])

_KNOWN = ("reference", "mosaic_gpu", "triton")


def choose(op: str, implementation: str | None, available: Mapping[str, F]) -> F:
    """The function of ``available`` that ``implementation`` names; the first one for ``None``.

    Raises ``ValueError`` for a name that is unknown, or known but not written for this op.
    """
    if implementation is None:
        return next(iter(available.values()))
    if implementation in available:
        return available[implementation]
    why = f"is not written for {op} yet" if implementation in _KNOWN else "is unknown"
    raise ValueError(f"implementation {implementation!r} {why}: {op} has {', '.join(map(repr, available))}, or None")
