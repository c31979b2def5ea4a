"""Prompt lookup: drafts are copied from behind an earlier occurrence of a request's last tokens.

Owns, per request, where each n-gram of its tokens ended last. Knows nothing about other requests,
how drafts are verified, or when drafting pays off.
"""

from dataclasses import dataclass, field

from charonia.control.state.request import Request

# Most tokens that a step indexes, which takes about 2 ms; long prompts are spread over steps. Each
# request may index MIN_CATCH_UP tokens in any case, enough for those that it generated lately.
MAX_CATCH_UP = 2048
MIN_CATCH_UP = 128


def continuation(token_ids: list[int], start: int, num_tokens: int) -> list[int]:
    """Copy the tokens from `start` on as the continuation of the text.

    A copy that reaches the end of the text continues with itself, as in LZ77 (Ziv and Lempel 1977),
    so a periodic text is continued with its period.

    Args:
        token_ids: the text. start: a position in it, before its end.
        num_tokens: exact number of tokens to return.
    """
    copied = token_ids[start : start + num_tokens]
    if len(copied) < num_tokens:
        copied = (copied * (num_tokens // len(copied) + 1))[:num_tokens]
    return copied


@dataclass(slots=True)
class _Index:
    """The n-grams of one request's tokens that end at `num_indexed` or before.

    The n-gram at the end of the text is looked up before it is indexed, so it never matches itself.
    """

    num_indexed: int = 0
    last_end: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).

    It finds the latest earlier occurrence of the request's last n tokens, for the largest n that
    has one. The tokens behind it are the draft. Per token and n, indexing takes 0.3 us, and about
    80 bytes in text that repeats itself like source code, up to 200 in text without repetition.

    Args:
        prompt_lookup_min, prompt_lookup_max: the smallest (>= 1) and the largest n, inclusive.
    """

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min = prompt_lookup_min
        self._max = prompt_lookup_max
        self._indices: dict[Request, _Index] = {}
        self._allowance = MAX_CATCH_UP

    def begin_step(self) -> None:
        """Reset the tokens that one step may index."""
        self._allowance = MAX_CATCH_UP

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        """`max_tokens` (>= 1) token ids that may follow; none if no n-gram occurred before."""
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _Index()
        token_ids = request.token_ids
        self._catch_up(index, token_ids)
        for n in range(self._max, self._min - 1, -1):
            end = index.last_end.get(tuple(token_ids[-n:]))
            if end is not None:
                return continuation(token_ids, end, max_tokens)
        return []

    def forget(self, request: Request) -> None:
        """Drop the request's index, if it has one."""
        self._indices.pop(request, None)

    def forget_ended(self) -> None:
        """See `Drafter`; nothing is kept of them."""

    def _catch_up(self, index: _Index, token_ids: list[int]) -> None:
        """Index n-grams that end before the last token; a later end replaces an earlier one."""
        num_new = min(len(token_ids) - 1 - index.num_indexed, max(self._allowance, MIN_CATCH_UP))
        self._allowance -= num_new
        num_tokens = index.num_indexed + 1 + num_new
        for n in range(self._min, self._max + 1):
            for end in range(max(index.num_indexed + 1, n), num_tokens):
                index.last_end[tuple(token_ids[end - n : end])] = end
        index.num_indexed = num_tokens - 1
