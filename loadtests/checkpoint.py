"""Checkpoints of given shapes with random weights, made on the spot.

    python loadtests/checkpoint.py llama-135m DIR

Owns the shapes that the recorded results are about. Their tokenizer gives every token id some text,
so that every generated token leads to a streamed chunk.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    # 134.5 M parameters, 269 MB
    "llama-135m": _COMMON
    | {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 10000.0,
    },
    # 125.3 M parameters, 251 MB: as llama-135m, but with heads that two and four ranks can share
    "llama-125m": _COMMON
    | {
        "hidden_size": 768,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "rope_theta": 10000.0,
    },
    # 1.24 G parameters, 2.5 GB: Llama-3.2-1B but for the scaling of its rotations
    "llama-1b": _COMMON
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
}


def make_checkpoint(config: dict[str, Any], directory: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint, in bfloat16, unless it is there; one of another shape gives way."""
    found = directory / "config.json"
    if found.exists() and json.loads(found.read_text(encoding="utf-8")) == config:
        return directory
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tensors = _random_tensors(config, torch.Generator().manual_seed(seed))
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer(config["vocab_size"]).save(str(unfinished / "tokenizer.json"))
    for name, values in {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config.json": config,
    }.items():
        (unfinished / name).write_text(json.dumps(values, indent=2), encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    return directory


def _random_tensors(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": random(queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": random(intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": random(intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, intermediate),
            f"{prefix}.input_layernorm.weight": ones(),
            f"{prefix}.post_attention_layernorm.weight": ones(),
        }
    return tensors | {"model.norm.weight": ones()}


def _make_tokenizer(vocab_size: int) -> Tokenizer:
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"Ġw{index}" for index in range(vocab_size - len(texts))]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    make_checkpoint(SHAPES[options.shape], options.directory)
