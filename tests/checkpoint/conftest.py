"""Checkpoints with faults, made by editing the small ones."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

GDN = Path(__file__).parents[1] / "data" / "gdn"


@pytest.fixture
def gdn() -> Path:
    """The folder of reference checkpoints."""
    return GDN


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Copies a checkpoint into tmp_path/src as one safetensors file, with changes; a tensor of None is dropped."""

    def edit(name: str = "base", tensors: Mapping[str, np.ndarray | None] = {}, config: Mapping[str, Any] = {}) -> Path:
        folder = tmp_path / "src"
        folder.mkdir()
        state: dict[str, np.ndarray | None] = {}
        for file in (GDN / name).glob("model*.safetensors"):
            state |= load_file(file)
        state |= tensors
        save_file({k: np.ascontiguousarray(v) for k, v in state.items() if v is not None}, folder / "model.safetensors")
        raw = json.loads((GDN / name / "config.json").read_text()) | dict(config)
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return edit
