"""Earliest deadline first, and what becomes of deadlines that cannot be met any more.

Owns the order by deadlines, and the watch over them. Must not know steps.

The order meets all deadlines that any order could (Liu, Layland 1973, "Scheduling Algorithms for
Multiprogramming in a Hard-Real-Time Environment", section 7), on one machine and without overload.
With overload it is the worst, because it prefers those that are about to fail. So a request that
waits beyond its latest start, its deadline less what it still needs, is taken out, or goes behind
all others.
"""

from heapq import heappop, heappush
from math import inf

from charonia.control.policies.policy import Late
from charonia.control.policies.ranked import Rank
from charonia.control.remaining_time import RemainingTime
from charonia.control.request import Request

_NEVER = 1e300  # before those that were demoted


def by_deadline(request: Request) -> Rank:
    """The earliest deadline first, then those without one, then those that cannot meet theirs."""
    return _due_at(request), request.number


class DisplacementByDeadline:
    """Takes an earlier deadline."""

    def may_displace(self, waiting: Request, running: Request) -> bool:
        """Whether the one that waits may have the other preempted."""
        return _due_at(waiting) < _due_at(running)

    def is_due(self, waiting: Request, running: Request) -> bool:
        """See `policy.Displacement`."""
        return True


class DeadlineWatch:
    """The waiting requests by the time at which they must start.

    Args:
        budget: tokens of a step, at most.
        demotes: whether those that are late are to go behind all others; else they are to end.
    """

    def __init__(self, budget: int, *, demotes: bool) -> None:
        self.demotes = demotes
        self._remaining = RemainingTime(budget)
        self._heap: list[tuple[float, int, Request]] = []
        self._in_heap: set[int] = set()  # by number

    def note_waiting(self, request: Request) -> None:
        """See `policy.Deadlines`."""
        if _due_at(request) < _NEVER and request.number not in self._in_heap:
            self._push(request)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """See `policy.Deadlines`."""
        self._remaining.note_step(num_tokens, seconds)

    def note_end(self, request: Request) -> None:
        """See `policy.Deadlines`."""
        self._remaining.note_end(request)

    def take_late(self, now: float) -> list[Late]:
        """See `policy.Deadlines`."""
        late = []
        while self._heap and self._heap[0][0] < now:
            _, number, request = heappop(self._heap)
            self._in_heap.remove(number)
            if request.is_ended or request.is_demoted or request.row is not None:
                continue
            needed_s, left_s = self._remaining.of(request), request.expires_at - now
            if needed_s > left_s:
                late.append(Late(request, needed_s, left_s))
            else:  # steps have become faster, or answers shorter
                self._push(request)
        return late

    def _push(self, request: Request) -> None:
        latest = request.expires_at - self._remaining.of(request)
        heappush(self._heap, (latest, request.number, request))
        self._in_heap.add(request.number)


def _due_at(request: Request) -> float:
    return inf if request.is_demoted else min(request.expires_at, _NEVER)
