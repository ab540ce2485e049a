"""What is kept: bits, dtypes, configuration and tokenizer, through convert, export and load."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specla_jax.checkpoint import convert, export, load_target, parameter_shapes, write_fla
from specla_jax.checkpoint.fla_folder import write_leaves
from specla_jax.checkpoint.folders import read_config
from specla_jax.checkpoint.layout import flatten, parameter_pieces, unflatten
from specla_jax.checkpoint.tensor_files import write_tensors
from specla_jax.config import TargetConfig

BF16 = jnp.dtype("bfloat16")
NAMES = ["base", "bf16", "gva", "legacy-shards", "neg-eigval", "no-conv", "no-gate", "square", "tied", "torch-bin"]


def silent(line: str) -> None:
    """Takes the place of print."""


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of an fla folder of safetensors."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        assert np.asarray(got[name]).tobytes() == np.asarray(array).tobytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_convert_export_convert_is_bit_equal(gdn: Path, tmp_path: Path, name: str):
    if name == "torch-bin":
        pytest.importorskip("torch")
    src = gdn / name
    first, fla, second, again = (tmp_path / leaf for leaf in ("first", "fla", "second", "again"))
    convert(src, first, report=silent)
    export(first, fla, report=silent)
    convert(fla, second, report=silent)
    export(second, again, report=silent)
    assert_bits(stored(again), stored(fla))
    assert (fla / "config.json").read_text() == (again / "config.json").read_text()
    assert read_config(first) == read_config(src) == read_config(fla)

    if name not in ("torch-bin", "legacy-shards"):
        assert_bits(stored(fla), stored(src))
    if name == "legacy-shards":  # only the gate tensors keep their names and shapes there
        original, exported = stored(src), stored(fla)
        gates = [key for key in exported if key.endswith(("A_log", "dt_bias"))]
        assert_bits({key: exported[key] for key in gates}, {key: original[key] for key in gates})

    dtype = "bfloat16" if name == "bf16" else "float32"
    direct, converted = (flatten(load_target(folder, dtype).params) for folder in (src, first))
    assert_bits(converted, direct)


def test_bfloat16_is_exact_and_the_gates_stay_float32(gdn: Path, tmp_path: Path):
    raw = stored(gdn / "bf16")
    params = flatten(load_target(gdn / "bf16", "bfloat16").params)
    assert raw["lm_head.weight"].dtype == BF16
    assert params["embeddings/embedding"].dtype == BF16
    bits = np.asarray(params["embeddings/embedding"]).view(np.uint16)
    np.testing.assert_array_equal(bits, raw["model.embeddings.weight"].view(np.uint16))
    for path, leaf in params.items():
        assert leaf.dtype == (np.float32 if path.endswith(("A_log", "dt_bias")) else BF16), path
    wide = flatten(load_target(gdn / "bf16", "float32").params)
    np.testing.assert_array_equal(wide["norm/scale"], raw["model.norm.weight"].astype(np.float32))


def test_dtype_casts_all_but_the_gates(gdn: Path, tmp_path: Path):
    convert(gdn / "base", tmp_path / "dst", dtype="bfloat16", report=silent)
    raw = stored(gdn / "base")
    export(tmp_path / "dst", tmp_path / "fla", report=silent)
    for key, tensor in stored(tmp_path / "fla").items():
        expected = raw[key] if key.endswith(("A_log", "dt_bias")) else raw[key].astype(BF16)
        assert_bits({key: tensor}, {key: expected})
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["torch_dtype"] == config["specla"]["dtype"] == "bfloat16"


def test_bfloat16_gates_in_the_file_become_float32(make):
    src = make(tensors={"model.layers.0.attn.A_log": np.array([0.5, 1.5], BF16)})
    leaf = load_target(src, "bfloat16").params["layers_0"]["attn"]["A_log"]
    assert leaf.dtype == np.float32
    np.testing.assert_array_equal(leaf, [0.5, 1.5])


def test_converted_config_names_the_state_layout(gdn: Path, tmp_path: Path):
    convert(gdn / "base", tmp_path / "dst", report=silent)
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert all(name.startswith("params/") for name in config["specla"].pop("files"))
    assert config["specla"] == {
        "format_version": 1,
        "dtype": "float32",
        "state_layout": ["layer", "row", "value head", "key dim", "value dim"],
    }
    assert config["model_type"] == "gated_deltanet"


def test_tied_heads(make, gdn: Path, tmp_path: Path):
    embedding = stored(gdn / "tied")["model.embeddings.weight"]
    src = make("tied", {"lm_head.weight": embedding})
    notes: list[str] = []
    convert(src, tmp_path / "dst", report=notes.append)
    assert notes[0] == f"note: {src}: dropped lm_head.weight, equal to the tied embedding"
    assert "lm_head" not in load_target(tmp_path / "dst").params
    assert "lm_head" not in load_target(gdn / "tied").params


def test_tokenizer_files_travel_and_make_the_identity(make, tmp_path: Path):
    src = make()
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
    for file in (*files, "generation_config.json"):
        (src / file).write_text(f"contents of {file}")
    (src / "notes.txt").write_text("stays behind")
    convert(src, tmp_path / "dst", report=silent)
    export(tmp_path / "dst", tmp_path / "fla", report=silent)
    for folder in (tmp_path / "dst", tmp_path / "fla"):
        for file in (*files, "generation_config.json"):
            assert (folder / file).read_text() == f"contents of {file}"
        assert not (folder / "notes.txt").exists()

    target = load_target(tmp_path / "dst")
    assert target.tokenizer_path == tmp_path / "dst"
    identity = target.identity
    assert (identity.hidden_size, identity.num_hidden_layers, identity.vocab_size) == (64, 2, 96)
    assert identity == load_target(src).identity
    (src / "tokenizer.json").write_text("another vocabulary")
    assert identity != load_target(src).identity
    (src / "tokenizer.json").unlink()
    (src / "tokenizer.model").unlink()
    bare = load_target(src)
    assert bare.tokenizer_path is None
    assert bare.identity.vocabulary_hash is None


def test_load_target_places_arrays_on_the_default_device(gdn: Path, tmp_path: Path):
    convert(gdn / "base", tmp_path / "dst", report=silent)
    for folder in (gdn / "base", tmp_path / "dst"):
        target = load_target(folder, "bfloat16")
        assert target.dtype == "bfloat16"
        assert target.path == folder
        for leaf in jax.tree.leaves(target.params):
            assert isinstance(leaf, jax.Array)
            assert leaf.devices() == {jax.devices()[0]}


def test_a_relative_path_works(gdn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    convert(gdn / "base", "out/dst", report=silent)
    assert load_target("out/dst").config == read_config(gdn / "base")


def test_write_fla_from_a_parameter_tree(gdn: Path, tmp_path: Path):
    target = load_target(gdn / "gva")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    write_fla(target.params, target.config, tmp_path / "a" / "fla", tokenizer_files=[tokenizer])
    assert_bits(stored(tmp_path / "a" / "fla"), stored(gdn / "gva"))
    assert (tmp_path / "a" / "fla" / "tokenizer.json").read_text() == "{}"
    write_fla(target.params, target.config, tmp_path / "half", dtype="bfloat16")
    assert load_target(tmp_path / "half").params["norm"]["scale"].dtype == np.float32
    assert stored(tmp_path / "half")["model.norm.weight"].dtype == BF16


def test_write_fla_refuses_another_tree(gdn: Path, tmp_path: Path):
    target = load_target(gdn / "base")
    params = {**target.params, "norm": {"scale": np.ones(3, np.float32)}, "extra": {"scale": np.ones(3)}}
    with pytest.raises(ValueError, match="these differ: extra/scale, norm/scale"):
        write_fla(params, target.config, tmp_path / "fla")
    assert not (tmp_path / "fla").exists()


def test_large_exports_are_sharded(gdn: Path, tmp_path: Path):
    config, leaves = read_config(gdn / "base"), flatten(load_target(gdn / "base").params)
    arrays = [(path, np.asarray(leaves[path])) for path in parameter_shapes(config)]
    (tmp_path / "fla").mkdir()
    write_leaves(tmp_path / "fla", config, arrays, max_shard_bytes=250_000)
    files = sorted(file.name for file in (tmp_path / "fla").iterdir())
    assert files == ["config.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), files[-1]]
    index = json.loads((tmp_path / "fla" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for _, array in arrays)
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "fla" / file)
    assert_bits(stored(tmp_path / "fla"), stored(gdn / "base"))
    assert_bits(flatten(load_target(tmp_path / "fla").params), leaves)


def test_transposed_views_are_written_in_order(tmp_path: Path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_tensors(tmp_path, [("a", array.T)])
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["a"], array.T)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o666


def test_memory_stays_at_a_few_layers(tmp_path: Path):
    config = TargetConfig(
        vocab_size=64,
        hidden_size=256,
        num_hidden_layers=12,
        num_heads=2,
        num_v_heads=2,
        head_dim=64,
        head_v_dim=64,
        intermediate_size=768,
    )
    shapes = parameter_shapes(config)
    params = unflatten((path, np.ones(shape, np.float32)) for path, shape in shapes.items())
    write_fla(params, config, tmp_path / "fla")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    del params
    convert(tmp_path / "fla", tmp_path / "warm", report=silent)
    tracemalloc.start()
    convert(tmp_path / "fla", tmp_path / "dst", report=silent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 3


def test_neither_conversion_nor_loading_imports_torch(gdn: Path, tmp_path: Path):
    program = (
        "import sys; from specla_jax.checkpoint import convert, export, load_target;"
        "src, dst = sys.argv[1:];"
        "convert(src, dst); export(dst, dst + '-fla'); load_target(dst);"
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, str(gdn / "base"), str(tmp_path / "dst")]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def test_every_piece_has_one_place():
    config = TargetConfig(
        vocab_size=8,
        hidden_size=4,
        num_hidden_layers=3,
        num_heads=1,
        num_v_heads=2,
        head_dim=2,
        head_v_dim=3,
        intermediate_size=4,
    )
    keys = [piece.key for pieces in parameter_pieces(config).values() for piece in pieces]
    assert len(keys) == len(set(keys)) == 3 * 18 + 3
