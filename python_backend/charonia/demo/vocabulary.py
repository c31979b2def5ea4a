"""The demo models' tokenizer: byte-level BPE over Python sources.

Owns how text is split before merging and how the tokenizer is saved. Must not know models.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {{- message.content | map(attribute="text") | join }}
    {%- endif %}
    {%- if not loop.last %}{{- "\n" }}{%- endif %}
{%- endfor %}
"""
"""The models were never trained on conversations: they continue a message as code."""

# One piece is an identifier, a short number or a run of punctuation, each with at most one space
# before it; or a run of line ends; or a run of spaces. So indentation is always a piece of its
# own: a prompt may end before or after it, and the model has seen both.
SPLIT = (
    r" ?[\p{L}\p{M}_]+"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}_]+"
    r"|[\r\n]+"
    r"| {2,}"
    r"|\s"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer: 256 bytes, `<|endoftext|>` as id 0, and merges up to VOCAB_SIZE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as `AutoTokenizer` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, ended by `<|endoftext|>`."""
    return [[*encoding.ids, END_OF_TEXT_ID] for encoding in tokenizer.encode_batch(texts)]
