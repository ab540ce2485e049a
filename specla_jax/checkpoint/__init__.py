"""Checkpoints: folders of flash-linear-attention in, converted folders and folders of that library out."""

from specla_jax.checkpoint.conversion import convert, export, load_target
from specla_jax.checkpoint.fla_folder import write_fla
from specla_jax.checkpoint.layout import parameter_shapes

__all__ = ["convert", "export", "load_target", "parameter_shapes", "write_fla"]
