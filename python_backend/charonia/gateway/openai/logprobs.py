"""Log-probabilities in OpenAI's form.

Owns how tokens are spelled there: a token that is not a whole character is shown as bytes.
Must not know requests.
"""

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from charonia.text.tokenizer import Tokenizer
from charonia_client import PositionLogprobs, TokenLogprob

LEAST = -9999.0
"""OpenAI's number for an impossible token: JSON has no infinity."""


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A token of a message."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a message."""

    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Log-probabilities of a completion: lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Spelling:
    """Spells tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int, prefix: str = "") -> str:
        r"""Return a token's text, or `prefix` and its bytes as in `\xe2\x80`."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, positions: Sequence[PositionLogprobs], num_top: int) -> ChatLogprobs:
        """Return the log-probabilities of a message, each with its `num_top` most likely tokens."""
        return ChatLogprobs([self._of_message(position, num_top) for position in positions])

    def _of_message(self, position: PositionLogprobs, num_top: int) -> ChatLogprob:
        taken = position[0]
        top = sorted((one for one in position if one.rank <= num_top), key=lambda one: one.rank)
        return ChatLogprob(
            self.text(taken.token_id),
            finite(taken),
            self._bytes(taken),
            [TopLogprob(self.text(o.token_id), finite(o), self._bytes(o)) for o in top],
        )

    def _bytes(self, one: TokenLogprob) -> list[int]:
        return list(self._tokenizer.token_bytes(one.token_id))

    def offsets(self, skip_special_tokens: bool) -> "Offsets":
        """Return an `Offsets` for a text."""
        skipped = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        return Offsets(self._tokenizer, skipped)

    def text_logprobs(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        num_top: int,
        offsets: Sequence[int],
    ) -> TextLogprobs:
        """Return those of a completion, or of its prompt, whose first token has none.

        Args:
            offsets: where each token begins in the text.
        """
        return TextLogprobs(
            [self.text(token_id, "bytes:") for token_id in token_ids],
            [None if position is None else finite(position[0]) for position in positions],
            [self._top(position, num_top) for position in positions],
            list(offsets),
        )

    def _top(self, position: PositionLogprobs | None, num_top: int) -> dict[str, float] | None:
        """Map texts to log-probabilities. Of several tokens with one text, keep the most likely."""
        if position is None:
            return None
        top: dict[str, float] = {}
        kept = [position[0], *(one for one in position[1:] if one.rank <= num_top)]
        for one in sorted(kept, key=finite, reverse=True):
            top.setdefault(self.text(one.token_id, "bytes:"), finite(one))
        return top


class Offsets:
    """Offsets of the tokens of one growing text, in characters.

    Args:
        skipped: ids that the text does not show.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._begin(0)

    def _begin(self, num_characters: int) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = num_characters

    def echo(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the offsets of a prompt's tokens; `text` is the prompt, which begins the whole.

        Special tokens that the tokenizer has added, such as a BOS, are not in the text.
        """
        special = self._tokenizer.special_ids
        offsets = []
        for token_id in token_ids:
            spelled = self._tokenizer.token_bytes(token_id).decode(errors="replace")
            is_shown = token_id not in special or text.startswith(spelled, self._num_characters)
            offsets.append(min(self._add(token_id, is_shown=is_shown), len(text)))
        self._begin(len(text))
        return offsets

    def next(self, token_id: int) -> int:
        """Return where the next token begins: in a character that it continues, or behind it."""
        return self._add(token_id, is_shown=token_id not in self._skipped)

    def _add(self, token_id: int, *, is_shown: bool) -> int:
        if not is_shown:
            return self._num_characters
        data = self._tokenizer.token_bytes(token_id)
        if data and data[0] & 0xC0 != 0x80:  # what was incomplete stays so
            self._num_characters += len(self._utf8.decode(b"", final=True))
        offset = self._num_characters
        self._num_characters += len(self._utf8.decode(data))
        return offset


def finite(one: TokenLogprob) -> float:
    """A log-probability that JSON can represent."""
    return LEAST if one.logprob is None else max(one.logprob, LEAST)


def of_prompt(
    positions: Sequence[PositionLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's form: by token id."""
    return [
        None
        if position is None
        else {
            str(one.token_id): {
                "logprob": finite(one),
                "rank": one.rank,
                "decoded_token": one.text,
            }
            for index, one in enumerate(position)
            if not index or one.rank <= num_top
        }
        for position in positions
    ]
