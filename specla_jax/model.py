"""The target: a Gated DeltaNet language model as functional Flax.

The layer computes what flash-linear-attention's ``GatedDeltaNet`` computes (arXiv 2412.06464), from explicit
parameters and an explicit state. Projections that read the same input are stored side by side, so that a decode step
streams a few large matrices:

    in_proj       [D, 2*H*dk + HV*dv (+ HV*dv) + 2*HV]    q | k | v | g (with use_gate) | a | b
    gate_up_proj  [D, 2*I]                                gate | up

Dimension letters: B rows, T prompt tokens, N nodes, D hidden, H key heads, HV value heads, dk, dv, W conv taps,
C conv channels (q | k | v), L layers, I MLP width, V vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import Factors, gates, gdn_prefill, gdn_verify, l2_norm, prefill_conv, tree_conv
from kernels_pallas.gated_norm.reference import gate_heads
from kernels_pallas.norm import rms_norm
from specla_jax.config import TargetConfig
from specla_jax.projection import dot
from specla_jax.state import RecurrentState, TreeFactors

_normal = nn.initializers.normal(0.02)

# A log decay whose exponential is 0; sums of 64 of them are still exact in steps of kernels_pallas.decay.STEP.
_FORGET = -1000.0


def matmul(x: Array, kernel: Array, dtype: str) -> Float[Array, "..."]:
    """``x @ kernel`` on operands of ``dtype``, summed and returned in float32.

    Float32 operands are multiplied in full precision: the default on a GPU would round them to TF32.
    """
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    return dot(x.astype(dtype), kernel.astype(dtype), jnp.float32, precision)


def _init_A_log(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, minval=1e-3, maxval=16.0))


def _init_dt_bias(key: Array, shape: tuple[int, ...]) -> Array:
    low, high = jnp.log(1e-3), jnp.log(0.1)
    dt = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, jnp.float32) * (high - low) + low), 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))  # the inverse of softplus


class Linear(nn.Module):
    """A projection without bias."""

    features: int
    dtype: str

    @nn.compact
    def __call__(self, x: Array) -> Float[Array, "..."]:
        return matmul(x, self.param("kernel", _normal, (x.shape[-1], self.features)), self.dtype)


class RMSNorm(nn.Module):
    """Holds the scale of a root-mean-square norm."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Float[Array, "..."]:
        return rms_norm(x, self.param("scale", nn.initializers.ones, (x.shape[-1],)), self.eps)


class Convolution(nn.Module):
    """Holds the filters of the depthwise convolution; the ops apply them."""

    config: TargetConfig

    @nn.compact
    def __call__(self) -> Float[Array, "W C"]:
        shape = (self.config.conv_size, self.config.conv_dim)
        return self.param("kernel", nn.initializers.normal(shape[0] ** -0.5), shape)


class GatedDeltaNet(nn.Module):
    """The token mixer of one layer."""

    config: TargetConfig
    dtype: str

    def setup(self) -> None:
        c = self.config
        gate = c.value_dim if c.use_gate else 0
        self.in_proj = Linear(c.conv_dim + gate + 2 * c.num_v_heads, self.dtype)
        if c.use_short_conv:
            self.conv = Convolution(c)
        self.A_log = self.param("A_log", _init_A_log, (c.num_v_heads,))
        self.dt_bias = self.param("dt_bias", _init_dt_bias, (c.num_v_heads,))
        self.o_norm = RMSNorm(c.norm_eps)
        self.o_proj = Linear(c.hidden_size, self.dtype)

    def prefill(
        self,
        x: Array,
        lengths: Int[Array, " B"] | None,
        S: Array,
        window: Array | None,
        starts: Bool[Array, "B T"] | None = None,
    ) -> tuple[Array, Array, Array | None]:
        """Mixes ``x`` [B, T, D]; returns the output and the state and window after ``lengths`` tokens.

        ``starts`` marks tokens before which everything is forgotten; the window returned takes no notice of it.
        """
        c = self.config
        y = self.in_proj(x)
        qkv = y[..., : c.conv_dim].astype(self.dtype)
        if window is None:
            qkv = jax.nn.silu(qkv.astype(jnp.float32)).astype(self.dtype)
        else:
            qkv, window = prefill_conv(qkv, window, self.conv(), lengths, starts)
        q, k, v = (
            part.reshape(*x.shape[:-1], heads, -1)
            for part, heads in zip(
                jnp.split(qkv, [c.key_dim, 2 * c.key_dim], axis=-1), (c.num_heads, c.num_heads, c.num_v_heads)
            )
        )
        q, k = (l2_norm(t).astype(self.dtype) for t in (q, k))
        # The gates never leave float32: a rounded beta or decay would differ between programs and drift.
        a, b = jnp.split(y[..., -2 * c.num_v_heads :], 2, axis=-1)
        log_decay, beta = gates(a, b, self.A_log, self.dt_bias, self._max_beta)
        if starts is not None:
            log_decay = jnp.where(starts[..., None], _FORGET, log_decay)
        o, S = gdn_prefill(q, k, v, log_decay, beta, S, lengths)
        return self._finish(o, y), S, window

    def verify(
        self,
        x: Array,
        parents: Int[Array, "B N"],
        num_nodes: Int[Array, " B"],
        state: RecurrentState,
        layer: int,
    ) -> tuple[Array, Factors, Array]:
        """Mixes the nodes of a tree; returns the output, the factors and the conv inputs. Writes no state."""
        c = self.config
        y = self.in_proj(x)
        t = tree_conv(
            y,
            state.conv,
            self.conv() if c.use_short_conv else None,
            self.A_log,
            self.dt_bias,
            parents,
            num_nodes,
            key_heads=c.num_heads,
            dk=c.head_dim,
            dv=c.head_v_dim,
            dtype=self.dtype,
            max_beta=self._max_beta,
            layer=layer,
        )
        o, factors = gdn_verify(t.q, t.k, t.v, t.log_decay, t.beta, state.S, parents, num_nodes, layer=layer)
        return self._finish(o, y), factors, t.inputs

    @property
    def _max_beta(self) -> float:
        return 2.0 if self.config.allow_neg_eigval else 1.0

    def _finish(self, o: Float[Array, "B T HV dv"], y: Float[Array, "B T P"]) -> Float[Array, "B T D"]:
        """From the outputs of the rule, and the gate in the projection ``y``, to the output of the mixer."""
        c = self.config
        gate = y[..., c.conv_dim : c.conv_dim + c.value_dim] if c.use_gate else None
        return self.o_proj(gate_heads(self.o_norm(o), gate, self.dtype))


class MLP(nn.Module):
    """SwiGLU."""

    config: TargetConfig
    dtype: str

    def setup(self) -> None:
        self.gate_up_proj = Linear(2 * self.config.intermediate_size, self.dtype)
        self.down_proj = Linear(self.config.hidden_size, self.dtype)

    def __call__(self, x: Array) -> Float[Array, "..."]:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


class Block(nn.Module):
    """One layer: mixer and MLP, each behind a norm and inside a residual."""

    config: TargetConfig
    dtype: str

    def setup(self) -> None:
        self.attn_norm = RMSNorm(self.config.norm_eps)
        self.attn = GatedDeltaNet(self.config, self.dtype)
        self.mlp_norm = RMSNorm(self.config.norm_eps)
        self.mlp = MLP(self.config, self.dtype)

    def prefill(self, h: Array, lengths: Array | None, S: Array, window: Array | None, starts: Array | None = None):
        out, S, window = self.attn.prefill(self.attn_norm(h), lengths, S, window, starts)
        return self._finish(h, out), S, window

    def verify(self, h: Array, parents: Array, num_nodes: Array, state: RecurrentState, layer: int):
        out, factors, conv = self.attn.verify(self.attn_norm(h), parents, num_nodes, state, layer)
        return self._finish(h, out), factors, conv

    def _finish(self, h: Array, mixed: Array) -> Array:
        h = (h + mixed).astype(self.dtype)
        return (h + self.mlp(self.mlp_norm(h))).astype(self.dtype)


class GatedDeltaNetLM(nn.Module):
    """The language model. ``params`` is a plain nested dict; see the module docstring for the fused layouts.

    Attributes:
      config: shape of the model.
      dtype: "float32" computes in full precision throughout; "bfloat16" rounds weights and activations and keeps
        gates, norms, softmax, the state and its factors in float32.
      feature_layers: layers whose outputs are the drafter's features; None for ``config.feature_layers``.
    """

    config: TargetConfig
    dtype: str = "float32"
    feature_layers: tuple[int, ...] | None = None

    def setup(self) -> None:
        c = self.config
        self.embeddings = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=_normal)
        self.layers = [Block(c, self.dtype) for _ in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.vocab_size, self.dtype)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T V"]:
        """Logits (float32) at every position of ``tokens``, from an empty state."""
        state = RecurrentState.zeros(self.config, tokens.shape[0], self.dtype)
        return self.head(self.prefill(tokens, lengths, state)[0])

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None, state: RecurrentState
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T features"], RecurrentState]:
        """Reads ``lengths`` tokens of each row (all of them if None); tokens beyond are padding and touch nothing.

        Returns:
          The hidden states for :meth:`head`, the drafter's features, and the state after the last real token.
        """
        h = self._embed(tokens)
        outputs, S, conv = [], [], []
        for i, block in enumerate(self.layers):
            window = None if state.conv is None else state.conv[i]
            h, S_i, window = block.prefill(h, lengths, state.S[i], window)
            outputs.append(h)
            S.append(S_i)
            conv.append(window)
        state = RecurrentState(jnp.stack(S), None if state.conv is None else jnp.stack(conv))
        return self.norm(h), self._features(outputs), state

    def verify(
        self,
        tokens: Int[Array, "B N"],
        parents: Int[Array, "B N"],
        num_nodes: Int[Array, " B"],
        state: RecurrentState,
    ) -> tuple[Float[Array, "B N V"], Float[Array, "B N features"], TreeFactors]:
        """Runs a draft tree on top of ``state`` without changing it.

        Args:
          tokens: token of each node, node 0 being the root.
          parents: parent of each node, topological, -1 for the root.
          num_nodes: real nodes of each row; the rest is padding.
          state: committed state, which covers all tokens before the root.

        Returns:
          Logits after each node, the drafter's features of each node, and the factors of all layers.
        """
        h = self._embed(tokens)
        outputs, factors, conv = [], [], []
        for i, block in enumerate(self.layers):
            h, factors_i, conv_i = block.verify(h, parents, num_nodes, state, i)
            outputs.append(h)
            factors.append(factors_i)
            conv.append(conv_i)
        delta = jax.tree.map(lambda *leaves: jnp.stack(leaves), *factors)
        stacked = TreeFactors(delta, None if state.conv is None else jnp.stack(conv))
        return self.head(self.norm(h)), self._features(outputs), stacked

    def head(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits in float32 from normed hidden states."""
        if self.config.tie_word_embeddings:
            return matmul(hidden, self.embeddings.embedding.T, self.dtype)
        return self.lm_head(hidden)

    def _embed(self, tokens: Array) -> Array:
        # Padding may hold any id; clipping keeps it from reading outside the table.
        return jnp.take(self.embeddings.embedding, tokens, axis=0, mode="clip").astype(self.dtype)

    def _features(self, outputs: list[Array]) -> Array:
        return jnp.concatenate([outputs[i] for i in self.feature_layers or self.config.feature_layers], axis=-1)


def call(model: GatedDeltaNetLM, params: Any, method: str, *args: Any) -> Any:
    """``model.method(*args)`` with the given parameters."""
    return model.apply({"params": params}, *args, method=method)
