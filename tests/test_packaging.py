"""The repository as a whole: imports go one way, the README is true, and files speak of the product alone."""

import ast
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import jax
import pytest

from specla_jax import versions
from specla_jax.cli import build_parser, main
from specla_jax.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# From the top down: a package may import those after it.
LAYERS = ("scripts", "train_drafter", "specla_jax", "kernels_pallas")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def readme_commands():
    fenced = [line for block in blocks("bash") for line in block.splitlines()]
    inline = re.findall(r"`((?:make|\.venv/bin/\w+) [^`\n]+)`", README)
    return [shlex.split(command) for command in fenced + inline]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer):
    above = LAYERS[: LAYERS.index(layer)]
    files = list((ROOT / layer).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported(path)
        if name.partition(".")[0] in (*above, "tests")
    ]
    assert not wrong


def test_a_layer_above_would_be_found(tmp_path):
    (tmp_path / "module.py").write_text(
        "def f():\n    from train_drafter.data import prepare\n    import specla_jax.cli\n"
    )
    assert list(imported(tmp_path / "module.py")) == ["train_drafter.data", "specla_jax.cli"]


def test_every_readme_command_is_known():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = readme_commands()
    assert {"demo", "test"} <= {words[1] for words in commands if words[0] == "make"}
    for words in commands:
        if words[0] == "make":
            assert words[1] in targets
        elif words[-1] == "--help":
            assert words[1] in build_parser().format_help()
        elif words[0] == ".venv/bin/specla":
            build_parser().parse_args(words[1:])
        else:
            extra = re.search(r"\[(\w+)\]", words[-1])
            assert words[:4] == [".venv/bin/python", "-m", "pip", "install"]
            assert extra
            assert f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder in which paths of the repository hold, and what is written stays outside it."""
    (tmp_path / "specla_jax").symlink_to(ROOT / "specla_jax")
    monkeypatch.chdir(tmp_path)


def test_readme_commands_run_as_written(checkout, capfd):
    commands = [words[1:] for words in readme_commands() if words[0] == ".venv/bin/specla" and words[-1] != "--help"]
    assert len(commands) >= 5
    for arguments in commands:
        status = main(arguments)
        shown = capfd.readouterr()
        assert (arguments, status, shown.err if status else "") == (arguments, 0, "")
        assert shown.out.strip() or arguments[0] == "convert"


def test_readme_python_runs_as_written(checkout, capsys):
    (source,) = blocks("python")
    exec(compile(source, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("tokens a round") == 2


def test_readme_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_name_no_machine():
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    place = re.compile(rb"(?<![\w.~])/(?:root|work|home|Users|tmp)/|\.\./shared")
    wrong = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path == Path(__file__).resolve() or not path.is_file():
            continue
        data = path.read_bytes()
        if b"\0" not in data[:4096] and place.search(data):
            wrong.append(name)
    assert not wrong


def test_the_checked_jax_versions_are_the_declared_ones():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"][0]
    low, high = (".".join(map(str, bound)) for bound in (versions.OLDEST, versions.FIRST_UNTESTED))
    assert declared == f"jax>={low},<{high}"
    for version in ("0.10.2", "0.11.2", "0.12.0.1", jax.__version__):
        versions.check_jax(version)
    for version in ("0.10.1", "0.9.2", "0.13.0", "1.0.0"):
        with pytest.raises(UserError, match=f"jax must be at least .* got {version}"):
            versions.check_jax(version)
