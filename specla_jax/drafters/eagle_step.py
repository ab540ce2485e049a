"""The drafter's layer over packed weights: the network of ``eagle_layer.py`` in fewer launches, for drafting alone.

A level of a draft is projection, attention, output projection, gate and up, down, and the head: six products and ops of
``kernels_pallas``, with the norms, SwiGLU and the residuals in them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import draft_attention, stream_matmul
from kernels_pallas.implementations import Implementation
from kernels_pallas.stream_matmul import pack, pack_gate_up, pack_rows
from specla_jax.config import Dtype
from specla_jax.drafters.eagle_layer import EagleConfig, Params, rotate


class EagleWeights(NamedTuple):
    """Matrices packed, a feature a row; norms in float32. P rows of packed weights."""

    qkv: Float[Array, "P both"]
    o_proj: Float[Array, "P heads"]
    mlp_norm: Float[Array, " D"]
    gate_up: Float[Array, "P D"]
    down: Float[Array, "P I"]
    norm: Float[Array, " D"]
    head: Float[Array, "P D"]


def eagle_weights(params: Params, dtype: Dtype, head: Float[Array, "P D"] | None = None) -> EagleWeights:
    """The parameters that ``EagleDrafter.bind`` gives, packed in ``dtype``, but for a ``head`` that is already."""
    eagle, attn, mlp = params["eagle"], params["eagle"]["attn"], params["eagle"]["mlp"]
    if head is None and "lm_head" in eagle:
        head = pack(eagle["lm_head"]["kernel"], dtype)
    elif head is None:
        head = pack(params["head"], dtype) if "head" in params else pack_rows(params["embedding"], dtype)
    return EagleWeights(
        qkv=pack(jnp.concatenate([attn[f"{name}_proj"]["kernel"] for name in "qkv"], axis=1), dtype),
        o_proj=pack(attn["o_proj"]["kernel"], dtype),
        mlp_norm=eagle["mlp_norm"]["scale"].astype(jnp.float32),
        gate_up=pack_gate_up(*jnp.split(mlp["gate_up_proj"]["kernel"], 2, axis=1), dtype=dtype),
        down=pack(mlp["down_proj"]["kernel"], dtype),
        norm=eagle["norm"]["scale"].astype(jnp.float32),
        head=head,
    )


@dataclass(frozen=True, kw_only=True)
class EagleStep:
    """The static half: the drafter's shape, and the implementation of the products."""

    config: EagleConfig
    implementation: Implementation

    def projections(self, w: EagleWeights, pair: Float[Array, "B T both"]) -> Float[Array, "B T qkv"]:
        """The projections q | k | v of pairs, in float32 and not rotated."""
        c = self.config
        return self._product(pair, w.qkv, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)

    def keys_values(
        self, qkv: Float[Array, "B T qkv"], positions: Int[Array, "B T"], dtype: Dtype
    ) -> tuple[Float[Array, "B T K dh"], Float[Array, "B T K dh"]]:
        """Keys (rotated) and values of projections."""
        c = self.config
        size = c.num_kv_heads * c.head_dim
        key, value = (
            part.astype(dtype).reshape(*qkv.shape[:2], c.num_kv_heads, c.head_dim)
            for part in jnp.split(qkv[..., -2 * size :], 2, axis=-1)
        )
        return rotate(key, positions, c.rope_theta), value

    def layer(
        self,
        w: EagleWeights,
        qkv: Float[Array, "B T qkv"],
        feature: Float[Array, "B T D"],
        ring: tuple[Array, Array],
        drafts: tuple[Array, Array],
        ancestors: Bool[Array, "B T S"],
        length: Int[Array, " B"],
        level: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "B T D"], Array, Array]:
        """Hidden states of the pairs of a level, before the final norm, and the draft keys and values with theirs.

        See :func:`kernels_pallas.draft_attention` for the arguments; ``feature`` is the residual stream.
        """
        c = self.config
        attention: Any = "reference" if self.implementation == "reference" else "triton"
        mixed, key, value = draft_attention(
            *(qkv, *ring, *drafts, ancestors, length, level),
            num_heads=c.num_heads,
            theta=c.rope_theta,
            implementation=attention,
        )
        hidden = self._product(mixed, w.o_proj, c.hidden_size, residual=feature)
        a = self._product(hidden, w.gate_up, c.intermediate_size, norm=w.mlp_norm, swiglu=True)
        return self._product(a, w.down, c.hidden_size, residual=hidden), key, value

    def logits(self, w: EagleWeights, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits over the draft vocabulary."""
        return self._product(hidden, w.head, self.config.vocab_size, norm=w.norm)

    def _product(
        self,
        x: Array,
        weights: Array,
        features: int,
        norm: Array | None = None,
        residual: Array | None = None,
        swiglu: bool = False,
    ) -> Array:
        def flat(x: Array) -> Array:
            return x.reshape(-1, x.shape[-1])

        out = stream_matmul(
            flat(x),
            weights,
            norm=None if norm is None else (norm, self.config.norm_eps),
            residual=None if residual is None else flat(residual),
            swiglu=swiglu,
            features=features,
            implementation=self.implementation,
        )
        return out.reshape(*x.shape[:-1], features)


def no_drafts(rows: int, config: EagleConfig, dtype: jax.typing.DTypeLike) -> tuple[tuple[Array, Array], Array]:
    """Keys and values of one empty draft slot a row, and the ancestors of a single pair: none."""
    heads = jnp.zeros((rows, 1, config.num_kv_heads, config.head_dim), dtype)
    return (heads, heads.copy()), jnp.zeros((rows, 1, 1), bool)
