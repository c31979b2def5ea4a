"""How long answers were lately, and how many steps they took.

Owns the record of the answers that ended. Must not know what its estimates are for.
"""

from bisect import bisect_right, insort
from collections import deque

_NUM_PAST = 512
"""Answers that are remembered."""
_QUANTILE = 0.8
"""Of the lengths of those that were longer than an answer is by now: a few end later."""


class OutputLengths:
    """The answers that ended last, of all requests that are clients'."""

    def __init__(self) -> None:
        self._past: deque[tuple[int, int]] = deque()  # tokens, and how many were accepted drafts
        self._in_order: list[int] = []
        self._num_tokens = self._num_accepted = 0  # of all in `_past`

    def note(self, num_tokens: int, num_accepted: int = 0) -> None:
        """An answer had so many tokens.

        Args:
            num_accepted: of these, drafts, which took no step of their own.
        """
        if len(self._past) == _NUM_PAST:
            oldest, accepted = self._past.popleft()
            del self._in_order[bisect_right(self._in_order, oldest) - 1]
            self._num_tokens -= oldest
            self._num_accepted -= accepted
        self._past.append((num_tokens, num_accepted))
        insort(self._in_order, num_tokens)
        self._num_tokens += num_tokens
        self._num_accepted += num_accepted

    def mean(self, num_generated: int) -> float | None:
        """Tokens in the mean of an answer that has so many and goes on; None before the first end.

        Where none was longer its next token is taken to be the last one.
        """
        if not self._past:
            return None
        num_shorter = bisect_right(self._in_order, num_generated)
        num_longer = len(self._in_order) - num_shorter
        if not num_longer:
            return num_generated + 1
        return (self._num_tokens - sum(self._in_order[:num_shorter])) / num_longer

    def at_most(self, num_generated: int) -> int | None:
        """Tokens that few such answers exceed, see `mean`; None where none was longer."""
        first = bisect_right(self._in_order, num_generated)
        num_longer = len(self._in_order) - first
        if not num_longer:
            return None
        return self._in_order[first + min(num_longer - 1, int(num_longer * _QUANTILE))]

    @property
    def steps_per_token(self) -> float:
        """Fewer than one where drafts are accepted."""
        if not self._num_tokens:
            return 1.0
        return 1.0 - self._num_accepted / self._num_tokens
