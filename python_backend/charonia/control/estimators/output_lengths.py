"""How long answers were lately, and how many steps they took.

Owns the record of the answers that ended. Must not know what its estimates are for.

What few answers exceed takes many to be seen. A mean takes few, and must follow when answers become
shorter or longer: it is that of the last ones alone, as far as any of them says something.
"""

from bisect import bisect_right, insort
from collections import deque

_NUM_PAST = 512
"""Answers that are remembered."""
_NUM_RECENT = 32
"""Of these, the last ones, of which means are: the middle of them is 16 answers old."""
_QUANTILE = 0.8
"""Of the lengths of those that were longer than an answer is by now: a few end later."""


class OutputLengths:
    """The answers that ended last, of all requests that are clients'."""

    def __init__(self) -> None:
        self._past = _Last(_NUM_PAST)
        self._recent = _Last(_NUM_RECENT)

    def note(self, num_tokens: int, num_accepted: int = 0) -> None:
        """An answer had so many tokens.

        Args:
            num_accepted: of these, drafts, which took no step of their own.
        """
        self._past.note(num_tokens, num_accepted)
        self._recent.note(num_tokens, num_accepted)

    def mean(self, num_generated: int) -> float | None:
        """Tokens in the mean of an answer that has so many and goes on; None before the first end.

        Where none of the last ones was longer it is the mean of older ones that were; where none of
        them was, either, its next token is taken to be the last one.
        """
        if not self._past.in_order:
            return None
        for answers in (self._recent, self._past):
            longer = answers.longer_than(num_generated)
            if longer:
                return sum(longer) / len(longer)
        return num_generated + 1

    def at_most(self, num_generated: int) -> int | None:
        """Tokens that few such answers exceed, see `mean`; None where none was longer."""
        in_order = self._past.in_order
        first = bisect_right(in_order, num_generated)
        num_longer = len(in_order) - first
        if not num_longer:
            return None
        return in_order[first + min(num_longer - 1, int(num_longer * _QUANTILE))]

    @property
    def steps_per_token(self) -> float:
        """Fewer than one where drafts are accepted."""
        recent = self._recent
        if not recent.num_tokens:
            return 1.0
        return 1.0 - recent.num_accepted / recent.num_tokens


class _Last:
    """So many answers that ended last.

    Attributes:
        in_order: their tokens, the shortest one first.
        num_tokens, num_accepted: of all of them, see `OutputLengths.note`.
    """

    def __init__(self, num_most: int) -> None:
        self._num_most = num_most
        self._past: deque[tuple[int, int]] = deque()  # tokens, and how many were accepted drafts
        self.in_order: list[int] = []
        self.num_tokens = self.num_accepted = 0

    def note(self, num_tokens: int, num_accepted: int) -> None:
        """Remember one, and forget the oldest one if there are too many."""
        if len(self._past) == self._num_most:
            oldest, accepted = self._past.popleft()
            del self.in_order[bisect_right(self.in_order, oldest) - 1]
            self.num_tokens -= oldest
            self.num_accepted -= accepted
        self._past.append((num_tokens, num_accepted))
        insort(self.in_order, num_tokens)
        self.num_tokens += num_tokens
        self.num_accepted += num_accepted

    def longer_than(self, num_tokens: int) -> list[int]:
        """The lengths of those that were longer."""
        return self.in_order[bisect_right(self.in_order, num_tokens) :]
