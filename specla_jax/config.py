"""Configuration of the target, the draft and the sampler: frozen values that check themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specla_jax.errors import UserError

Dtype = Literal["float32", "bfloat16"]

MAX_NODES = 64

# Keys of fla's configuration that change the model; anything else must be known to be harmless.
_REFUSED = {"attn": "softmax attention layers", "attnres_block_size": "attention residuals"}
_HARMLESS = frozenset(
    """architectures attn_mode model_type fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp
    initializer_range max_position_embeddings use_cache pad_token_id torch_dtype dtype transformers_version
    elementwise_affine return_dict output_hidden_states output_attentions torchscript use_bfloat16 pruned_heads
    chunk_size_feed_forward is_encoder_decoder is_decoder cross_attention_hidden_size add_cross_attention
    tie_encoder_decoder finetuning_task id2label label2id task_specific_params problem_type tokenizer_class prefix
    sep_token_id decoder_start_token_id max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens tf_legacy_loss auto_map quantization_config specla""".split()
)


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Shape of a Gated DeltaNet language model, with every derived size resolved.

    Field names are those of flash-linear-attention's ``GatedDeltaNetConfig``. ``intermediate_size``, ``num_v_heads``
    and ``head_v_dim`` are always set: :meth:`from_fla` derives them as that library does.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    num_v_heads: int
    head_dim: int
    head_v_dim: int
    intermediate_size: int
    conv_size: int = 4
    use_short_conv: bool = True
    use_gate: bool = True
    allow_neg_eigval: bool = False
    tie_word_embeddings: bool = False
    norm_eps: float = 1e-6
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "num_v_heads", "head_dim")
        for name in (*sizes, "head_v_dim", "intermediate_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"{name} must be a positive integer, got {value!r}")
        if self.num_v_heads % self.num_heads:
            raise UserError(f"num_v_heads must be a multiple of num_heads={self.num_heads}, got {self.num_v_heads}")
        if self.use_short_conv and not 2 <= self.conv_size <= 5:
            raise UserError(f"conv_size must be 2 to 5, got {self.conv_size}")
        if not self.norm_eps > 0:
            raise UserError(f"norm_eps must be positive, got {self.norm_eps}")

    @property
    def key_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def feature_layers(self) -> tuple[int, int, int]:
        """Layers whose outputs feed a drafter: a low, the middle and the last one (EAGLE-3, arXiv 2503.01840)."""
        last = self.num_hidden_layers - 1
        return (min(2, last // 2), last // 2, last)

    @classmethod
    def from_fla(cls, raw: Mapping[str, Any]) -> "TargetConfig":
        """Reads the dictionary of an fla ``config.json``.

        Raises:
          UserError: another model type, an option that changes the maths and is not supported, an unknown key, or a
            size that does not fit.
        """
        if raw.get("model_type") != "gated_deltanet":
            raise UserError(f"model_type must be 'gated_deltanet', got {raw.get('model_type')!r}")
        for key, what in _REFUSED.items():
            if raw.get(key):
                raise UserError(
                    f"config key {key!r} asks for {what}, which is not supported; use a pure GDN checkpoint"
                )
        if raw.get("hidden_act", "swish") not in ("swish", "silu"):
            raise UserError(f"hidden_act must be 'swish', got {raw['hidden_act']!r}")
        if raw.get("output_gate_activation", "swish") not in ("swish", "silu"):
            raise UserError(f"output_gate_activation must be 'swish', got {raw['output_gate_activation']!r}")
        if raw.get("norm_first"):
            raise UserError("norm_first=true keeps the norms inside attn and mlp, which is not supported")
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim"):
            if type(raw.get(key)) is not int:
                raise UserError(f"config key {key!r} must be a positive integer, got {raw.get(key)!r}")
        for key in ("expand_v", "hidden_ratio", "norm_eps"):
            if not isinstance(raw.get(key, 1), int | float | None):
                raise UserError(f"config key {key!r} must be a number, got {raw[key]!r}")
        known = set(cls.__dataclass_fields__) | _HARMLESS | set(_REFUSED)
        known |= {"expand_v", "hidden_ratio", "hidden_act", "output_gate_activation", "norm_first", "eos_token_id"}
        unknown = sorted(key for key in raw if key not in known and not key.startswith("_"))
        if unknown:
            raise UserError(f"config.json has unknown keys: {', '.join(unknown)}")

        width = raw["head_dim"] * raw.get("expand_v", 2.0)
        head_v_dim = round(width)
        if abs(width - head_v_dim) > 1e-9 * width:
            raise UserError(f"head_dim * expand_v must be an integer, got {raw['head_dim']} * {raw['expand_v']}")
        intermediate_size = raw.get("intermediate_size")
        if intermediate_size is None:
            # fla rounds two thirds of hidden_size * hidden_ratio up to a multiple of 256.
            width = int(raw["hidden_size"] * (raw.get("hidden_ratio") or 4) * 2 / 3)
            intermediate_size = 256 * -(-width // 256)
        eos = raw.get("eos_token_id")
        eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        simple = "conv_size use_short_conv use_gate allow_neg_eigval tie_word_embeddings norm_eps bos_token_id".split()
        return cls(
            **{key: raw[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim")},
            **{key: raw[key] for key in simple if key in raw},
            num_v_heads=raw.get("num_v_heads") or raw["num_heads"],
            head_v_dim=head_v_dim,
            intermediate_size=intermediate_size,
            eos_token_ids=eos_token_ids,
        )

    def to_fla(self, dtype: str) -> dict[str, Any]:
        """The dictionary of an fla ``config.json`` for the same model."""
        eos = self.eos_token_ids
        return {
            "architectures": ["GatedDeltaNetForCausalLM"],
            "model_type": "gated_deltanet",
            "attn_mode": "chunk",
            "attn": None,
            "hidden_act": "swish",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_heads": self.num_heads,
            "num_v_heads": self.num_v_heads,
            "head_dim": self.head_dim,
            "expand_v": self.head_v_dim / self.head_dim,
            "intermediate_size": self.intermediate_size,
            "conv_size": self.conv_size,
            "use_short_conv": self.use_short_conv,
            "use_gate": self.use_gate,
            "allow_neg_eigval": self.allow_neg_eigval,
            "tie_word_embeddings": self.tie_word_embeddings,
            "norm_eps": self.norm_eps,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "torch_dtype": dtype,
        }


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """How much a drafter proposes.

    Attributes:
      depth: levels below the root; at most ``depth + 1`` tokens are committed a round.
      branch: children a node may have (top-k); 1 makes a chain.
      nodes: tokens verified a round, root included, 1 to 64.
      prune_tau: keep nodes whose cumulative log-probability is within ``prune_tau`` nats of the best child of the
        root; None keeps all.
    """

    depth: int = 7
    branch: int = 1
    nodes: int = 8
    prune_tau: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UserError(f"nodes must be 1 to {MAX_NODES}, got {self.nodes}")
        if not 0 <= self.depth < MAX_NODES:
            raise UserError(f"depth must be 0 to {MAX_NODES - 1}, got {self.depth}")
        if not 1 <= self.branch <= MAX_NODES:
            raise UserError(f"branch must be 1 to {MAX_NODES}, got {self.branch}")
        if self.prune_tau is not None and not self.prune_tau >= 0:
            raise UserError(f"prune_tau must be 0 or more, got {self.prune_tau}")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is drawn from the target. Filters apply in this order: temperature, top_k, top_p, min_p.

    ``temperature=0`` is greedy. ``top_k=0``, ``top_p=1`` and ``min_p=0`` switch a filter off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be 0 to 1, got {self.min_p}")
