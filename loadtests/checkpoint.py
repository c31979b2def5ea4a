"""A checkpoint of the `llama-135m` shape with random weights, made on the spot.

Owns the shape that the recorded results are about. Its tokenizer gives every token id some text,
so that every generated token leads to a streamed chunk.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 49152
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def make_llama_135m(directory: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint unless it is there: 134.5 M parameters, bfloat16, 269 MB."""
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    hidden, intermediate = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    tensors = {"model.embed_tokens.weight": random(VOCAB_SIZE, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": random(hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": random(intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": random(intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, intermediate),
            f"{prefix}.input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    return directory


def _make_tokenizer() -> Tokenizer:
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"Ġw{index}" for index in range(VOCAB_SIZE - len(texts))]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
