"""What a checkpoint is: `ModelSpec`, read from config.json and generation_config.json.

Owns the names and defaults of Hugging Face configurations (those of transformers 4 and 5). Must
not know tensors or devices.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from charonia.checkpoint_files import read_json_object
from charonia.errors import CheckpointError, ConfigError, shown

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
DTYPES = ("float32", "bfloat16", "float16")
RopeKind = Literal["default", "linear", "llama3"]

_DEFAULT_SLIDING_WINDOW = 4096
_DEFAULT_QWEN3_HEAD_DIM = 128
_DEFAULT_ROPE_THETA = 10_000.0
# Far beyond any model's; within them no tensor's shape or float32 number overflows.
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e30


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base frequency and how it is stretched to longer contexts.

    `factor` is of linear and llama3; the last three are of llama3 alone.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a checkpoint's shape that the decoder needs.

    Attributes:
        max_position_embeddings: tokens a sequence may have. Sliding-window attention is not
            computed; within its window it equals full attention, so where a checkpoint uses one,
            this is the window if that is smaller.
        sliding_window: the window, where it is what limits `max_position_embeddings`.
        qkv_bias, output_bias, mlp_bias: whether those projections have a bias.
        qk_norm: RMSNorm over each head of queries and keys (Qwen3).
        dtype: of the stored weights.
        eos_token_ids: of generation_config.json, then of config.json; those of the vocabulary.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    sliding_window: int | None
    rms_norm_eps: float
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_tied: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Of the whole model; a tied head counts once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner + 2 * hidden
        layer += (query + 2 * kv) * self.qkv_bias + hidden * self.output_bias
        layer += (2 * inner + hidden) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        vocabulary = self.vocab_size * hidden * (1 if self.is_tied else 2)
        return vocabulary + self.num_layers * layer + hidden

    @classmethod
    def from_dir(cls, path: Path) -> "ModelSpec":
        """Read the checkpoint in directory `path`.

        Raises:
            CheckpointError: no config.json, an architecture or a feature that is not supported,
                or a value that is missing or makes no sense; the text names it and what would do.
        """
        config = _Config(read_json_object(path / "config.json"))
        generation = read_json_object(path / "generation_config.json", is_optional=True)
        eos_token_ids = _eos_token_ids(generation) + _eos_token_ids(config.values)
        return cls._from_config(config, tuple(dict.fromkeys(eos_token_ids)))

    @classmethod
    def _from_config(cls, config: "_Config", eos_token_ids: tuple[int, ...]) -> "ModelSpec":
        architecture = _architecture(config.values)
        _refuse_unsupported(config.values)
        vocab_size = config.integer("vocab_size")
        num_heads = config.integer("num_attention_heads")
        num_kv_heads = config.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads"
                f" ({num_kv_heads})"
            )
        hidden_size = config.integer("hidden_size")
        default_head_dim = hidden_size // num_heads
        if architecture == "Qwen3ForCausalLM":
            default_head_dim = _DEFAULT_QWEN3_HEAD_DIM
        head_dim = config.integer("head_dim", default_head_dim)
        if head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary embedding, but is {head_dim}")
        max_position_embeddings = config.integer("max_position_embeddings")
        window = _sliding_window(config, architecture)
        if window is not None and window >= max_position_embeddings:
            window = None
        has_bias = config.flag("attention_bias") and architecture != "MistralForCausalLM"
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=window or max_position_embeddings,
            sliding_window=window,
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=_rope(config, max_position_embeddings),
            qkv_bias=is_qwen2 or has_bias,
            output_bias=has_bias and not is_qwen2,
            mlp_bias=architecture == "LlamaForCausalLM" and config.flag("mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            is_tied=config.flag("tie_word_embeddings"),
            dtype=_dtype(config.values),
            eos_token_ids=tuple(id_ for id_ in eos_token_ids if id_ < vocab_size),
        )


def check_draft(draft: ModelSpec, target: ModelSpec) -> None:
    """Make sure that a draft model's tokens can be the target's.

    Raises:
        ConfigError: their vocabularies differ in size.
    """
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the model one of"
            f" {target.vocab_size}; both must have the same tokenizer"
        )


@dataclass(frozen=True)
class _Config:
    """A JSON object with typed access; a JSON null counts as missing."""

    values: dict[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        value: int = self._get(name, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not 1 <= value <= _MAX_INTEGER:
            raise CheckpointError(
                f"{name} must be an integer from 1 to {_MAX_INTEGER}, but is {shown(value)}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1 / _MAX_NUMBER <= value <= _MAX_NUMBER:
            raise CheckpointError(
                f"{name} must be a number above 0 (from {1 / _MAX_NUMBER:g} to {_MAX_NUMBER:g}),"
                f" but is {shown(value)}"
            )
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._get(name, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"{name} must be true or false, but is {shown(value)}")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json has no {name}")
        return value


def _architecture(values: dict[str, Any]) -> str:
    architectures = values.get("architectures")
    if isinstance(architectures, list):
        for name in architectures:
            if name in ARCHITECTURES:
                return str(name)
    raise CheckpointError(
        f"unsupported architecture {shown(architectures)}; accepted are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(values: dict[str, Any]) -> None:
    if values.get("quantization_config"):
        raise CheckpointError(
            "the checkpoint is quantized (quantization_config); accepted are weights in "
            + ", ".join(DTYPES)
        )
    activation = values.get("hidden_act") or "silu"
    if activation != "silu":
        raise CheckpointError(f"unsupported hidden_act {shown(activation)}; accepted is 'silu'")


def _dtype(values: dict[str, Any]) -> str:
    # transformers 5 says `dtype`, 4 said `torch_dtype`.
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise CheckpointError(f"unsupported dtype {shown(dtype)}; accepted are {', '.join(DTYPES)}")
    return str(dtype)


def _eos_token_ids(values: dict[str, Any]) -> list[int]:
    ids = values.get("eos_token_id")
    if ids is None:
        return []
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(
            f"eos_token_id must be a token id or a list of them, but is {shown(ids)}"
        )
    return ids


def _sliding_window(config: _Config, architecture: str) -> int | None:
    """The window of sliding-window attention, None where every layer attends to everything."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        if "sliding_window" in config.values and config.values["sliding_window"] is None:
            return None
        return config.integer("sliding_window", _DEFAULT_SLIDING_WINDOW)
    if not config.flag("use_sliding_window"):
        return None
    return config.integer("sliding_window", _DEFAULT_SLIDING_WINDOW)


def _rope(config: _Config, max_position_embeddings: int) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (before)."""
    values = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(values, dict) or any(isinstance(part, dict) for part in values.values()):
        raise CheckpointError(
            f"rope_parameters must be one flat object for all layers, but is {shown(values)}"
        )
    parameters = _Config(values)
    theta = parameters.number("rope_theta", config.number("rope_theta", _DEFAULT_ROPE_THETA))
    for factors in (values, config.values):
        if factors.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise CheckpointError(
                f"unsupported partial_rotary_factor {shown(factors['partial_rotary_factor'])};"
                " accepted is 1"
            )
    # `type` was the older spelling of `rope_type`.
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", parameters.number("factor"))
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        if low >= high:
            raise CheckpointError(
                f"high_freq_factor must be above low_freq_factor ({low}), but is {high}"
            )
        return RopeSpec(
            theta,
            "llama3",
            parameters.number("factor"),
            low,
            high,
            parameters.integer("original_max_position_embeddings", max_position_embeddings),
        )
    raise CheckpointError(
        f"unsupported rope type {shown(kind)}; accepted are 'default', 'linear' and 'llama3'"
    )
