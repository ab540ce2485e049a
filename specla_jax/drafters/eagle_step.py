"""The drafter's layer over packed weights: the network of ``eagle_layer.py`` in fewer launches, for drafting alone.

A level of a draft is five launches of ``kernels_pallas``: the projections, attention, all products behind it, with the
norms, SwiGLU and the residuals in them, and two from the logits to the pairs of the next level.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import draft_attention, draft_expand, stream_matmul
from kernels_pallas.draft_expand import Expansion
from kernels_pallas.implementations import Implementation
from kernels_pallas.stream_matmul import Product, fill_up, pack, pack_gate_up, pack_rows
from specla_jax.config import Dtype
from specla_jax.drafters.eagle_layer import EagleConfig, Params, rotate


class EagleWeights(NamedTuple):
    """Matrices packed, a feature a row, with the scales of the norms. P rows of packed weights."""

    qkv: Float[Array, "P both"]
    o_proj: Float[Array, "P heads"]
    gate_up: Float[Array, "P D"]
    down: Float[Array, "P I"]
    head: Float[Array, "P D"]


def eagle_weights(params: Params, dtype: Dtype) -> EagleWeights:
    """The parameters that ``EagleDrafter.bind`` gives, packed in ``dtype``."""
    eagle, attn, mlp = params["eagle"], params["eagle"]["attn"], params["eagle"]["mlp"]
    gate, up = jnp.split(mlp["gate_up_proj"]["kernel"], 2, axis=1)
    head, scale = eagle["lm_head"]["kernel"] if "lm_head" in eagle else params.get("head"), eagle["norm"]["scale"]
    return EagleWeights(
        qkv=pack(jnp.concatenate([attn[f"{name}_proj"]["kernel"] for name in "qkv"], axis=1), dtype),
        o_proj=pack(attn["o_proj"]["kernel"], dtype),
        gate_up=pack_gate_up(gate, up, dtype, eagle["mlp_norm"]["scale"]),
        down=pack(mlp["down_proj"]["kernel"], dtype),
        head=pack_rows(params["embedding"], dtype, scale) if head is None else pack(head, dtype, scale),
    )


@dataclass(frozen=True, kw_only=True)
class EagleStep:
    """The static half: the drafter's shape, and the implementation of the products."""

    config: EagleConfig
    implementation: Implementation

    def projections(self, w: EagleWeights, pair: Float[Array, "B T both"]) -> Float[Array, "B T qkv"]:
        """The projections q | k | v of pairs, in float32 and not rotated."""
        c = self.config
        features = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        (out,) = self._products(pair, [Product(w.qkv, "plain", False, features)])
        return out

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
        arrivals: tuple[Any, Any],
        children: bool,
    ) -> tuple[Float[Array, "B T D"], Any, Array, Array]:
        """Hidden states of the pairs of a level before the final norm, logits, and draft keys and values with theirs.

        See :func:`kernels_pallas.draft_attention` for the arguments and :func:`kernels_pallas.stream_matmul` for
        ``arrivals``; ``feature`` is the residual stream. Logits are float32, over the draft vocabulary; None without
        ``children``.
        """
        c = self.config
        mixed, key, value = draft_attention(
            *(qkv, *ring, *drafts, ancestors, length, level),
            num_heads=c.num_heads,
            theta=c.rope_theta,
            implementation=self._beside_products,
        )
        products = [
            Product(w.o_proj, "residual", False, c.hidden_size),
            Product(w.gate_up, "swiglu", True, c.intermediate_size),
            Product(w.down, "residual", False, c.hidden_size),
            *([self._head(w)] if children else []),
        ]
        _, _, hidden, *logits = self._products(mixed, products, residual=feature, arrivals=arrivals)
        return hidden, logits[0] if children else None, key, value

    def children(
        self,
        params: Params,
        branch: int,
        hidden: Float[Array, "B T D"],
        logits: Float[Array, "B T V"],
        log_prob: Float[Array, "B T"],
        ancestors: Bool[Array, "B T S"],
        level: Int[Array, ""] | int,
    ) -> Expansion:
        """The children of a level, given all parameters: see :func:`kernels_pallas.draft_expand` for the arguments."""
        eagle = params["eagle"]
        return draft_expand(
            *(logits, hidden, log_prob, ancestors, level, params["temperature"], params["embedding"]),
            *(eagle["embedding_norm"]["scale"], eagle["hidden_norm"]["scale"]),
            None if self.config.draft_vocab_size is None else eagle["draft_to_target"],
            branch=branch,
            eps=self.config.norm_eps,
            implementation=self._beside_products,
        )

    @property
    def _beside_products(self) -> Implementation:
        """The implementation of all that is no product."""
        return "reference" if self.implementation == "reference" else "triton"

    def logits(self, w: EagleWeights, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits over the draft vocabulary."""
        (out,) = self._products(hidden, [self._head(w)])
        return out

    def _head(self, w: EagleWeights) -> Product:
        return Product(w.head, "plain", True, self.config.vocab_size)

    def _products(
        self, x: Array, products: list[Product], residual: Array | None = None, arrivals: tuple[Any, Any] | None = None
    ) -> list[Array]:
        """All outputs [B, T, .] of products of x [B, T, .], whose tokens are filled up to rows that a kernel takes."""
        shape, tokens = x.shape[:-1], x.shape[0] * x.shape[1]

        def rows(x: Array) -> Array:
            return fill_up(x.reshape(tokens, -1))

        outs = stream_matmul(
            rows(x),
            products,
            tokens=tokens,
            residual=None if residual is None else rows(residual),
            eps=self.config.norm_eps,
            arrivals=arrivals,
            implementation=self.implementation,
        )
        return [out[:tokens].reshape(*shape, -1) for out in outs]


def no_drafts(rows: int, config: EagleConfig, dtype: jax.typing.DTypeLike) -> tuple[tuple[Array, Array], Array]:
    """Keys and values of one empty draft slot a row, and the ancestors of a single pair: none."""
    heads = jnp.zeros((rows, 1, config.num_kv_heads, config.head_dim), dtype)
    return (heads, heads.copy()), jnp.zeros((rows, 1, 1), bool)
