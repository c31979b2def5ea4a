"""Configurations as the makers of well-known models publish them: what is made of each."""

import json
from pathlib import Path
from typing import Any

import pytest

from charonia.data.model.spec import ModelSpec, RopeSpec
from charonia.errors import CheckpointError

SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
]


def published(architecture: str, sizes: str, **values: Any) -> dict[str, Any]:
    """What all of them say, beside what is each one's own.

    Args:
        sizes: vocabulary, hidden, inner, layers, heads, KV heads, positions.
    """
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        **dict(zip(SIZES, map(int, sizes.split()), strict=True)),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "use_cache": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **values,
    }


LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
LLAMA_31 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 500000.0,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN_25 = {
    "attention_dropout": 0.0,
    "rope_theta": 1e6,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}

Expected = tuple[RopeSpec, int, int]  # positions, of which that many can be served; head_dim
PUBLISHED: dict[str, tuple[dict[str, Any], Expected]] = {
    "Llama-2-7b-chat": (
        published(
            LLAMA,
            "32000 4096 11008 32 32 32 4096",
            _name_or_path="meta-llama/Llama-2-7b-chat-hf",
            max_length=4096,
            pad_token_id=0,
            pretraining_tp=1,
            rope_scaling=None,
            temperature=0.9,
            top_p=0.6,
        ),
        (RopeSpec(1e4), 4096, 128),
    ),
    "Llama-3.1-8B": (
        published(LLAMA, "128256 4096 14336 32 32 8 131072", **LLAMA_31),
        (RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 131072, 128),
    ),
    "Llama-3.2-1B of unsloth": (
        published(
            LLAMA,
            "128256 2048 8192 16 32 8 131072",
            **LLAMA_31,
            head_dim=64,
            unsloth_fixed=True,
            unsloth_version="2024.11.5",
            _attn_implementation_autoset=True,
        ),
        (RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 131072, 64),
    ),
    "Llama-3.2-1B saved by transformers 5": (
        published(
            LLAMA,
            "128256 2048 8192 16 32 8 131072",
            **{key: value for key, value in LLAMA_31.items() if not key.startswith("rope")},
            rope_parameters=LLAMA_31["rope_scaling"] | {"rope_theta": 500000.0},
            dtype="bfloat16",
            transformers_version="5.0.0",
        ),
        (RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 131072, 64),
    ),
    "SmolLM2-135M": (
        published(
            LLAMA,
            "49152 576 1536 30 9 3 8192",
            is_llama_config=True,
            rope_interleaved=False,
            rope_scaling=None,
            rope_theta=100000,
            **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        ),
        (RopeSpec(1e5), 8192, 64),
    ),
    "deepseek-coder-6.7b": (
        published(
            LLAMA,
            "32256 4096 11008 32 32 32 16384",
            rope_scaling={"factor": 4.0, "type": "linear"},
            rope_theta=100000,
        ),
        (RopeSpec(1e5, "linear", 4.0), 16384, 128),
    ),
    "Mistral-7B-v0.1": (
        published(
            MISTRAL, "32000 4096 14336 32 32 8 32768", sliding_window=4096, rope_theta=10000.0
        ),
        (RopeSpec(1e4), 4096, 128),
    ),
    "Mistral-Nemo": (
        published(
            MISTRAL,
            "131072 5120 14336 40 32 8 131072",
            head_dim=128,
            sliding_window=None,
            rope_theta=1e6,
            attention_dropout=0.0,
        ),
        (RopeSpec(1e6), 131072, 128),
    ),
    "Qwen2.5-7B": (
        published(QWEN2, "152064 3584 18944 28 28 4 32768", **QWEN_25),
        (RopeSpec(1e6), 32768, 128),
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        published(
            QWEN2,
            "151936 1536 8960 28 12 2 131072",
            **QWEN_25 | {"sliding_window": 4096, "max_window_layers": 21, "rope_theta": 1e4},
            use_mrope=False,
        ),
        (RopeSpec(1e4), 131072, 128),
    ),
    "Qwen3-8B": (
        published(
            QWEN3,
            "151936 4096 12288 36 32 8 40960",
            **QWEN_25 | {"sliding_window": None, "max_window_layers": 36},
            head_dim=128,
            attention_bias=False,
            rope_scaling=None,
        ),
        (RopeSpec(1e6), 40960, 128),
    ),
}


def read(directory: Path, values: dict[str, Any]) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(values))
    return ModelSpec.from_dir(directory)


@pytest.mark.parametrize(("values", "expected"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_published_configuration_is_taken(
    tmp_path: Path, values: dict[str, Any], expected: Expected
) -> None:
    spec = read(tmp_path, values)
    assert (spec.rope, spec.max_position_embeddings, spec.head_dim) == expected
    assert spec.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B"])
def test_the_yarn_block_that_qwen_documents_is_refused_by_name(tmp_path: Path, name: str) -> None:
    values, _ = PUBLISHED[name]
    with pytest.raises(CheckpointError, match="unsupported rope type 'yarn' in rope_scaling"):
        read(tmp_path, values | {"rope_scaling": YARN})


def test_a_quantized_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    values, _ = PUBLISHED["Qwen2.5-7B"]
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    with pytest.raises(
        CheckpointError, match=r"unsupported quantization_config .*'awq'.* quantized"
    ):
        read(tmp_path, values | {"quantization_config": awq})
