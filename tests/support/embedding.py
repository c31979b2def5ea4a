"""A small random BERT as sentence-transformers has it, made on the spot by transformers itself.

Owns its shape and its tokenizer of whole words. Must not know charonia.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = tuple(
    "the a cat dog sat ran on under mat tree is was not how why who big small".split()  # noqa: SIM905
)
_SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]")
MAX_TOKENS = 24


def make_bert(
    directory: Path, *, pooling: str = "mean_tokens", seed: int = 0, **config: Any
) -> Path:
    """Write a random checkpoint into a directory; returns it.

    Args:
        config: values of config.json instead of the usual ones.
    """
    vocabulary = {word: place for place, word in enumerate((*_SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(length=MAX_TOKENS, pad_id=3, pad_token="[PAD]")
    values = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.BertModel(transformers.BertConfig(**values))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases are 0 at first, and the scales of norms 1
                parameter.data += 0.1 * torch.randn_like(parameter)
    directory.mkdir(exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS})
    types = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in types]
    write_json(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max")
    }
    write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **modes})
    if config:
        path = directory / "config.json"
        write_json(path, json.loads(path.read_text()) | config)
    return directory


def write_json(path: Path, value: Any) -> None:
    """Write a file."""
    path.write_text(json.dumps(value), encoding="utf-8")
