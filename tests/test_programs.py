"""specla_jax/programs.py: where compiled programs are kept."""

from pathlib import Path

import jax
import pytest

from specla_jax.programs import keep_on_disk


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A GPU as far as the choice of the folder goes; puts JAX's settings back."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_enable_compilation_cache", before[1])


def test_programs_for_a_gpu_are_kept(gpu: None, tmp_path: Path) -> None:
    assert keep_on_disk() == tmp_path / "specla_jax"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "specla_jax")


def test_a_folder_that_is_set_stays(gpu: None) -> None:
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    assert keep_on_disk() is None
    assert jax.config.jax_compilation_cache_dir == "elsewhere"


def test_a_cache_that_is_off_stays_off(gpu: None) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    assert keep_on_disk() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_nothing_is_kept_without_a_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert keep_on_disk() is None
    assert jax.config.jax_compilation_cache_dir is None
