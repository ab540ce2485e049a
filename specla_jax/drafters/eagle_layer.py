"""The EAGLE-3 draft network (arXiv 2503.01840) as pure functions of its parameters.

A *pair* joins a feature with the token after it: position p pairs the feature of position p - 1 (zero for p = 0)
with token p. One decoder layer on [norm(embedding), norm(feature)] gives the hidden state from which the token at
p + 1 is drafted; below the root that hidden state is itself the feature of the next level. A pair attends to the
last ``window`` positions, its own included. Training and inference use the same functions.

Activations have the dtype of ``feature``; norms, softmax and logits are float32, and float32 products run at full
precision. ``Dt`` is the target's hidden size, ``D`` the drafter's, ``K`` its key heads here, ``dh`` its head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.draft_attention.reference import rotate as rotate_halves
from kernels_pallas.norm import rms_norm
from specla_jax.errors import UserError
from specla_jax.projection import project

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Shape of a drafter and the target that it belongs to.

    Attributes:
      window: positions that a pair attends to, its own included; also the size of the ring buffer.
      draft_vocab_size: size of a reduced draft vocabulary with its own head and map; None drafts over the whole
        vocabulary with the target's head.
      feature_norm: RMS-normalise each of the target states before they are fused.
      feature_layers: layers of the target whose outputs are fused; None for the three that the target names.
      temperature: the drafter's log-probabilities are those of its logits divided by this. Children of one node keep
        their order; it decides how nodes of different paths compare.
      max_positions: text length beyond which the drafter proposes nothing; None for no limit. Only the window
        bounds memory, so a limit is for a drafter that is known to be poor past its training length.
      target_vocabulary_hash: as in the target's ``identity``; None where there is no vocabulary to compare.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    target_hidden_size: int
    target_num_hidden_layers: int
    target_vocab_size: int
    target_vocabulary_hash: str | None = None
    window: int = 512
    rope_theta: float = 10000.0
    draft_vocab_size: int | None = None
    norm_eps: float = 1e-6
    feature_norm: bool = True
    max_positions: int | None = None
    feature_layers: tuple[int, ...] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.feature_layers is not None:
            object.__setattr__(self, "feature_layers", tuple(self.feature_layers))  # JSON has lists
        sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "target_hidden_size")
        for name in (*sizes, "target_num_hidden_layers", "target_vocab_size", "window"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"{name} must be a positive integer, got {value!r}")
        for name in ("draft_vocab_size", "max_positions"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{name} must be null or a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads must be a multiple of num_kv_heads={self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.vocab_size > self.target_vocab_size:
            raise UserError(f"draft_vocab_size must be at most {self.target_vocab_size}, got {self.draft_vocab_size}")
        if self.draft_vocab_size is None and self.hidden_size != self.target_hidden_size:
            raise UserError(
                f"hidden_size must be {self.target_hidden_size} to use the target's head, got {self.hidden_size}; "
                "another size needs draft_vocab_size"
            )
        if not (self.rope_theta > 0 and self.norm_eps > 0):
            raise UserError("rope_theta and norm_eps must be positive")
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"temperature must be positive, got {self.temperature}")
        layers, known = self.feature_layers, range(self.target_num_hidden_layers)
        if layers is not None and (not layers or any(type(i) is not int or i not in known for i in layers)):
            raise UserError(f"feature_layers must be layers 0 to {known[-1]} of the target, got {list(layers)}")

    @property
    def vocab_size(self) -> int:
        """Tokens that can be drafted."""
        return self.target_vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def num_features(self) -> int:
        """States of the target that make a feature."""
        return 3 if self.feature_layers is None else len(self.feature_layers)


def eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by dotted name; ``draft_to_target`` is int32, the others are floats."""
    d, dt = config.hidden_size, config.target_hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.kernel": (config.num_features * dt, d),
        "embedding_norm.scale": (dt,),
        "hidden_norm.scale": (d,),
        "attn.q_proj.kernel": (dt + d, q),
        "attn.k_proj.kernel": (dt + d, kv),
        "attn.v_proj.kernel": (dt + d, kv),
        "attn.o_proj.kernel": (q, d),
        "mlp_norm.scale": (d,),
        "mlp.gate_up_proj.kernel": (d, 2 * config.intermediate_size),
        "mlp.down_proj.kernel": (config.intermediate_size, d),
        "norm.scale": (d,),
    }
    if config.feature_norm:
        shapes["feature_norm.scale"] = (config.num_features, dt)
    if config.draft_vocab_size is not None:
        shapes["lm_head.kernel"] = (d, config.draft_vocab_size)
        shapes["draft_to_target"] = (config.draft_vocab_size,)
    return shapes


def init_eagle(key: Array, config: EagleConfig, dtype: str = "float32") -> Params:
    """Random parameters: kernels of scale fan-in^-1/2, norms 1, the map an even spread over the target's vocabulary."""
    flat: dict[str, Array] = {}
    for index, (name, shape) in enumerate(eagle_shapes(config).items()):
        if name == "draft_to_target":
            flat[name] = (jnp.arange(shape[0]) * (config.target_vocab_size / shape[0])).astype(jnp.int32)
        elif name.endswith("scale"):
            flat[name] = jnp.ones(shape, dtype)
        else:
            noise = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
            flat[name] = (noise * shape[0] ** -0.5).astype(dtype)
    return unflatten(flat)


def unflatten(flat: dict[str, Any]) -> Params:
    """A nested dict from dotted names."""
    nested: Params = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def fuse_features(
    params: Params, config: EagleConfig, features: Float[Array, "*n features"], dtype: str
) -> Float[Array, "*n D"]:
    """Hidden states of the target, side by side, to one feature of dtype ``dtype``; zeros stay zero."""
    parts = features.reshape(*features.shape[:-1], config.num_features, config.target_hidden_size)
    if config.feature_norm:
        parts = rms_norm(parts, params["feature_norm"]["scale"], config.norm_eps)
    return _dense(parts.reshape(features.shape).astype(dtype), params["fc"]["kernel"])


def pair_input(
    params: Params, config: EagleConfig, embedded: Float[Array, "*n Dt"], feature: Float[Array, "*n D"]
) -> Float[Array, "*n both"]:
    """What the attention reads of a pair: [norm(embedding of the token), norm(feature)]."""
    embedded = rms_norm(embedded, params["embedding_norm"]["scale"], config.norm_eps)
    feature_normed = rms_norm(feature, params["hidden_norm"]["scale"], config.norm_eps)
    return jnp.concatenate([embedded, feature_normed], axis=-1).astype(feature.dtype)


def pair_keys_values(
    params: Params, config: EagleConfig, pair: Float[Array, "B T both"], positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T K dh"], Float[Array, "B T K dh"]]:
    """Keys (rotated) and values of pairs; each depends on its own pair only."""
    heads = (*pair.shape[:2], config.num_kv_heads, config.head_dim)
    key = _dense(pair, params["attn"]["k_proj"]["kernel"]).reshape(heads)
    value = _dense(pair, params["attn"]["v_proj"]["kernel"]).reshape(heads)
    return rotate(key, positions, config.rope_theta), value


def eagle_layer(
    params: Params,
    config: EagleConfig,
    pair: Float[Array, "B T both"],
    feature: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    segments: Sequence[tuple[Float[Array, "B *T S K dh"], Float[Array, "B *T S K dh"], Bool[Array, "B T S"]]],
) -> Float[Array, "B T D"]:
    """The decoder layer.

    Args:
      pair: result of :func:`pair_input`.
      feature: the residual stream.
      positions: of the pairs.
      segments: (keys, values, mask) of everything attended to; the mask says which query sees which key, and every
        query sees at least one. Several segments save joining a cache with the keys of drafts. Keys and values have
        an axis T where every query has its own.

    Returns:
      The hidden state of each pair, before the final norm.
    """
    batch, length = positions.shape
    kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    query = _dense(pair, params["attn"]["q_proj"]["kernel"]).reshape(batch, length, config.num_heads, config.head_dim)
    query = rotate(query, positions, config.rope_theta).reshape(batch, length, kv, group, config.head_dim)

    scores = []
    for key, _, mask in segments:
        score = _einsum(f"btkgd,{_axes(key)}->bkgts", query, key) * config.head_dim**-0.5
        scores.append(jnp.where(mask[:, None, None], score, jnp.finfo(jnp.float32).min))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(feature.dtype)
    mixed = jnp.zeros((batch, length, kv, group, config.head_dim), jnp.float32)
    start = 0
    for _, value, mask in segments:
        mixed += _einsum(f"bkgts,{_axes(value)}->btkgd", weights[..., start : start + mask.shape[2]], value)
        start += mask.shape[2]
    mixed = mixed.reshape(batch, length, -1).astype(feature.dtype)

    hidden = feature + _dense(mixed, params["attn"]["o_proj"]["kernel"])
    normed = rms_norm(hidden, params["mlp_norm"]["scale"], config.norm_eps).astype(feature.dtype)
    gate, up = jnp.split(_dense(normed, params["mlp"]["gate_up_proj"]["kernel"]), 2, axis=-1)
    return hidden + _dense(jax.nn.silu(gate) * up, params["mlp"]["down_proj"]["kernel"])


def eagle_forward(
    params: Params,
    config: EagleConfig,
    embedded: Float[Array, "B T Dt"],
    feature: Float[Array, "B T D"],
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B T D"]:
    """Hidden states of all pairs of a text, each attending to its window.

    Args:
      embedded: embeddings of tokens 0 to T - 1.
      feature: fused feature of positions -1 to T - 2; the first is zero.
      lengths: real tokens a row; what lies beyond them is not attended to by real pairs.
    """
    batch, length = embedded.shape[:2]
    positions = jnp.arange(length)
    ago = positions[:, None] - positions[None, :]
    mask = jnp.broadcast_to((ago >= 0) & (ago < config.window), (batch, length, length))
    if lengths is not None:
        # A padding pair keeps itself, so that its softmax is defined.
        mask = mask & ((positions < lengths[:, None])[:, None, :] | (ago == 0))
    at = jnp.broadcast_to(positions, (batch, length))
    pair = pair_input(params, config, embedded, feature)
    key, value = pair_keys_values(params, config, pair, at)
    return eagle_layer(params, config, pair, feature, at, [(key, value, mask)])


def draft_logits(
    params: Params, config: EagleConfig, hidden: Float[Array, "*n D"], head: Float[Array, "D V"]
) -> Float[Array, "*n V"]:
    """Float32 logits over the draft vocabulary; ``head`` is the drafter's own or the target's."""
    normed = rms_norm(hidden, params["norm"]["scale"], config.norm_eps).astype(hidden.dtype)
    if hidden.dtype == jnp.bfloat16:
        return project(normed, head, jnp.float32)
    return _einsum("...d,dv->...v", normed, head.astype(hidden.dtype))


def rotate(x: Float[Array, "B T heads dh"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T heads dh"]:
    """Heads turned by their positions (arXiv 2104.09864), the two halves of a head as the pairs."""
    halves = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(rotate_halves(halves, positions[:, :, None, None], theta), axis=-1).astype(x.dtype)


def _einsum(formula: str, left: Array, right: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(formula, left, right, precision=precision, preferred_element_type=jnp.float32)


def _axes(keys: Array) -> str:
    return "bskd" if keys.ndim == 4 else "btskd"


def _dense(x: Array, kernel: Array) -> Array:
    if x.dtype == jnp.bfloat16:
        return project(x, kernel, jnp.bfloat16)
    return _einsum("...i,ij->...j", x, kernel.astype(x.dtype)).astype(x.dtype)
