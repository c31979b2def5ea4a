"""Lengths of recent answers, and the numbers of their steps.

Owns the record of the answers that ended. Knows nothing about the use of its estimates.

A high quantile needs many answers. A mean needs few, and must follow when answers become shorter or
longer, so it is taken from the last ones only, if any of them is long enough.
"""

from bisect import bisect_right, insort
from collections import deque

_NUM_PAST = 512
"""Number of answers that are remembered."""
_NUM_RECENT = 32
"""Number of the last answers, for means; they are 16 answers old on average."""
_QUANTILE = 0.8
"""Quantile of `at_most`, over the answers that were longer than the given length."""


class OutputLengths:
    """The last answers of all clients' requests."""

    def __init__(self) -> None:
        self._past = _Last(_NUM_PAST)
        self._recent = _Last(_NUM_RECENT)

    def note(self, num_tokens: int, num_accepted: int = 0) -> None:
        """An answer ended with `num_tokens` tokens.

        Args:
            num_accepted: accepted drafts among these, which took no step of their own.
        """
        self._past.note(num_tokens, num_accepted)
        self._recent.note(num_tokens, num_accepted)

    def note_cut_off(self, num_tokens: int, num_accepted: int = 0, *, num_most: int) -> None:
        """An answer was ended from outside after `num_tokens` tokens, so it would have been longer.

        It counts as long as answers that are longer, and with as large a share of accepted drafts
        as it had. If only answers that end by themselves counted, deadlines would let the short
        ones alone count, and estimates would shrink.

        Args:
            num_tokens: at least 1. num_most: its `max_tokens`.
        """
        expected = self.mean(num_tokens)
        if expected is not None:
            length = min(round(expected), num_most)
            self.note(length, round(num_accepted * length / num_tokens))

    def mean(self, num_generated: int) -> float | None:
        """Mean length of answers longer than `num_generated` tokens; None before the first end.

        It is taken from the last answers; if none of them was longer, from older ones. If none of
        those was longer either, the next token is assumed to be the last.
        """
        if not self._past.in_order:
            return None
        for answers in (self._recent, self._past):
            longer = answers.longer_than(num_generated)
            if longer:
                return sum(longer) / len(longer)
        return num_generated + 1

    def at_most(self, num_generated: int) -> int | None:
        """A length that few such answers exceed, see `mean`; None if none was longer."""
        in_order = self._past.in_order
        first = bisect_right(in_order, num_generated)
        num_longer = len(in_order) - first
        if not num_longer:
            return None
        return in_order[first + min(num_longer - 1, int(num_longer * _QUANTILE))]

    @property
    def steps_per_token(self) -> float:
        """Steps per generated token; less than one if drafts are accepted."""
        recent = self._recent
        if not recent.num_tokens:
            return 1.0
        return 1.0 - recent.num_accepted / recent.num_tokens


class _Last:
    """A limited number of last answers.

    Attributes:
        in_order: their lengths in tokens, the shortest first.
        num_tokens, num_accepted: sums over all of them, see `OutputLengths.note`.
    """

    def __init__(self, num_most: int) -> None:
        self._num_most = num_most
        self._past: deque[tuple[int, int]] = deque()  # tokens, and how many were accepted drafts
        self.in_order: list[int] = []
        self.num_tokens = self.num_accepted = 0

    def note(self, num_tokens: int, num_accepted: int) -> None:
        """Remember an answer, and forget the oldest one if there are too many."""
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
        """The lengths above `num_tokens`."""
        return self.in_order[bisect_right(self.in_order, num_tokens) :]
