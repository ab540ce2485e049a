"""pytorch_model.bin: read with torch, only with torch, and never run."""

import os
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from specla_jax.checkpoint import convert, load_target
from specla_jax.checkpoint.layout import flatten
from specla_jax.errors import UserError


def silent(line: str) -> None:
    """Takes the place of print."""


def test_without_torch_the_error_says_what_to_install(gdn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    file = gdn / "torch-bin" / "pytorch_model.bin"
    line = f"{file} needs torch to read; run: pip install 'specla-jax[torch]'"
    with pytest.raises(UserError, match=re.escape(line)):
        convert(gdn / "torch-bin", tmp_path / "dst", report=silent)
    assert list(tmp_path.iterdir()) == []


def test_safetensors_are_preferred(make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    src = make()
    (src / "pytorch_model.bin").write_text("not read")
    load_target(src)


def test_tensors_of_a_bin_file(make, gdn: Path, tmp_path: Path):
    torch = pytest.importorskip("torch")
    state = torch.load(gdn / "torch-bin" / "pytorch_model.bin", weights_only=True)
    convert(gdn / "torch-bin", tmp_path / "dst", report=silent)
    params = flatten(load_target(tmp_path / "dst").params)
    np.testing.assert_array_equal(params["embeddings/embedding"], state["model.embeddings.weight"].numpy())
    np.testing.assert_array_equal(params["layers_1/attn/A_log"], state["model.layers.1.attn.A_log"].numpy())

    src = make()
    (src / "model.safetensors").unlink()
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    torch.save(half, src / "pytorch_model.bin")
    leaf = load_target(src, "bfloat16").params["embeddings"]["embedding"]
    assert leaf.dtype == jnp.bfloat16
    bits = half["model.embeddings.weight"].view(torch.int16).numpy()
    np.testing.assert_array_equal(np.asarray(leaf).view(np.int16), bits)

    torch.save([1, 2], src / "pytorch_model.bin")
    with pytest.raises(UserError, match="must hold a dictionary of tensors, as state_dict"):
        load_target(src)


class Command:
    """Runs a shell command when unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_hostile_pickle_is_not_run(make, tmp_path: Path):
    torch = pytest.importorskip("torch")
    src = make()
    (src / "model.safetensors").unlink()
    file = src / "pytorch_model.bin"
    torch.save({"model.norm.weight": Command(f"touch {tmp_path / 'ran'}")}, file)
    with pytest.raises(UserError) as caught:
        convert(src, tmp_path / "dst", report=silent)
    assert str(caught.value).startswith(f"cannot load {file} with weights_only=True: ")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
