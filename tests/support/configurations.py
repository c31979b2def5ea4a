"""Configurations of checkpoints, written by hand as one finds them, and weights to go with them.

Owns values for every key that we know: those that change nothing and those that we refuse. What
they are is transformers' to say: weights are made by it from the same config.json.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from charonia.data.model.config_keys import GENERATION
from support.checkpoints import scale_up

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
TOKENS = 20
"""A sequence has so many; windows are at least that wide."""

WITHOUT_EFFECT: dict[str, Any] = {
    "_attn_implementation": "eager",
    "_attn_implementation_autoset": True,
    "_commit_hash": "4e20de36",
    "_flash_attn_2_enabled": True,
    "_name_or_path": "someone/something",
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "attention_dropout": 0.5,
    "attn_implementation": "eager",
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "bos_token_id": 7,
    "classifier_dropout": 0.5,
    "decoder_start_token_id": 9,
    "diversity_penalty": 0.5,
    "do_sample": True,
    "early_stopping": True,
    "embd_pdrop": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "finetuning_task": "mnli",
    "gradient_checkpointing": True,
    "hidden_dropout": 0.5,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "initializer_range": 0.5,
    "is_decoder": True,
    "is_llama_config": True,
    "label2id": {"a": 0, "b": 1, "c": 2},
    "length_penalty": 2.0,
    "mask_token_id": 3,
    "max_length": 5,
    "max_sequence_length": 4,
    "model_max_length": 4,
    "model_name": "someone/something",
    "name_or_path": "someone/something",
    "neftune_noise_alpha": 5.0,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_labels": 3,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "pad_token_id": 11,
    "prefix": "Say: ",
    "pretraining_tp": 2,
    "problem_type": "regression",
    "remove_invalid_values": True,
    "resid_pdrop": 0.5,
    "return_dict_in_generate": True,
    "sep_token_id": 4,
    "target_lookbehind": 3,
    "task_specific_params": {"text": {"max_length": 3}},
    "tf_legacy_loss": True,
    "tokenizer_class": "LlamaTokenizerFast",
    "tokenizer_model_max_length": 4,
    "tokenizer_padding_side": "right",
    "torchscript": True,
    "transformers.js_config": {"dtype": "q4"},
    "transformers_version": "4.31.0",
    "typical_p": 0.5,
    "unk_token_id": 2,
    "unsloth_fixed": True,
    "unsloth_version": "2024.9",
    "use_bfloat16": True,
    "use_cache": False,
    "use_flash_attn": True,
    "use_gradient_checkpointing": True,
}
"""A value for each key that we pass over, and none that is anybody's default."""

SAMPLING: dict[str, Any] = {
    "max_new_tokens": 2,
    "min_p": 0.3,
    "repetition_penalty": 1.5,
    "temperature": 0.1,
    "top_k": 3,
    "top_p": 0.3,
}
"""A value for each key that is a default of a sampling parameter."""

REFUSED: dict[str, Any] = {
    "add_cross_attention": True,
    "attention_chunk_size": 4,
    "bad_words_ids": [[5]],
    "begin_suppress_tokens": [5],
    "chunk_size_feed_forward": 4,
    "cross_attention_hidden_size": 8,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "exponential_decay_length_penalty": [2, 1.5],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "guidance_scale": 2.0,
    "hidden_act": "gelu",
    "is_causal": False,
    "is_encoder_decoder": True,
    "min_length": 9,
    "min_new_tokens": 9,
    "no_repeat_ngram_size": 2,
    "num_beam_groups": 2,
    "num_beams": 2,
    "num_return_sequences": 2,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"intermediate_size": 16}},
    "pruned_heads": {"0": [1]},
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "return_dict": False,
    "rope_interleaved": True,
    "sequence_bias": [[[5], 2.0]],
    "suppress_tokens": [5],
    "tie_encoder_decoder": True,
    "transformers_weights": "other.safetensors",
    "use_mrope": True,
}
"""A value that is refused for each key that must have one of some values, in all architectures."""

UNKNOWN: dict[str, Any] = {
    "attention_out_bias": True,
    "dual_chunk_attention_config": {"chunk_size": 4},
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu",
    "logit_scale": 0.5,
    "num_experts": 4,
    "original_max_position_embeddings": 16,
    "parallel_residual": True,
    "text_config": {"hidden_size": 16},
    "use_qk_norm": True,
}
"""Keys of other models, which somebody may have meant."""


@dataclass
class Configuration:
    """Configuration of a checkpoint.

    Attributes:
        generation: generation_config.json, None where there is none.
        stored: dtype of the tensors.
        refused: key that the refusal must name; None where it must not be refused.
    """

    values: dict[str, Any]
    generation: dict[str, Any] | None = None
    stored: str = "float32"
    refused: str | None = None

    def write(self, directory: Path) -> Path:
        """Write the configuration alone."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.values))
        if self.generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(self.generation))
        return directory

    def make(self, directory: Path, seed: int) -> Path:
        """Write a checkpoint: transformers says which tensors there are, and of what shape."""
        self.write(directory)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(directory)
            config.initializer_range = 0.02  # scaled up below, which a random one must not be
            model = AutoModelForCausalLM.from_config(config).float()
            scale_up(model)
        tensors = {
            name: tensor.detach().to(getattr(torch, self.stored)).contiguous()
            for name, tensor in model.state_dict().items()
            if not (model.config.tie_word_embeddings and name == "lm_head.weight")
        }
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory


def base(architecture: str, **overrides: Any) -> dict[str, Any]:
    """A small configuration in which every key that is read makes a difference."""
    values = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "sliding_window": 32,
        "eos_token_id": 0,
    }
    if architecture.startswith("Qwen"):
        values |= {"use_sliding_window": True, "max_window_layers": 1}
    return values | overrides


def some(architecture: str, seed: int) -> Configuration:
    """A random configuration; most are such that we must take them."""
    rng = random.Random(f"{architecture} {seed}")
    values = _shape(architecture, rng)
    for add in (_rotary, _window, _dtype, _spellings):
        add(architecture, values, rng)
    keys = rng.sample(sorted(WITHOUT_EFFECT), rng.choice([0, 3, 12]))
    values |= {key: WITHOUT_EFFECT[key] for key in keys}
    if "attn_implementation" in values or "_attn_implementation" in values:
        values.pop("output_attentions", None)
    configuration = Configuration(values)
    configuration.stored = rng.choice(["float32", "bfloat16", "float16"])
    configuration.generation = rng.choice(
        [None, {}, {"eos_token_id": 5}, {"eos_token_id": [1, 5, 999]}, {"eos_token_id": None}]
    )
    if rng.random() < 0.3:
        _spoil(architecture, configuration, rng)
    items = list(configuration.values.items())
    rng.shuffle(items)
    configuration.values = dict(items)
    return configuration


def _shape(architecture: str, rng: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": rng.choice([384, 390]),
        "hidden_size": rng.choice([32, 64]),
        "intermediate_size": rng.choice([48, 96]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
    }
    heads = values["num_attention_heads"] = rng.choice([2, 4, 8])
    kv_heads = rng.choice([None, "missing", 1, 2, heads])
    if architecture == "MistralForCausalLM" and kv_heads in (None, "missing"):
        # Missing ones are 8 there, and null is none.
        values |= {"num_attention_heads": 16, "head_dim": 8}
        kv_heads = "missing"
    if architecture.startswith("Qwen") and kv_heads == "missing":
        values |= {"num_attention_heads": 64, "head_dim": 4}  # and 32 there
    if kv_heads != "missing":
        values["num_key_value_heads"] = kv_heads
    head_dim = rng.choice(["missing", 8, 16, 24])
    if head_dim == "missing" and values["hidden_size"] // values["num_attention_heads"] < 2:
        head_dim = 8
    if head_dim != "missing":
        values.setdefault("head_dim", head_dim)
    for key, choices in {
        "max_position_embeddings": [TOKENS, 64, 4096],
        "rms_norm_eps": [1e-5, 1e-2],
        "tie_word_embeddings": [True, False],
        "hidden_act": ["silu", "swish"],
        "eos_token_id": [0, None, [3, 4]],
    }.items():
        if (value := rng.choice(["missing", *choices])) != "missing":
            values[key] = value
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        values["attention_bias"] = rng.choice([True, False])
    if architecture == "LlamaForCausalLM":
        values["mlp_bias"] = rng.choice([True, False])
    return values


def _rotary(architecture: str, values: dict[str, Any], rng: random.Random) -> None:
    def parameters() -> dict[str, Any]:
        kind = rng.choice(["default", "linear", "llama3", "missing"])
        made: dict[str, Any] = {}
        if kind != "missing":
            made[rng.choice(["rope_type", "type"])] = kind
        if kind in ("linear", "llama3"):
            made["factor"] = rng.choice([2, 4.0])
        if kind == "llama3":
            made |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2, 4.0])}
            if rng.random() < 0.5:
                made["original_max_position_embeddings"] = 16
        if rng.random() < 0.5:
            made["rope_theta"] = rng.choice([100.0, 500])
        return made

    if rng.random() < 0.5:
        values["rope_theta"] = rng.choice([50.0, 1000])
    for key in ("rope_parameters", "rope_scaling"):
        if rng.random() < 0.5:
            values[key] = rng.choice([None, {}, parameters(), parameters(), parameters()])
    if rng.random() < 0.2:
        values["partial_rotary_factor"] = rng.choice([None, 1.0])


def _window(architecture: str, values: dict[str, Any], rng: random.Random) -> None:
    if (window := rng.choice(["missing", None, TOKENS, 48, 10_000])) != "missing":
        values["sliding_window"] = window
    if not architecture.startswith("Qwen"):
        return
    if rng.random() < 0.7:
        values["use_sliding_window"] = rng.choice([True, False])
    if rng.random() < 0.7:
        values["max_window_layers"] = rng.choice([0, 1, 28])
    num_layers = values["num_hidden_layers"]
    has_window = values.get("use_sliding_window") and values.get("sliding_window", 0) is not None
    kinds = ["full_attention"] + (["sliding_attention"] if has_window else [])
    if rng.random() < 0.5:
        listed = rng.choices(kinds, k=num_layers)
        values["layer_types"] = rng.choice([None, listed, listed])


def _dtype(architecture: str, values: dict[str, Any], rng: random.Random) -> None:
    for key in ("dtype", "torch_dtype"):
        if rng.random() < 0.5:
            values[key] = rng.choice([None, "float32", "bfloat16", "float16"])


def _spellings(architecture: str, values: dict[str, Any], rng: random.Random) -> None:
    """Keys that must have one of some values, with one of these."""
    for key, accepted in {
        "is_encoder_decoder": [False],
        "chunk_size_feed_forward": [0],
        "quantization_config": [None],
        "per_layer_config": [None],
        "is_causal": [True],
        "use_mrope": [False],
        "pruned_heads": [{}],
        "repetition_penalty": [1.0, None],
        "num_beams": [1],
        "no_repeat_ngram_size": [0],
        "suppress_tokens": [None],
    }.items():
        if rng.random() < 0.2:
            values[key] = rng.choice(accepted)


def _spoil(architecture: str, configuration: Configuration, rng: random.Random) -> None:
    """Put in something that must be refused."""
    values = configuration.values
    own: dict[str, Any] = {
        "model_type": "gemma",
        "vocab_size": None,
        "dtype": "float64",
        "tie_word_embeddings": 1,
        "rope_scaling": {"rope_type": rng.choice(["yarn", "dynamic", "longrope"]), "factor": 2.0},
    }
    if architecture != "LlamaForCausalLM":
        own["mlp_bias"] = True
    if architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        own["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    else:
        own["layer_types"] = ["full_attention"] * (values["num_hidden_layers"] + 1)
    kind = rng.choice([REFUSED, UNKNOWN, own])
    key = rng.choice(sorted(kind))
    values[key] = kind[key]
    configuration.refused = key
    if key in GENERATION and configuration.generation is not None:
        configuration.refused = None
    if key == "rope_scaling":
        configuration.refused = values[key]["rope_type"]
