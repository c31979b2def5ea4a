"""Earliest deadline first, and what becomes of deadlines that cannot be met any more.

Owns the order by deadlines, and the watch over them. Must not know steps.

The order meets all deadlines that any order could (Liu, Layland 1973, "Scheduling Algorithms for
Multiprogramming in a Hard-Real-Time Environment", section 7), on one machine and without overload.
With overload it is the worst, because it prefers those that are about to fail. So a request that
waits beyond its latest start, its deadline less what it still needs, is taken out, or goes behind
all others. What it needs is an estimate, which must not keep all out for ever: where none would run
otherwise the scheduler tries one.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.estimators.remaining_time import RemainingTime
from charonia.control.policies.policy import Late
from charonia.control.policies.ranked import Rank, Ranked
from charonia.control.state.request import Request

_NEVER = 1e300  # before those that were demoted
_SLACK = 64
MAX_LOOKED_UP = 4
"""Waiting requests of which a step looks up what the prefix cache has."""


def by_deadline(request: Ranked) -> Rank:
    """The earliest deadline first, then those without one, then those that cannot meet theirs."""
    return _due_at(request), request.number


class DisplacementByDeadline:
    """Takes an earlier deadline."""

    def level(self, request: Request) -> float:
        """See `policy.Displacement`."""
        return _due_at(request)

    def victims(self, waiting: Request, running: Iterable[Request]) -> Iterator[Request]:
        """See `policy.Displacement`."""
        due_at = _due_at(waiting)
        return (one for one in running if due_at < _due_at(one))


class DeadlineWatch:
    """The waiting requests by the time at which they must start.

    What the prefix cache or a slower tier has of a prompt is looked up when its request would be
    late without it, of a few in a step, as that costs more than all else here. Others that are late
    wait for a later step. Loading from a tier is taken to cost no time.

    The entry of a request that waits no longer stays in the heap until it comes to its top or
    outweighs the rest: then the heap is made anew. So it never holds more than twice what waits,
    and a few.

    Args:
        demotes: whether those that are late are to go behind all others; else they are to end.
    """

    def __init__(self, *, demotes: bool) -> None:
        self.demotes = demotes
        self._remaining: RemainingTime
        self._heap: list[tuple[float, int]] = []  # when to look at the request of a number
        self._waiting: dict[int, Request] = {}  # by number

    def start(self, lengths: OutputLengths, prompt_time: PromptTime) -> None:
        """See `policy.Deadlines`."""
        self._remaining = RemainingTime(lengths, prompt_time)

    def note_waiting(self, request: Request) -> None:
        """See `policy.Deadlines`."""
        if _due_at(request) < _NEVER:
            self._waiting[request.number] = request
            heappush(self._heap, (self._latest(request), request.number))

    def note_leaving(self, request: Request) -> None:
        """See `policy.Deadlines`."""
        self._waiting.pop(request.number, None)
        if len(self._heap) > 2 * len(self._waiting) + _SLACK:
            self._heap = [(self._latest(one), number) for number, one in self._waiting.items()]
            heapify(self._heap)

    def note_step(self, seconds: float) -> None:
        """See `policy.Deadlines`."""
        self._remaining.note_step(seconds)

    def take_late(self, now: float, num_cached: Callable[[Request], int]) -> list[Late]:
        """See `policy.Deadlines`."""
        late: list[Late] = []
        num_looked_up = 0
        while self._heap and self._heap[0][0] < now:
            request = self._waiting.get(self._heap[0][1])
            if request is None:
                heappop(self._heap)
                continue
            latest = self._latest(request)
            if latest < now:
                if num_looked_up == MAX_LOOKED_UP:
                    break
                num_looked_up += 1
                latest = self._latest(request, num_cached(request))
            if latest < now:
                heappop(self._heap)
                del self._waiting[request.number]
                left_s = request.expires_at - now
                late.append(Late(request, request.expires_at - latest, left_s))
            else:  # it is cached, steps have become faster, or answers shorter
                heapreplace(self._heap, (latest, request.number))
        return late

    def _latest(self, request: Request, num_cached: int = 0) -> float:
        """When it must start, if so many of its tokens need not be computed."""
        return request.expires_at - self._remaining.of(request, num_cached)


def _due_at(request: Ranked) -> float:
    return inf if request.is_demoted else min(request.expires_at, _NEVER)
