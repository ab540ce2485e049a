"""Compiled programs, kept by what they were compiled for, so that compilations can be counted and timed."""

import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax


def keep_on_disk() -> Path | None:
    """What is compiled for a GPU from here on is read from disk by the next process; returns the folder.

    It is ``specla_jax`` in ``XDG_CACHE_HOME`` (``~/.cache``). None, and nothing changes, without a GPU, where JAX's
    cache has a folder already (``JAX_COMPILATION_CACHE_DIR``), or is off (``JAX_ENABLE_COMPILATION_CACHE=false``).
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return None
    if jax.default_backend() != "gpu":
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specla_jax"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


@dataclass
class Programs:
    """Ahead-of-time compiled functions of one model, and what was worked out about them.

    Attributes:
      count: programs compiled so far.
      seconds: time spent compiling them, added up where several were compiled at the same time.
    """

    count: int = 0
    seconds: float = 0.0
    _known: dict[Hashable, Future] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def get(self, owner: Hashable, method: str, params: Any, carry: Any) -> Callable[..., Any]:
        """``owner.method(params, carry)`` compiled for arguments of this structure, shape and dtype; donates ``carry``.

        ``owner`` must be equal for equal computations, as a frozen dataclass is. (A bound method would not do as a
        key: two of them are equal only if they belong to the very same object.)
        """

        def compile() -> Any:
            start = time.perf_counter()
            program = jax.jit(getattr(owner, method), donate_argnums=1).lower(params, carry).compile()
            with self._lock:
                self.seconds += time.perf_counter() - start
                self.count += 1
            return program

        return self.remember((owner, method), params, carry, compile)

    def remember(self, key: Hashable, params: Any, carry: Any, compute: Callable[[], Any]) -> Any:
        """``compute()``, done once for a key and the shapes of the arguments; others who ask meanwhile wait for it."""
        leaves, structure = jax.tree.flatten((params, carry))
        full_key = (key, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        with self._lock:
            known, mine = self._known.get(full_key), Future()
            if known is None:
                self._known[full_key] = mine
        if known is None:
            try:
                mine.set_result(compute())
            except BaseException as error:
                with self._lock:
                    del self._known[full_key]
                mine.set_exception(error)
        return (known or mine).result()
