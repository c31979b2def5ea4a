"""The treatment of each key of config.json: read, without effect, or refused.

Owns the keys common to all families, and checking those of a family; a family's own keys are in its
file. Keys and defaults are those of transformers' configuration classes, and
`tests/data/test_config_keys.py` compares them. Must not know how values are used (`spec` does).

    honoured         `spec` reads it
    fixed            has no effect at the values listed here; any other value is another model
    generation       likewise; any other value is another text of the same model
    default          of a sampling parameter; `sampling_defaults` reads it
    without effect   at any value: training, bookkeeping, other frameworks, searches of `generate`
    any other        refused: transformers ignores unknown keys, but they were written for a purpose
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from charonia.checkpoint_files import is_one_of
from charonia.errors import CheckpointError, shown
from charonia.sampling_defaults import DEFAULT_KEYS, NEUTRAL

_MAX_PROBLEMS = 8


@dataclass(frozen=True)
class Fixed:
    """A key that must have one of the accepted values; the first is the default.

    Attributes:
        accepted: empty if the key must be absent.
        reason: for the restriction, if the key's name does not explain it.
    """

    accepted: tuple[Any, ...] = ()
    reason: str = ""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FIXED_EVERYWHERE = {
    "hidden_act": Fixed(("silu", "swish")),
    "is_causal": Fixed((True,)),
    "is_encoder_decoder": Fixed((False, None)),
    "add_cross_attention": Fixed((False,)),
    "cross_attention_hidden_size": Fixed((None,)),
    "tie_encoder_decoder": Fixed((False,)),
    "pruned_heads": Fixed(({}, None)),
    "chunk_size_feed_forward": Fixed((0, None)),
    "attention_chunk_size": Fixed((None,)),
    "per_layer_config": Fixed((None,), "all layers must have the same shape"),
    "quantization_config": Fixed(
        (None,), "the checkpoint is quantized, and weights must be in float32, bfloat16 or float16"
    ),
    "transformers_weights": Fixed((None,), "it names another file of weights"),
    "return_dict": Fixed((True, None)),
    "rope_interleaved": Fixed((False,)),
    "use_mrope": Fixed((False,)),
}
_HONOURED_EVERYWHERE = {
    "architectures": None,
    "model_type": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    # `generate` does not use the default of the configuration classes.
    "eos_token_id": None,
    "dtype": None,
    "torch_dtype": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": None,
}
_NULLABLE_EVERYWHERE = _words(
    "rope_parameters rope_scaling partial_rotary_factor eos_token_id dtype torch_dtype"
)


@dataclass(frozen=True)
class Keys:
    """The keys of a family's configurations.

    Attributes:
        honoured: keys that are read, with their defaults.
        nullable: those of the honoured keys that may be null.
        fixed: keys that must have one of certain values.
    """

    honoured: Mapping[str, Any]
    nullable: frozenset[str]
    fixed: Mapping[str, Fixed]

    @classmethod
    def of(
        cls, honoured: Mapping[str, Any], *, nullable: str, fixed: Mapping[str, Fixed]
    ) -> "Keys":
        """Combine the keys of a family with the common ones; `nullable` is a list of words."""
        return cls(
            {**_HONOURED_EVERYWHERE, **honoured},
            _NULLABLE_EVERYWHERE | _words(nullable),
            {**_FIXED_EVERYWHERE, **fixed},
        )

    def default(self, key: str) -> Any:
        """The default of an honoured or fixed key."""
        return self.honoured[key] if key in self.honoured else self.fixed[key].accepted[0]


GENERATION = {
    key: Fixed(accepted, "it is not supported; a generation_config.json without it is the way out")
    for key, accepted in NEUTRAL.items()
}
"""Keys that could change greedy text, with the values that do not. transformers reads them from
config.json only if there is no generation_config.json."""

WITHOUT_EFFECT = _words(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path attn_implementation auto_map is_llama_config model_max_length model_name
    name_or_path tokenizer_class tokenizer_model_max_length tokenizer_padding_side
    transformers.js_config transformers_version unsloth_fixed unsloth_version

    attention_dropout classifier_dropout embd_pdrop gradient_checkpointing hidden_dropout
    initializer_range neftune_noise_alpha pretraining_tp resid_pdrop use_gradient_checkpointing

    finetuning_task id2label label2id num_labels prefix problem_type task_specific_params

    is_decoder max_sequence_length output_attentions output_hidden_states
    tf_legacy_loss torchscript use_bfloat16 use_cache use_flash_attn

    bos_token_id decoder_start_token_id mask_token_id pad_token_id sep_token_id unk_token_id

    assistant_confidence_threshold assistant_lookbehind diversity_penalty do_sample early_stopping
    epsilon_cutoff eta_cutoff length_penalty max_length num_assistant_tokens
    num_assistant_tokens_schedule output_scores remove_invalid_values return_dict_in_generate
    target_lookbehind typical_p
    """
)
"""Keys without an effect, in groups: origin and file formats; training; other uses than as a
language model; options of frameworks; special tokens; generation options that no request can set
here and that greedy text does not depend on."""


def check_keys(values: Mapping[str, Any], name: str, keys: Keys, *, is_generation: bool) -> None:
    """Check that all keys are known, and that their values are read or have no effect.

    Args:
        name: of the architecture. keys: those of its family.
        is_generation: whether `generate` reads this file, because there is no
            generation_config.json.

    Raises:
        CheckpointError: some are not; the text names each key with its value.
    """
    problems = []
    for key, value in values.items():
        if key in keys.honoured or key in WITHOUT_EFFECT or key in DEFAULT_KEYS:
            continue
        if key in GENERATION and not is_generation:
            continue
        fixed = keys.fixed.get(key) or GENERATION.get(key)
        if fixed is None:
            problems.append(
                f"unknown key {shown(key)} = {shown(value)}; accepted is a file without it, if it"
                " changes nothing about the model"
            )
        elif not is_one_of(value, fixed.accepted):
            accepted = " or ".join(map(_as_json, fixed.accepted)) or "a file without it"
            reason = f" ({fixed.reason})" if fixed.reason else ""
            problems.append(f"unsupported {key} {shown(value)}{reason}; accepted is {accepted}")
    if problems:
        raise CheckpointError(f"config.json of a {name}: " + "; ".join(problems[:_MAX_PROBLEMS]))


def _as_json(value: Any) -> str:
    return "null" if value is None else json.dumps(value)
