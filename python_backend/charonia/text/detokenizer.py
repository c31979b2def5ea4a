"""Incremental detokenization: the text of one request's generated tokens.

Owns what of a text is complete while its tokens still arrive. Must not know stop strings, nor the
prompt: its tokens are no part of this text.
"""

from collections.abc import Sequence

from charonia.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text as they come.

    What `add` and `finish` returned, put together, is `tokenizer.decode` of all ids, for any ids
    and however they are portioned. What is held back is at most an incomplete character
    (byte-level tokenizers) or a run of `decoding.MAX_RUN_BYTES` byte tokens (the others).

    Args:
        tokenizer: shared; everything that belongs to this text is kept here.
        skip_special_tokens: leave special tokens out, also from the middle of a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._stream = tokenizer.decoding.stream(skip_special_tokens)

    def add(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is complete now.

        The time depends on `ids` alone, not on the tokens before them.
        """
        return self._stream.add(ids)

    def finish(self) -> str:
        """Return what was held back. Nothing may be added afterwards."""
        return self._stream.finish()
