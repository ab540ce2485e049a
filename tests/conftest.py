"""Settings and fixtures shared by the tests."""

import os

# Tests compile far longer than they run; without LLVM's optimisations they compile in two thirds of the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import pytest

from reference import Reference, load_reference, names


@pytest.fixture(scope="session", params=names())
def reference(request: pytest.FixtureRequest) -> Reference:
    """Each of the reference checkpoints in turn, loaded anew so that its programs are freed with it.

    Every program is some hundreds of memory maps, and a process may have 65,530 of them.
    """
    return load_reference(request.param)


@pytest.fixture(scope="session")
def base() -> Reference:
    """The plainest of them."""
    return load_reference("base")
