"""Small random checkpoints in Hugging Face format, made on the spot by transformers itself.

Owns their shape, the scaling that keeps greedy text varied, and a byte-level BPE tokenizer to go
with them. Must not know charonia.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
VOCAB_SIZE = 384
EOS_TOKEN = "<|endoftext|>"
EOS_TOKEN_ID = 0

WEIGHT_SCALE = 12.0
"""Scale of random weights. At transformers' initial weights (standard deviation 0.02) and hidden
size 64, greedy text is a loop of one token: the layers hardly add to the residual stream. Scaled up
it stays varied."""

_CORPUS = [
    "The triton shell is a large sea snail; its shell was blown as a trumpet by sons of the sea.",
    "A request waits in the queue until the scheduler finds blocks for its whole prompt.",
    "def main(argv: list[str]) -> int:\n    return sum(len(word) for word in argv)\n",
    "for index, value in enumerate(values):\n    print(index, value)\n",
    "Grüße aus München: über Öl, Äpfel und süße Straßen. Zwölf Boxkämpfer jagen Viktor.",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Съешь ещё этих булок.",
    "いろはにほへと ちりぬるを わかよたれそ つねならむ うゐのおくやま けふこえて",
    "🐚 🌊 🐚 🌊 — “quoted” … 🐚🐚🌊🌊",
]


def make_checkpoint(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint with tokenizer.json into `directory`.

    Args:
        overrides: values of the model's configuration, e.g. `tie_word_embeddings=True`.

    Returns:
        `directory`.
    """
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
    }
    if architecture == "Qwen3ForCausalLM":
        values["head_dim"] = 32
    if architecture == "MistralForCausalLM":
        values["sliding_window"] = None
    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**(values | overrides)))
        scale_up(model)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    return directory


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE tokenizer: one special token, 256 bytes, merges up to `vocab_size`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def assert_varied(token_ids: Sequence[int]) -> None:
    """Assert that a text is no loop: at least a third of its tokens differ from all before them."""
    num_distinct = len(set(token_ids))
    assert num_distinct >= len(token_ids) / 3, (
        f"only {num_distinct} distinct tokens among {len(token_ids)}: {list(token_ids)}"
    )


def scale_up(model: torch.nn.Module) -> None:
    """Scale matrices up; make biases and norms' scales random, so that each of them matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(WEIGHT_SCALE)
            elif bool((parameter == 0).all()):
                parameter.normal_(std=0.3)
            else:
                parameter.uniform_(0.5, 1.5)
