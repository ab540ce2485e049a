"""A destination is whole or not there, and nothing of the user's is lost."""

from pathlib import Path

import pytest

from specla_jax.checkpoint import convert, export, load_target
from specla_jax.checkpoint.folders import new_folder
from specla_jax.errors import UserError


def silent(line: str) -> None:
    """Takes the place of print."""


def fails(src: Path, dst: Path, *, overwrite: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        convert(src, dst, overwrite=overwrite, report=silent)
    return str(caught.value)


def test_parents_and_empty_folders(gdn: Path, tmp_path: Path):
    convert(gdn / "base", tmp_path / "a" / "b" / "dst", report=silent)
    (tmp_path / "empty").mkdir()
    convert(gdn / "base", tmp_path / "empty", report=silent)
    assert load_target(tmp_path / "empty").config.hidden_size == 64
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["dst"]


def test_a_taken_destination(gdn: Path, tmp_path: Path):
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "thesis.txt").write_text("mine")
    assert fails(gdn / "base", dst) == (
        f"{dst} exists and is not empty; name another folder, or pass --overwrite to replace it"
    )
    assert fails(gdn / "base", dst, overwrite=True) == (
        f"{dst} is not a model folder (no config.json), so it is not replaced; name another folder"
    )
    assert fails(gdn / "base", dst / "thesis.txt", overwrite=True) == f"{dst / 'thesis.txt'} is a file; name a folder"
    assert fails(gdn / "base", dst / "thesis.txt" / "x").startswith(f"cannot write {dst / 'thesis.txt' / 'x'}: ")
    assert (dst / "thesis.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_overwrite_replaces_only_after_success(make, gdn: Path, tmp_path: Path):
    dst = tmp_path / "dst"
    convert(gdn / "gva", dst, report=silent)
    src = make(tensors={"model.norm.weight": None})
    assert "missing: model.norm.weight" in fails(src, dst, overwrite=True)
    assert load_target(dst).config.num_v_heads == 4
    convert(gdn / "base", dst, overwrite=True, report=silent)
    assert load_target(dst).config.num_v_heads == 2
    export(dst, tmp_path / "fla", report=silent)
    with pytest.raises(UserError, match="exists and is not empty"):
        export(dst, tmp_path / "fla", report=silent)
    export(dst, tmp_path / "fla", overwrite=True, report=silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "fla", "src"]


def test_a_failed_swap_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "config.json").write_text("old")
    rename = Path.rename

    def no_partial(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", no_partial)
    with pytest.raises(UserError, match="cannot write .*: No space left on device"):  # noqa: SIM117
        with new_folder(dst, overwrite=True) as work:
            (work / "config.json").write_text("new")
    assert (dst / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_source_and_destination_do_not_overlap(make, gdn: Path, tmp_path: Path):
    src = make()
    (tmp_path / "link").symlink_to(src)
    for dst in (src, src / "inside", tmp_path, tmp_path / "link", src / ".." / "src"):
        assert fails(src, dst, overwrite=True) == (
            f"{dst} must be outside the source folder, and not hold it; name another destination"
        )
    assert sorted(path.name for path in src.iterdir()) == ["config.json", "model.safetensors"]


def test_an_interruption_leaves_nothing(gdn: Path, tmp_path: Path):
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(gdn / "legacy-shards", tmp_path / "new" / "dst", report=interrupt)
    assert list(tmp_path.iterdir()) == []
