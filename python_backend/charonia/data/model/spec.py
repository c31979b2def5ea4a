"""The shape of a checkpoint: `ModelSpec`, read from config.json and generation_config.json.

Owns the meaning of the values of a Hugging Face configuration, in the spellings of transformers 4
and 5. `families` owns the keys, and the other differences between families. Must not know tensors
or devices.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from charonia.checkpoint_files import read_json_object
from charonia.data.model.config_keys import check_keys
from charonia.data.model.config_values import ConfigValues, as_integer, as_number
from charonia.data.model.families import family_of
from charonia.data.model.families.family import Family, SublayerName
from charonia.errors import CheckpointError, shown

DTYPES = ("float32", "bfloat16", "float16")
RopeKind = Literal["default", "linear", "llama3"]
_ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
_ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base frequency and scaling to longer contexts.

    `factor` is used by linear and llama3, the last three fields only by llama3.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """Everything that the decoder needs to know of a checkpoint's shape.

    Attributes:
        max_position_embeddings: the most tokens of a sequence. Sliding-window attention is not
            implemented, but within its window it equals full attention. So if a checkpoint has a
            smaller window, this is the window.
        sliding_window: the window, if it limits `max_position_embeddings`.
        qkv_bias, output_bias, mlp_bias: whether those projections have a bias.
        qk_norm: RMSNorm over each head of queries and keys (Qwen3).
        sublayers: of every layer, in order; see `sublayers`.
        dtype: to compute in; None if the configuration does not name one and that of the stored
            tensors applies.
        eos_token_ids: tokens at which `generate` stops; only those of the vocabulary.
        num_stored_ids: number of token ids with rows in the checkpoint, if it is not `vocab_size`.
            Surplus rows are left out, missing ones are zeros.
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
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    num_stored_ids: int | None = None
    sublayers: tuple[SublayerName, ...] = ("attention", "mlp")

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the whole checkpoint; a tied head counts once."""
        layer = sum(map(self._num_parameters_of, self.sublayers))
        num_tables = 1 if self.is_tied else 2
        num_ids = self.num_stored_ids or self.vocab_size
        return (num_ids * num_tables + 1) * self.hidden_size + self.num_layers * layer

    def _num_parameters_of(self, name: SublayerName) -> int:
        """The number of parameters of one sublayer, including its norm."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        match name:
            case "attention":
                weights = hidden * (query + 2 * kv) + query * hidden + hidden
                biases = (query + 2 * kv) * self.qkv_bias + hidden * self.output_bias
                return weights + biases + 2 * self.head_dim * self.qk_norm
            case "mlp":
                return 3 * hidden * inner + hidden + (2 * inner + hidden) * self.mlp_bias

    def with_vocabulary(self, size: int) -> "ModelSpec":
        """The same model with the vocabulary size of another model.

        Vocabularies are padded to a round number, which may differ between models of one tokenizer:
        Qwen2.5 models have 151,936 or 152,064 ids. A missing id gets the logit 0. If a draft model
        guesses such an id, the draft is rejected; the text does not change.
        """
        return replace(self, vocab_size=size, num_stored_ids=self.num_stored_ids or self.vocab_size)

    @classmethod
    def from_dir(cls, path: Path) -> "ModelSpec":
        """Read the checkpoint in directory `path`.

        Raises:
            CheckpointError: there is no config.json; or an architecture, key or value is invalid or
                not supported. The text names it and what is accepted.
        """
        values = read_json_object(path / "config.json")
        family = family_of(values)
        # `generate` reads generation_config.json alone, or config.json if there is none.
        generation_path = path / "generation_config.json"
        has_generation = generation_path.exists()
        check_keys(values, family.architecture, family.keys, is_generation=not has_generation)
        generation = read_json_object(generation_path) if has_generation else values
        eos_token_ids = _eos_token_ids(generation)
        return cls._from_config(ConfigValues(values, family.keys), family, eos_token_ids)

    @classmethod
    def _from_config(
        cls, config: ConfigValues, family: Family, eos_token_ids: list[int]
    ) -> "ModelSpec":
        vocab_size = config.integer("vocab_size")
        num_heads = config.integer("num_attention_heads")
        num_kv_heads = config.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads"
                f" ({num_kv_heads})"
            )
        hidden_size = config.integer("hidden_size")
        if family.heads_divide_hidden_size and hidden_size % num_heads:
            raise CheckpointError(
                f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads"
                f" ({num_heads})"
            )
        head_dim = config.integer("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary embedding, but is {head_dim}")
        num_layers = config.integer("num_hidden_layers")
        max_position_embeddings = config.integer("max_position_embeddings")
        window = family.window(config)
        if window is not None and window >= max_position_embeddings:
            window = None
        has_bias = config.flag("attention_bias")
        return cls(
            architecture=family.architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=window or max_position_embeddings,
            sliding_window=window,
            rms_norm_eps=config.number("rms_norm_eps"),
            rope=_rope(config, max_position_embeddings),
            qkv_bias=has_bias,
            output_bias=has_bias and family.has_output_bias,
            mlp_bias=config.flag("mlp_bias"),
            qk_norm=family.has_head_norms,
            is_tied=config.flag("tie_word_embeddings"),
            sublayers=family.sublayers,
            dtype=_dtype(config),
            eos_token_ids=tuple(id_ for id_ in dict.fromkeys(eos_token_ids) if id_ < vocab_size),
        )


def _dtype(config: ConfigValues) -> str | None:
    # `dtype` in transformers 5, `torch_dtype` in 4. If both are given, the former counts.
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"unsupported dtype {shown(dtype)}; accepted are {', '.join(DTYPES)}")
    return None if dtype is None else str(dtype)


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


def _rope(config: ConfigValues, max_position_embeddings: int) -> RopeSpec:
    """Read `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    If both are given, transformers reads only the former.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(part, dict) for part in values.values()):
        raise CheckpointError(
            f"{name} must be one flat object for all layers, but is {shown(values)}"
        )
    # `type` was the older spelling of `rope_type`.
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise CheckpointError(
            f"unsupported rope type {shown(kind)} in {name}; accepted are"
            f" {', '.join(map(repr, _ROPE_KINDS))}"
        )
    for key in values:
        if key not in _ROPE_KEYS:
            raise CheckpointError(
                f"unknown key {shown(key)} = {shown(values[key])} in {name} of type {kind!r};"
                f" accepted are {', '.join(_ROPE_KEYS)}"
            )
    for factors in (values, config.values):
        if factors.get("partial_rotary_factor") not in (None, 1):
            raise CheckpointError(
                f"unsupported partial_rotary_factor {shown(factors['partial_rotary_factor'])};"
                " accepted is 1"
            )
    theta = as_number("rope_theta", values.get("rope_theta", config.get("rope_theta")))
    if kind == "default":
        return RopeSpec(theta)
    factor = as_number(f"factor of {name}", values.get("factor"))
    if kind == "linear":
        return RopeSpec(theta, "linear", factor)
    low = as_number("low_freq_factor", values.get("low_freq_factor"))
    high = as_number("high_freq_factor", values.get("high_freq_factor"))
    if low >= high:
        raise CheckpointError(
            f"high_freq_factor must be above low_freq_factor ({low}), but is {high}"
        )
    key = "original_max_position_embeddings"
    length = as_integer(key, values.get(key, max_position_embeddings))
    return RopeSpec(theta, "llama3", factor, low, high, length)
