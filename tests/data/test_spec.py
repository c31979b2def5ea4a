"""Configurations of checkpoints: what is read, and what is refused in which words."""

import json
from pathlib import Path
from typing import Any

import pytest

from charonia.data.model.rotary import inverse_frequencies
from charonia.data.model.spec import ModelSpec, RopeSpec
from charonia.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": None,
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


QWEN_WINDOW = {
    "architectures": ["Qwen3ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 64,
}


def read(
    tmp_path: Path, generation_config: dict[str, Any] | None = None, **overrides: Any
) -> ModelSpec:
    values = {name: value for name, value in (LLAMA | overrides).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    return ModelSpec.from_dir(tmp_path)


def test_a_minimal_configuration_takes_the_defaults_of_transformers(tmp_path: Path) -> None:
    spec = read(tmp_path, num_key_value_heads="absent")
    assert spec.num_kv_heads == 4
    assert spec.head_dim == 16
    assert spec.rope == RopeSpec(10000.0)
    assert spec.rms_norm_eps == 1e-6
    assert spec.dtype is None
    assert not any((spec.is_tied, spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm))
    assert spec.eos_token_ids == ()


def test_both_spellings_of_the_dtype_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, dtype="bfloat16").dtype == "bfloat16"
    assert read(tmp_path, torch_dtype="float16").dtype == "float16"
    assert read(tmp_path, torch_dtype="float16", dtype="bfloat16").dtype == "bfloat16"
    assert read(tmp_path, torch_dtype="float16", dtype=None).dtype == "float16"
    assert read(tmp_path, torch_dtype=None).dtype is None


def test_each_architecture_has_the_biases_and_norms_of_its_family(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen3.head_dim == 128
    llama = read(tmp_path, attention_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.qk_norm) == (True, True, False)


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [({"eos_token_id": [7, 9, 7]}, (7, 9)), ({"eos_token_id": 100}, ()), ({}, ()), (None, (9,))],
)
def test_end_of_sequence_ids_are_those_that_generate_goes_by(
    tmp_path: Path, generation_config: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, generation_config, eos_token_id=9).eos_token_ids == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, (100, 100)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (256, None)),
        ({"architectures": ["MistralForCausalLM"]}, (256, None)),
        (
            {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},
            (4096, 4096),
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
            },
            (64, 64),
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 64}, (256, None)),
        (QWEN_WINDOW, (256, None)),  # by default the first 28 layers have none
        (QWEN_WINDOW | {"max_window_layers": 2}, (256, None)),
        (QWEN_WINDOW | {"max_window_layers": 0}, (64, 64)),
        (QWEN_WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}, (64, 64)),
        (
            QWEN_WINDOW | {"layer_types": ["full_attention"] * 2, "max_window_layers": 0},
            (256, None),
        ),
        (QWEN_WINDOW | {"sliding_window": None, "max_window_layers": 0}, (256, None)),
        ({"sliding_window": 64}, (64, 64)),
    ],
)
def test_a_sliding_window_limits_the_length_where_layers_have_it(
    tmp_path: Path, overrides: dict[str, Any], expected: tuple[int, int | None]
) -> None:
    spec = read(tmp_path, **overrides)
    assert (spec.max_position_embeddings, spec.sliding_window) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM,"
            " Qwen3ForCausalLM",
        ),
        ({"architectures": "absent"}, "unsupported architecture None"),
        ({"hidden_size": None}, "hidden_size must be an integer .* is None"),
        ({"rope_theta": None}, "rope_theta must be a number above 0 .* is None"),
        ({"model_type": "mistral"}, "model_type of LlamaForCausalLM must be 'llama', .* 'mistral'"),
        ({"norm_bias": True}, "unknown key 'norm_bias' = True; accepted is a file without it"),
        ({"a": 1, "b": [2]}, r"'a' = 1; .*'b' = \[2\]"),
        ({"per_layer_config": {"0": {}}}, r"per_layer_config \{'0': \{\}\} \(all layers"),
        ({"is_causal": False}, "is_causal False; accepted is true"),
        ({"is_causal": 1}, "is_causal 1; accepted is true"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size 2 .*; accepted is 0 or null"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": None},
            r"layer_types None \(with it this is a Ministral model\); accepted is a file without",
        ),
        (
            QWEN_WINDOW | {"layer_types": ["sliding_attention"]},
            r"layer_types must be as many as num_hidden_layers \(2\), but are 1",
        ),
        (QWEN_WINDOW | {"layer_types": ["linear_attention"] * 2}, "layer_types must list"),
        (QWEN_WINDOW | {"max_window_layers": -1}, "max_window_layers must be an integer from 0"),
        (
            QWEN_WINDOW | {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "layer_types has 'sliding_attention'.*use_sliding_window: true",
        ),
        ({"hidden_size": "64"}, "hidden_size must be an integer from 1 to 2147483647, but is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* is 0"),
        ({"num_attention_heads": True}, "num_attention_heads .* is True"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, '\'gelu\'; accepted is "silu" or "swish"'),
        ({"dtype": "float64"}, "'float64'; accepted are float32, bfloat16, float16"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, but is 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "'yarn' in rope_scaling; accepted are 'default'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor of rope_scaling must be .* is None"),
        ({"rope_scaling": [1]}, "flat object"),
        ({"rope_scaling": {"rope_type": None, "type": "linear"}}, "type None in rope_scaling"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "attention_factor": 1.1}},
            "unknown key 'attention_factor' = 1.1 in rope_scaling of type 'linear'",
        ),
        (
            {"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_type": "default"}},
            "'yarn' in rope_scaling",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "flat object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor must be above low_freq_factor",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, **overrides)
    assert str(tmp_path) not in str(caught.value)


def test_rope_scaling_counts_where_there_are_rope_parameters_too(tmp_path: Path) -> None:
    linear = {"type": "linear", "factor": 4.0}
    parameters = {"rope_type": "default", "rope_theta": 7.0}
    both = read(tmp_path, rope_scaling=linear, rope_parameters=parameters)
    assert both.rope == RopeSpec(10_000.0, "linear", 4.0)
    assert read(tmp_path, rope_scaling={}, rope_parameters=parameters).rope == RopeSpec(7.0)
    assert read(tmp_path, rope_parameters=parameters, rope_theta=5.0).rope == RopeSpec(7.0)
    assert read(tmp_path, rope_scaling=linear, rope_theta=5).rope == RopeSpec(5.0, "linear", 4.0)


@pytest.mark.parametrize("content", [None, "{", "[]", "\xff"])
def test_a_configuration_that_cannot_be_read_is_refused_without_its_path(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        ModelSpec.from_dir(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths() -> None:
    plain = inverse_frequencies(RopeSpec(10000.0), 64)
    scaled = inverse_frequencies(RopeSpec(10000.0, "llama3", 8.0, 1.0, 4.0, 256), 64)
    wavelengths = 2 * 3.14159265 / plain
    assert (scaled[wavelengths < 64] == plain[wavelengths < 64]).all()
    assert (scaled[wavelengths > 256] == plain[wavelengths > 256] / 8).all()
    between = (wavelengths > 64) & (wavelengths < 256)
    assert between.any()
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()
