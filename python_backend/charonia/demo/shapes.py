"""The two demo models: a target of about 6 M parameters and a draft of about 1 M.

Owns their shapes and how they are written to disk. Must not know how they are trained.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from charonia.demo.vocabulary import END_OF_TEXT_ID, VOCAB_SIZE

CONTEXT = 1024
# On a CPU plain matrix products, once compiled, are faster than the fused attention.
ATTENTION = "eager"


@dataclass(frozen=True)
class Shape:
    """The dimensions in which the two models differ; all else is the same."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int


# Four query heads share two KV heads in both, so that both can be split over two or four ranks.
TARGET = Shape("charonia-demo", hidden_size=256, intermediate_size=768, num_layers=6)
DRAFT = Shape("charonia-demo-draft", hidden_size=128, intermediate_size=384, num_layers=2)
SHAPES = {"target": TARGET, "draft": DRAFT}


def build_model(shape: Shape) -> LlamaForCausalLM:
    """Make a float32 model with weights drawn from torch's global generator."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "attn_implementation": ATTENTION,
    }
    return LlamaForCausalLM(LlamaConfig(**settings))


def save_model(model: Any, folder: Path) -> None:
    """Round the model to bfloat16, in place, and write its configuration and weights."""
    model.to(torch.bfloat16)
    generation_config: Any = GenerationConfig
    model.generation_config = generation_config(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID
    )
    model.save_pretrained(folder)


def load_model(folder: Path) -> Any:
    """Load the saved model with transformers, in float32 and in evaluation mode."""
    model: Any = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION
    )
    return model.eval()
