"""The target's step of decoding over packed weights: what ``GatedDeltaNetLM.verify`` computes, in fewer launches.

A few tokens times a large matrix takes the time of reading the matrix. So every matrix lies as its reader wants it, one
array each, with the scale of the norm before it. The products from a layer's o_proj to the next one's in_proj, or to
the head, are one launch (``kernels_pallas.stream_matmul``), which reads one matrix while another ends. Between such
launches are only convolution and gates, the delta rule, and the gated norm.

Letters as in ``model.py``; P rows of packed weights, T those of the tokens B N, filled up to a multiple of 8.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import gated_norm, gdn_verify, stream_matmul, tree_conv
from kernels_pallas.implementations import Implementation
from kernels_pallas.stream_matmul import Product, fill_up, no_arrivals, pack, pack_gate_up, pack_rows
from specla_jax.config import Dtype, TargetConfig
from specla_jax.state import RecurrentState, TreeFactors


class LayerWeights(NamedTuple):
    """One layer: matrices packed, a feature a row, with the scales of the norms; and the small arrays."""

    in_proj: Float[Array, "P D"]
    conv: Float[Array, "W C"] | None
    A_log: Float[Array, " HV"]
    dt_bias: Float[Array, " HV"]
    o_norm: Float[Array, " dv"]
    o_proj: Float[Array, "P value_dim"]
    gate_up: Float[Array, "P D"]
    down: Float[Array, "P I"]


class DecodeWeights(NamedTuple):
    """All that a step reads. ``embeddings`` is the table of the parameters."""

    embeddings: Float[Array, "V D"]
    layers: tuple[LayerWeights, ...]
    head: Float[Array, "P D"]


def decode_weights(params: Any, config: TargetConfig, dtype: Dtype) -> DecodeWeights:
    """The parameters of ``GatedDeltaNetLM``, packed for decoding in ``dtype``; a pure function."""

    def layer(block: Any) -> LayerWeights:
        attn, mlp = block["attn"], block["mlp"]
        gate, up = jnp.split(mlp["gate_up_proj"]["kernel"], 2, axis=1)
        return LayerWeights(
            in_proj=pack(attn["in_proj"]["kernel"], dtype, block["attn_norm"]["scale"]),
            conv=attn["conv"]["kernel"] if config.use_short_conv else None,
            A_log=attn["A_log"],
            dt_bias=attn["dt_bias"],
            o_norm=attn["o_norm"]["scale"],
            o_proj=pack(attn["o_proj"]["kernel"], dtype),
            gate_up=pack_gate_up(gate, up, dtype, block["mlp_norm"]["scale"]),
            down=pack(mlp["down_proj"]["kernel"], dtype),
        )

    table, scale = params["embeddings"]["embedding"], params["norm"]["scale"]
    tied = config.tie_word_embeddings
    return DecodeWeights(
        embeddings=table,
        layers=tuple(layer(params[f"layers_{i}"]) for i in range(config.num_hidden_layers)),
        head=pack_rows(table, dtype, scale) if tied else pack(params["lm_head"]["kernel"], dtype, scale),
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
        gate = c.value_dim if c.use_gate else 0
        widths = [c.conv_dim + gate + 2 * c.num_v_heads] * c.num_hidden_layers + [c.vocab_size]
        arrivals = no_arrivals(c.num_hidden_layers)
        h = jnp.take(weights.embeddings, fill_up(tokens.reshape(-1)), axis=0, mode="clip").astype(self.dtype)
        normed = [*(w.in_proj for w in weights.layers), weights.head]
        (y,) = self._products(h, [Product(normed[0], "plain", True, widths[0])], tokens.size)
        outputs, deltas, windows = [], [], []
        for i, w in enumerate(weights.layers):
            o, delta, window = self._mix(y.reshape(*shape, -1), w, parents, num_nodes, state, i)
            products = [
                Product(w.o_proj, "residual", False, c.hidden_size),
                Product(w.gate_up, "swiglu", True, c.intermediate_size),
                Product(w.down, "residual", False, c.hidden_size),
                Product(normed[i + 1], "plain", True, widths[i + 1]),
            ]
            *_, h, y = self._products(o, products, tokens.size, residual=h, arrivals=(arrivals, i))
            outputs.append(h)
            deltas.append(delta)
            windows.append(window)
        features = jnp.concatenate([outputs[i][: tokens.size] for i in self.feature_layers], axis=-1)
        delta = jax.tree.map(lambda *leaves: jnp.stack(leaves), *deltas)
        factors = TreeFactors(delta, None if state.conv is None else jnp.stack(windows))
        return y.reshape(*shape, -1), features.reshape(*shape, -1), factors

    def _mix(
        self,
        y: Float[Array, "B N width"],
        w: LayerWeights,
        parents: Int[Array, "B N"],
        num_nodes: Int[Array, " B"],
        state: RecurrentState,
        layer: int,
    ) -> tuple[Float[Array, "T value_dim"], Any, Array]:
        """What stands between in_proj, which gave ``y``, and o_proj."""
        c = self.config
        t = tree_conv(
            y,
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
        tokens = o.shape[0] * o.shape[1]
        gate = y.reshape(tokens, -1) if c.use_gate else None
        x = gated_norm(o.reshape(tokens, *o.shape[2:]), gate, w.o_norm, start=c.conv_dim, eps=c.norm_eps)
        return x, delta, t.inputs

    def _products(self, x: Array, products: list[Product], tokens: int, **options: Any) -> tuple[Array, ...]:
        eps = self.config.norm_eps
        return stream_matmul(x, products, tokens=tokens, eps=eps, implementation=self.implementation, **options)
