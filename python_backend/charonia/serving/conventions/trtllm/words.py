"""Words beside a prompt: their limits, and their logit biases.

Owns the limits: words are tokenized at once, while other requests wait. Must not know the use of
words.
"""

from collections.abc import Mapping

import numpy as np

from charonia.errors import InvalidRequestError
from charonia.protocol import MAX_CHARACTERS, MAX_ENTRIES
from charonia.serving.conventions.trtllm.rows import Row
from charonia.serving.conventions.trtllm.tables import MAX_BATCH_SIZE
from charonia.serving.requests.raw_request import Array, num_bytes_of
from charonia.text.tokenizer import Tokenizer

_MAX_BIAS_CHARACTERS = 2**16
_MAX_WORD_BYTES = 2**18
"""Most bytes of one input, over its whole batch."""
_MAX_WORDS = MAX_BATCH_SIZE * max(MAX_ENTRIES.values())
"""Most texts of one input, over its whole batch, empty ones included: each is looked at."""
_PROMPTS = ("text_input", "QUERY")
_WORD_LISTS = ("stop_words_list", "bad_words_list")
"""Words as token ids."""


def check_words(tensors: Mapping[str, Array]) -> None:
    """Raises InvalidRequestError: the words beside the prompts are too many or too long."""
    for name, array in tensors.items():
        is_text = array.dtype == np.object_ and name not in _PROMPTS
        if is_text and array.size > _MAX_WORDS:
            raise InvalidRequestError(
                f"{name} must have at most {_MAX_WORDS} texts, but has {array.size}"
            )
        if is_text or name in _WORD_LISTS:
            num_bytes = num_bytes_of(array)
            if num_bytes > _MAX_WORD_BYTES:
                raise InvalidRequestError(
                    f"{name} must have at most {_MAX_WORD_BYTES} bytes, but has {num_bytes}"
                )


def within(name: str, texts: list[str], limit: str) -> list[str]:
    """Return the texts; raises InvalidRequestError if there are too many or too long ones."""
    most, num = MAX_ENTRIES[limit], sum(map(len, texts))
    most_characters = MAX_CHARACTERS.get(limit, _MAX_BIAS_CHARACTERS)
    if len(texts) > most or num > most_characters:
        raise InvalidRequestError(
            f"{name} must have at most {most} entries and {most_characters} characters, but has "
            f"{len(texts)} and {num}"
        )
    return texts


def bias_of(row: Row, words_name: str, weights_name: str, tokenizer: Tokenizer) -> dict[int, float]:
    """The logit biases of words with a weight each, by token id. Empty words have none.

    Raises:
        InvalidRequestError: the numbers of words and weights differ.
    """
    words = within(words_name, row.all_texts(words_name), "logit_bias")
    weights = row.tensors.get(weights_name, np.array([])).ravel().tolist()
    if len(words) != len(weights):
        raise InvalidRequestError(
            f"{weights_name} must be as many as {words_name}, but are {len(weights)} for "
            f"{len(words)}"
        )
    bias: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for id_ in tokenizer.encode(word, add_special_tokens=False):
            bias[id_] = bias.get(id_, 0.0) + weight
    return bias
