"""Earliest deadline first, and what happens to deadlines that can no longer be met.

Owns the order by deadlines, and the watch over them. Knows nothing about steps.

On one machine and without overload, this order meets all deadlines that any order could (Liu,
Layland 1973, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", section
7). With overload it is the worst order, because it prefers requests that are about to fail. So a
request that waits beyond its latest start, which is its deadline less the time it needs, is ended
or goes behind all others. The time it needs is an estimate, and a wrong one must not keep all
requests out for ever: if none would run, the scheduler tries one.
"""

from collections.abc import Callable, Iterable, Iterator
from math import inf

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.estimators.remaining_time import RemainingTime
from charonia.control.lazy_heap import LazyHeap
from charonia.control.policies.policy import Late
from charonia.control.policies.ranked import Rank, Ranked
from charonia.control.state.request import Request

_NEVER = 1e300  # due time without a deadline; demoted requests come after it
MAX_LOOKED_UP = 4
"""Most waiting requests whose cached tokens a step looks up."""


def by_deadline(request: Ranked) -> Rank:
    """The earliest deadline first, then requests without one, then those that will miss theirs."""
    return _due_at(request), request.number


class DisplacementByDeadline:
    """A request may displace others with a later deadline."""

    def level(self, request: Request) -> float:
        """See `policy.Displacement`."""
        return _due_at(request)

    def victims(self, waiting: Request, running: Iterable[Request]) -> Iterator[Request]:
        """See `policy.Displacement`."""
        due_at = _due_at(waiting)
        return (one for one in running if due_at < _due_at(one))


class DeadlineWatch:
    """The waiting requests by the time at which they must start.

    The cached tokens of a prompt, in the prefix cache or a slower tier, are looked up only when the
    request would be late without them. A step does so for few requests, because it costs more than
    all else here; other late requests wait for a later step. Loading from a tier is assumed to cost
    no time.

    Args:
        demotes: whether late requests go behind all others; otherwise they are ended.
    """

    def __init__(self, *, demotes: bool) -> None:
        self.demotes = demotes
        self._remaining: RemainingTime
        self._heap: LazyHeap[int] = LazyHeap()  # numbers of requests, by latest start
        self._waiting: dict[int, Request] = {}  # by number

    def start(self, lengths: OutputLengths, prompt_time: PromptTime) -> None:
        """See `policy.Deadlines`."""
        self._remaining = RemainingTime(lengths, prompt_time)

    def note_waiting(self, request: Request) -> None:
        """See `policy.Deadlines`."""
        if _due_at(request) < _NEVER:
            self._waiting[request.number] = request
            self._heap.add(request.number, self._latest(request))

    def note_leaving(self, request: Request) -> None:
        """See `policy.Deadlines`."""
        self._waiting.pop(request.number, None)
        self._heap.discard(request.number)

    def note_step(self, seconds: float) -> None:
        """See `policy.Deadlines`."""
        self._remaining.note_step(seconds)

    def take_late(self, now: float, num_cached: Callable[[Request], int]) -> list[Late]:
        """See `policy.Deadlines`."""
        late: list[Late] = []
        num_looked_up = 0
        while (place := self._heap.first()) is not None and place[0] < now:
            request = self._waiting[place[1]]
            latest = self._latest(request)
            if latest < now:
                if num_looked_up == MAX_LOOKED_UP:
                    break
                num_looked_up += 1
                latest = self._latest(request, num_cached(request))
            if latest < now:
                self._heap.pop()
                del self._waiting[request.number]
                left_s = request.expires_at - now
                late.append(Late(request, request.expires_at - latest, left_s))
            else:  # its prefix is cached, or steps have become faster, or answers shorter
                self._heap.raise_first(latest)
        return late

    def _latest(self, request: Request, num_cached: int = 0) -> float:
        """Latest start of a request if `num_cached` of its tokens need not be computed."""
        return request.expires_at - self._remaining.of(request, num_cached)


def _due_at(request: Ranked) -> float:
    return inf if request.is_demoted else min(request.expires_at, _NEVER)
