"""How many blocks the running requests will need at most, by how long their answers will be.

Owns the estimate of lengths, and of the peak. Must not know blocks by number.

Requests of a batch grow together, and each gives all back at its end. With the longest rest first,
r1 >= r2 >= ..., and so many tokens now, t1, t2, ..., the batch needs most at one of its ends::

    peak = max over i of  (t1 + ... + ti) + i * ri

as in Gong et al. 2025 ("Past-Future Scheduler for LLM Serving under SLA Guarantees", arXiv
2507.10150, section 4), whose lengths come from those of past requests, too.

That is an estimate even where the lengths are certain: requests do not grow together while one's
prompt is computed in chunks, or its drafts are right, or a step has no token left for it. What is
to be guaranteed counts each request's blocks at its own end, as if all ends came at once.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from charonia.control.limits import Limits
from charonia.control.request import Request

_NUM_PAST = 512
"""Answers whose lengths are remembered."""
_QUANTILE = 0.8
"""Of the lengths of those that were longer than a request is by now: a few end later."""


class OutputLengths:
    """How long answers were lately."""

    def __init__(self) -> None:
        self._past: deque[int] = deque()
        self._in_order: list[int] = []

    def note(self, num_tokens: int) -> None:
        """An answer had so many tokens."""
        if len(self._past) == _NUM_PAST:
            oldest = self._past.popleft()
            del self._in_order[bisect_right(self._in_order, oldest) - 1]
        self._past.append(num_tokens)
        insort(self._in_order, num_tokens)

    def expected(self, num_generated: int) -> int | None:
        """Of an answer that has so many tokens and goes on; None where none was longer."""
        first = bisect_right(self._in_order, num_generated)
        num_longer = len(self._in_order) - first
        if not num_longer:
            return None
        return self._in_order[first + min(num_longer - 1, int(num_longer * _QUANTILE))]


class PeakMemory:
    """Tells whether requests will have room together until they end.

    Args:
        expects: whether answers are taken to be as long as others were, and the peak is estimated;
            else they are as long as they may be, and there is room for all ends at once.

    Attributes:
        num_held: blocks of requests that have ended, but are in flight yet.
    """

    def __init__(self, *, expects: bool) -> None:
        self.num_held = 0
        self._lengths = OutputLengths() if expects else None

    def note_end(self, request: Request) -> None:
        """A request has generated all its tokens."""
        if self._lengths is not None:
            self._lengths.note(request.num_generated)

    def fits(
        self,
        limits: Limits,
        num_usable: int,
        running: Iterable[Request],
        request: Request,
        num_hits: int,
    ) -> bool:
        """Whether there is room for a request beside those that run. Alone it always has.

        Args:
            num_usable: blocks of the pool that are not set aside.
            num_hits: cached blocks of its prefix. Where lengths are expected ones they are taken to
                be others' for ever, too, as what these began with is.
        """
        batch = [*running, request]
        if len(batch) == 1 and not self.num_held:
            return True
        num_blocks = num_usable - self.num_held
        if self._lengths is None:
            # The last token of a request is never computed, and drafts stay before it.
            return sum(limits.blocks_for(one.max_known - 1) for one in batch) <= num_blocks
        slack = limits.block_size - 1  # of a request's last block
        needs = [
            (_num_left(one, self._lengths), len(one.token_ids) - one.num_cached + slack)
            for one in batch[:-1]
        ]
        own = len(request.token_ids) - num_hits * limits.block_size + slack
        needs.append((_num_left(request, self._lengths), own))
        return _peak(needs) <= num_blocks * limits.block_size


def _num_left(request: Request, lengths: OutputLengths) -> int:
    """Tokens that a request will still generate."""
    most = request.max_known - len(request.token_ids)
    expected = lengths.expected(request.num_generated)
    return most if expected is None else min(most, expected - request.num_generated)


def _peak(needs: list[tuple[int, int]]) -> int:
    """Tokens at the worst of the ends: of requests with so many to come, and so many now."""
    held = peak = 0
    for count, (num_left, num_tokens) in enumerate(sorted(needs, reverse=True), start=1):
        held += num_tokens
        peak = max(peak, held + count * num_left)
    return peak
