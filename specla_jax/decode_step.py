"""The target's step of decoding over packed weights: what ``GatedDeltaNetLM.verify`` computes, in fewer launches.

A few tokens times a large matrix takes the time of reading the matrix. So every matrix lies as its reader wants it, one
array each, and the norm before a product, SwiGLU and the residual behind it go along with it
(``kernels_pallas.stream_matmul``). A layer is in_proj, convolution and gates, delta rule, o_proj, gate and up, down.

Letters as in ``model.py``; P rows of packed weights.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import gdn_verify, stream_matmul, tree_conv
from kernels_pallas.implementations import Implementation
from kernels_pallas.stream_matmul import pack, pack_gate_up, pack_rows
from specla_jax.config import Dtype, TargetConfig
from specla_jax.model import rms_norm
from specla_jax.state import RecurrentState, TreeFactors


class LayerWeights(NamedTuple):
    """One layer: matrices packed, a feature a row, norms in float32, and the small arrays of the parameters."""

    attn_norm: Float[Array, " D"]
    in_proj: Float[Array, "P D"]
    conv: Float[Array, "W C"] | None
    A_log: Float[Array, " HV"]
    dt_bias: Float[Array, " HV"]
    o_norm: Float[Array, " dv"]
    o_proj: Float[Array, "P value_dim"]
    mlp_norm: Float[Array, " D"]
    gate_up: Float[Array, "P D"]
    down: Float[Array, "P I"]


class DecodeWeights(NamedTuple):
    """All that a step reads. ``embeddings`` is the table of the parameters."""

    embeddings: Float[Array, "V D"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " D"]
    head: Float[Array, "P D"]


def decode_weights(params: Any, config: TargetConfig, dtype: Dtype) -> DecodeWeights:
    """The parameters of ``GatedDeltaNetLM``, packed for decoding in ``dtype``; a pure function."""

    def norm(module: Any) -> Array:  # widened here, or every step would do it in a launch of its own
        return module["scale"].astype(jnp.float32)

    def layer(block: Any) -> LayerWeights:
        attn, mlp = block["attn"], block["mlp"]
        return LayerWeights(
            attn_norm=norm(block["attn_norm"]),
            in_proj=pack(attn["in_proj"]["kernel"], dtype),
            conv=attn["conv"]["kernel"] if config.use_short_conv else None,
            A_log=attn["A_log"],
            dt_bias=attn["dt_bias"],
            o_norm=norm(attn["o_norm"]),
            o_proj=pack(attn["o_proj"]["kernel"], dtype),
            mlp_norm=norm(block["mlp_norm"]),
            gate_up=pack_gate_up(*jnp.split(mlp["gate_up_proj"]["kernel"], 2, axis=1), dtype=dtype),
            down=pack(mlp["down_proj"]["kernel"], dtype),
        )

    table = params["embeddings"]["embedding"]
    return DecodeWeights(
        embeddings=table,
        layers=tuple(layer(params[f"layers_{i}"]) for i in range(config.num_hidden_layers)),
        norm=norm(params["norm"]),
        head=pack_rows(table, dtype) if config.tie_word_embeddings else pack(params["lm_head"]["kernel"], dtype),
    )


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The static half of a step.

    Attributes:
      config, dtype: of the target.
      feature_layers: layers whose outputs are the drafter's features.
      implementation: of the products.
    """

    config: TargetConfig
    dtype: Dtype
    feature_layers: tuple[int, ...]
    implementation: Implementation | None = None

    def verify(
        self,
        weights: DecodeWeights,
        tokens: Int[Array, "B N"],
        parents: Int[Array, "B N"],
        num_nodes: Int[Array, " B"],
        state: RecurrentState,
    ) -> tuple[Float[Array, "B N V"], Float[Array, "B N features"], TreeFactors]:
        """See ``GatedDeltaNetLM.verify``."""
        c, shape = self.config, tokens.shape
        h = jnp.take(weights.embeddings, tokens.reshape(-1), axis=0, mode="clip").astype(self.dtype)
        outputs, deltas, windows = [], [], []
        for i, w in enumerate(weights.layers):
            h, delta, window = self._layer(h, w, parents, num_nodes, state, i)
            outputs.append(h)
            deltas.append(delta)
            windows.append(window)
        logits = self._product(h, weights.head, c.vocab_size, norm=weights.norm)
        features = jnp.concatenate([outputs[i] for i in self.feature_layers], axis=-1)
        delta = jax.tree.map(lambda *leaves: jnp.stack(leaves), *deltas)
        factors = TreeFactors(delta, None if state.conv is None else jnp.stack(windows))
        return logits.reshape(*shape, -1), features.reshape(*shape, -1), factors

    def _layer(
        self,
        h: Float[Array, "BN D"],
        w: LayerWeights,
        parents: Int[Array, "B N"],
        num_nodes: Int[Array, " B"],
        state: RecurrentState,
        layer: int,
    ) -> tuple[Array, Any, Array]:
        c, shape = self.config, parents.shape
        gate = c.value_dim if c.use_gate else 0
        y = self._product(h, w.in_proj, c.conv_dim + gate + 2 * c.num_v_heads, norm=w.attn_norm)
        t = tree_conv(
            y.reshape(*shape, -1),
            state.conv,
            w.conv,
            w.A_log,
            w.dt_bias,
            parents,
            num_nodes,
            key_heads=c.num_heads,
            dk=c.head_dim,
            dv=c.head_v_dim,
            dtype=self.dtype,
            max_beta=2.0 if c.allow_neg_eigval else 1.0,
            layer=layer,
        )
        o, delta = gdn_verify(t.q, t.k, t.v, t.log_decay, t.beta, state.S, parents, num_nodes, layer=layer)
        o = rms_norm(o, w.o_norm, c.norm_eps).reshape(-1, c.value_dim)
        if c.use_gate:
            o = o * jax.nn.silu(y[:, c.conv_dim : c.conv_dim + gate].astype(self.dtype).astype(jnp.float32))
        h = self._product(o.astype(self.dtype), w.o_proj, c.hidden_size, residual=h)
        a = self._product(h, w.gate_up, c.intermediate_size, norm=w.mlp_norm, swiglu=True)
        return self._product(a, w.down, c.hidden_size, residual=h), delta, t.inputs

    def _product(self, x: Array, weights: Array, features: int, norm: Array | None = None, **options: Any) -> Array:
        scaled = None if norm is None else (norm, self.config.norm_eps)
        return stream_matmul(x, weights, norm=scaled, features=features, implementation=self.implementation, **options)
