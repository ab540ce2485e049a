"""A drafter folder: ``config.json`` and ``model.safetensors``."""

import json
import os
import re
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specla_jax.drafters.eagle_layer import EagleConfig, Params, eagle_shapes, unflatten
from specla_jax.errors import UserError

MODEL_TYPE = "specla_eagle"

_IDENTITY = ("hidden_size", "num_hidden_layers", "vocab_size", "vocabulary_hash")

# Names of EAGLE and SpecForge files; their kernels are stored [out, in].
_OLD_KERNELS = {
    "fc.weight": "fc.kernel",
    "midlayer.self_attn.q_proj.weight": "attn.q_proj.kernel",
    "midlayer.self_attn.k_proj.weight": "attn.k_proj.kernel",
    "midlayer.self_attn.v_proj.weight": "attn.v_proj.kernel",
    "midlayer.self_attn.o_proj.weight": "attn.o_proj.kernel",
    "midlayer.mlp.down_proj.weight": "mlp.down_proj.kernel",
    "lm_head.weight": "lm_head.kernel",
}
_OLD_SCALES = {
    "midlayer.input_layernorm.weight": "embedding_norm.scale",
    "midlayer.hidden_norm.weight": "hidden_norm.scale",
    "midlayer.post_attention_layernorm.weight": "mlp_norm.scale",
    "norm.weight": "norm.scale",
}


def save_drafter(params: Params, config: EagleConfig, path: str | Path) -> None:
    """Writes a drafter folder; ``params`` are those of :func:`init_eagle`. Each file appears whole or not at all."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    flat = {".".join(str(key.key) for key in at): np.asarray(leaf) for at, leaf in tree_flatten_with_path(params)[0]}
    problems = _shape_problems(flat, config)
    if problems:
        raise ValueError(f"the parameters do not fit the configuration: {'; '.join(problems)}")
    weights, settings = folder / "model.safetensors", folder / "config.json"
    save_file({name: np.ascontiguousarray(value) for name, value in flat.items()}, f"{weights}.part")
    Path(f"{settings}.part").write_text(json.dumps({"model_type": MODEL_TYPE, **asdict(config)}, indent=2) + "\n")
    os.replace(f"{weights}.part", weights)
    os.replace(f"{settings}.part", settings)


def load_drafter(path: str | Path, target: Any) -> tuple[EagleConfig, Params]:
    """Reads a drafter folder for a target.

    Tensors named as in EAGLE and SpecForge files (``midlayer.*``, ``d2t`` as offsets) are mapped.

    Args:
      path: the folder.
      target: a :class:`specla_jax.target.Target`; only its ``identity`` and ``params`` are read.

    Returns:
      The configuration and the parameters, as :func:`init_eagle` makes them, in the dtype of the file.

    Raises:
      UserError: a missing or broken file, missing, unknown or misshaped keys or tensors (all of them listed), or a
        drafter of another target (every difference named).
    """
    folder = Path(path)
    config = _read_config(folder / "config.json")
    _check_target(folder, config, target.identity)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise UserError(f"{weights} does not exist; a drafter folder holds config.json and model.safetensors")
    try:
        flat = load_file(weights)
    except SafetensorError as error:
        raise UserError(f"{weights} is not a readable safetensors file: {error}") from error
    problems: list[str] = []
    if any(name.startswith(("midlayer.", "layers.0.")) or name == "d2t" for name in flat):
        flat, problems = _from_old_names(flat, config, target)
    problems += _shape_problems(flat, config)
    if problems:
        raise UserError(f"{weights}: {'; '.join(problems)}")
    return config, unflatten({name: jnp.asarray(value) for name, value in flat.items()})


def _read_config(path: Path) -> EagleConfig:
    if not path.is_file():
        raise UserError(f"{path} does not exist; a drafter folder holds config.json and model.safetensors")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("model_type") != MODEL_TYPE:
        found = raw.get("model_type") if isinstance(raw, dict) else type(raw).__name__
        raise UserError(f"{path}: model_type must be {MODEL_TYPE!r}, got {found!r}")
    values = {key: value for key, value in raw.items() if key != "model_type"}
    known = {field.name: field.default is MISSING for field in fields(EagleConfig)}
    missing = sorted(name for name, needed in known.items() if needed and name not in values)
    unknown = sorted(name for name in values if name not in known)
    if missing or unknown:
        lists = [("lacks the", missing), ("has the unknown", unknown)]
        raise UserError(f"{path} " + " and ".join(f"{what} keys {', '.join(names)}" for what, names in lists if names))
    try:
        return EagleConfig(**values)
    except (UserError, TypeError) as error:
        raise UserError(f"{path}: {error}") from error


def _check_target(folder: Path, config: EagleConfig, identity: Any) -> None:
    differences = []
    for key in _IDENTITY:
        made_for, given = getattr(config, f"target_{key}"), getattr(identity, key)
        unknown = key == "vocabulary_hash" and (made_for is None or given is None)
        if made_for != given and not unknown:
            differences.append(f"{key.replace('_', ' ')} {made_for}, not {given}")
    if differences:
        raise UserError(
            f"{folder} is a drafter for another target ({'; '.join(differences)}); "
            "use one that was trained for this target"
        )


def _from_old_names(
    old: dict[str, np.ndarray], config: EagleConfig, target: Any
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Tensors under our names, and what cannot be mapped."""
    old = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in old.items()}
    flat: dict[str, np.ndarray] = {}
    problems: list[str] = []
    for name in list(old):
        if name in _OLD_KERNELS:
            flat[_OLD_KERNELS[name]] = old.pop(name).T
        elif name in _OLD_SCALES:
            flat[_OLD_SCALES[name]] = old.pop(name)
    halves = [f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up")]
    if all(half in old for half in halves):
        flat["mlp.gate_up_proj.kernel"] = np.concatenate([old.pop(half) for half in halves]).T

    offsets, mask = old.pop("d2t", None), old.pop("t2d", None)
    if offsets is not None:
        flat["draft_to_target"] = (np.arange(offsets.shape[0]) + offsets).astype(np.int32)
        if mask is not None and not np.array_equal(np.flatnonzero(mask), np.sort(flat["draft_to_target"])):
            problems.append("d2t and t2d disagree on the draft vocabulary")
    elif config.draft_vocab_size == config.target_vocab_size:
        flat["draft_to_target"] = np.arange(config.target_vocab_size, dtype=np.int32)

    embedding = old.pop("embed_tokens.weight", None)
    if embedding is not None:
        ours = np.asarray(target.params["embeddings"]["embedding"])
        if embedding.shape != ours.shape or not np.array_equal(embedding.astype(ours.dtype), ours):
            problems.append("embed_tokens.weight differs from the target's embedding, which is used instead")
    if old:
        problems.append(f"unknown tensors {', '.join(sorted(old))}")
    return flat, problems


def _shape_problems(flat: dict[str, np.ndarray], config: EagleConfig) -> list[str]:
    """What is wrong with tensors under our names, as short phrases."""
    shapes = eagle_shapes(config)
    problems = []
    for what, names in (("missing", shapes.keys() - flat.keys()), ("unexpected", flat.keys() - shapes.keys())):
        if names:
            problems.append(f"{what} tensors {', '.join(sorted(names))}")
    for name in sorted(shapes.keys() & flat.keys()):
        value = flat[name]
        if value.shape != shapes[name]:
            problems.append(f"{name} must have shape {shapes[name]}, got {value.shape}")
        elif name == "draft_to_target":
            if value.dtype != np.int32:
                problems.append(f"draft_to_target must be int32, got {value.dtype}")
            elif value.min() < 0 or value.max() >= config.target_vocab_size:
                problems.append(f"draft_to_target must lie in 0 to {config.target_vocab_size - 1}")
            elif np.unique(value).size != value.size:
                problems.append("draft_to_target names a token twice")
        elif not jnp.issubdtype(value.dtype, jnp.floating):
            problems.append(f"{name} must be floating point, got {value.dtype}")
        elif not np.isfinite(value.astype(np.float32)).all():
            problems.append(f"{name} has values that are not finite")
    return problems
