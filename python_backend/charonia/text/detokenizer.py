"""Incremental detokenization: the text of one request's generated tokens.

Owns which part of a text is complete while tokens still arrive. Knows nothing about stop strings,
or the prompt, whose tokens are not part of this text.
"""

from collections.abc import Sequence

from charonia.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text as they arrive.

    The concatenated results of `add` and `finish` are `tokenizer.decode` of all ids, for any ids
    in any portions. At most an incomplete character (byte-level tokenizers) or a run of
    `decoding.MAX_RUN_BYTES` byte tokens (others) is held back.

    Args:
        tokenizer: may be shared; all state of this text is kept here.
        skip_special_tokens: leave special tokens out, also in the middle of a character.
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
