"""Prompt lookup: drafts are copied from where a request's last few tokens stood before.

Owns, per request, where each n-gram of its tokens ended last. Must not know other requests, how
drafts are verified, or when drafting pays.
"""

from dataclasses import dataclass, field

from charonia.control.state.request import Request

# Tokens that a step indexes at most, some 2 ms: long prompts are spread over steps. But what was
# generated lately, a request may always index.
MAX_CATCH_UP = 2048
MIN_CATCH_UP = 128


def continuation(token_ids: list[int], start: int, num_tokens: int) -> list[int]:
    """What the text would go on with, if it went on as it did from `start` on.

    A copy that reaches the end of the text goes on with itself, as in LZ77 (Ziv and Lempel 1977),
    so a text that repeats itself is continued in its period.

    Args:
        token_ids: the text. start: a position in it, before its end.
        num_tokens: tokens to return, exactly.
    """
    copied = token_ids[start : start + num_tokens]
    if len(copied) < num_tokens:
        copied = (copied * (num_tokens // len(copied) + 1))[:num_tokens]
    return copied


@dataclass(slots=True)
class _Index:
    """The n-grams of one request's tokens that end at `num_indexed` or before.

    The n-gram at the end of the text is looked up before it is indexed, so none matches itself.
    """

    num_indexed: int = 0
    last_end: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).

    The latest earlier occurrence of the request's last n tokens is taken, for the largest n that
    has one, and what followed it is the draft. Per token and n, indexing takes 0.3 us and some 80
    bytes in text that repeats itself as source code does, up to 200 where nothing occurs twice.

    Args:
        prompt_lookup_min, prompt_lookup_max: the smallest (>= 1) and the largest n, inclusive.
    """

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min = prompt_lookup_min
        self._max = prompt_lookup_max
        self._indices: dict[str, _Index] = {}
        self._allowance = MAX_CATCH_UP

    def begin_step(self) -> None:
        """What one step may index is spent anew."""
        self._allowance = MAX_CATCH_UP

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        """`max_tokens` (>= 1) token ids that may follow; none when no n-gram stood before."""
        index = self._indices.get(request.key)
        if index is None:
            index = self._indices[request.key] = _Index()
        token_ids = request.token_ids
        self._catch_up(index, token_ids)
        for n in range(self._max, self._min - 1, -1):
            end = index.last_end.get(tuple(token_ids[-n:]))
            if end is not None:
                return continuation(token_ids, end, max_tokens)
        return []

    def forget(self, request: Request) -> None:
        """The request has ended, or never proposed: nothing of it is kept."""
        self._indices.pop(request.key, None)

    def _catch_up(self, index: _Index, token_ids: list[int]) -> None:
        """Index what ends before the last token; a later end replaces an earlier one."""
        num_new = min(len(token_ids) - 1 - index.num_indexed, max(self._allowance, MIN_CATCH_UP))
        self._allowance -= num_new
        num_tokens = index.num_indexed + 1 + num_new
        for n in range(self._min, self._max + 1):
            for end in range(max(index.num_indexed + 1, n), num_tokens):
                index.last_end[tuple(token_ids[end - n : end])] = end
        index.num_indexed = num_tokens - 1
