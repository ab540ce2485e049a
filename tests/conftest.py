"""Settings and fixtures shared by the tests."""

import gc
import importlib
import os
from pathlib import Path

# Tests compile far longer than they run. Without LLVM's optimisations, with the older of XLA's two code generators and
# with one piece of machine code a program, they compile in less than half of the time, into fewer memory maps.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1",
)

import jax
import pytest

from reference import Reference, load_reference, names

# Tracing makes many small objects that live long: looking for dead ones among them every 700 takes a tenth of the time.
gc.set_threshold(50_000, 10, 10)


# A program that holds a model's weights as constants is as large as they are, compiles slowly and cannot be cached. The
# weights of the tests' models are larger than this, and a warning is an error.
jax.config.update("jax_captured_constants_warn_bytes", 50_000)


@pytest.fixture(scope="session", params=names())
def reference(request: pytest.FixtureRequest) -> Reference:
    """Each of the reference checkpoints in turn, loaded anew so that its programs are freed with it.

    Every program is a hundred memory maps or more, and a process may have 65,530 of them.
    """
    return load_reference(request.param)


@pytest.fixture(scope="session")
def base() -> Reference:
    """The plainest of them."""
    return load_reference("base")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    """Imports a script by name, as Python does for the one it runs."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "scripts"))
    return importlib.import_module
