"""Drafters: what proposes the tokens that the target verifies."""

from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.implementations import Implementation
from specla_jax.config import DraftConfig
from specla_jax.drafters.base import Accepted, Context, Drafter
from specla_jax.drafters.eagle import EagleCarry, EagleDrafter
from specla_jax.drafters.eagle_files import load_drafter, save_drafter
from specla_jax.drafters.eagle_layer import EagleConfig, init_eagle
from specla_jax.drafters.eagle_step import EagleStep
from specla_jax.drafters.ngram import NgramDrafter
from specla_jax.drafters.none import NoneDrafter
from specla_jax.drafters.scripted import Script, ScriptedDrafter, script_chain, script_trees
from specla_jax.errors import UserError

__all__ = [
    "Accepted",
    "Context",
    "Drafter",
    "EagleCarry",
    "EagleConfig",
    "EagleDrafter",
    "EagleStep",
    "NgramDrafter",
    "NoneDrafter",
    "Script",
    "ScriptedDrafter",
    "get_drafter",
    "init_eagle",
    "load_drafter",
    "save_drafter",
    "script_chain",
    "script_trees",
]


def get_drafter(
    spec: str | PathLike[str] | tuple[Drafter, Any] | None,
    draft: DraftConfig,
    target: Any,
    packed: Implementation | None = None,
) -> tuple[Drafter, Any]:
    """A drafter and its params.

    Args:
      spec: None or "none", "ngram", a drafter folder, or a (drafter, params) pair, which is returned as it is.
      draft: the size of the trees.
      target: what the drafter drafts for; read only for a folder (``identity``, ``params``, ``dtype``).
      packed: a drafter that is read from a folder drafts over packed weights, their products by this implementation.

    Raises:
      UserError: anything else, a folder that does not exist, or a drafter of another target.
    """
    if isinstance(spec, tuple):
        drafter, params = spec
        return drafter, params
    if spec is None or spec == "none":
        return NoneDrafter(draft=draft), ()
    if spec == "ngram":
        return NgramDrafter(draft=draft), ()
    if not isinstance(spec, str | PathLike):
        raise UserError(f"drafter must be 'none', 'ngram', a drafter folder or a (drafter, params) pair, got {spec!r}")
    if not Path(spec).is_dir():
        raise UserError(f"drafter must be 'none', 'ngram' or a drafter folder, and {str(spec)!r} is no folder")
    config, weights = load_drafter(Path(spec), target)
    if target.dtype == "float32":  # widened once, not in every round
        weights = jax.tree.map(lambda x: x.astype("float32") if jnp.issubdtype(x.dtype, jnp.floating) else x, weights)
    step = None if packed is None else EagleStep(config=config, implementation=packed)
    drafter = EagleDrafter(draft=draft, config=config, dtype=target.dtype, step=step)
    return drafter, drafter.bind(weights, target.params)
