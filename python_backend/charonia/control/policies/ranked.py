"""Policies by which each request has a rank of its own, which stays while it waits or runs.

Owns the ranks and both orders by them. Must not know whose a request is.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from charonia.control.policies.policy import Deadlines, Displacement, Policy
from charonia.control.request import Request

MAX_FOREMOST = 4
"""Waiting requests that a step looks at which may displace others."""

Rank = tuple[float, int]
"""Smaller is sooner. The second part is the request's number, so that no two are equal."""

RankOf = Callable[[Request], Rank]

_SLACK = 64


def ranked(
    rank: RankOf, displacement: Displacement | None = None, deadlines: Deadlines | None = None
) -> Policy:
    """All requests in one order."""
    waiting, running = RankedWaiting(rank), RankedRunning(rank)
    return Policy(waiting, running, displacement, deadlines=deadlines)


def by_arrival(request: Request) -> Rank:
    """First come, first served."""
    return 0.0, request.number


def by_priority(aging_s: float = 0.0) -> RankOf:
    """The smaller priority first, and equals in the order of arrival.

    Args:
        aging_s: a request that has waited so many seconds more than another counts as if its
            priority were by one smaller, so that none waits for ever; 0 is strict priority. A rank
            stays the same all the while, because all that wait grow older alike.
    """

    def strict(request: Request) -> Rank:
        return request.priority, request.number

    def aged(request: Request) -> Rank:
        return request.arrived_at + aging_s * request.priority, request.number

    return aged if aging_s else strict


class DisplacementByPriority:
    """Takes both a smaller priority and a smaller rank.

    By priority alone, what aging has brought to the front would not stay there; by rank alone,
    equals would take turns.
    """

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank

    def may_displace(self, waiting: Request, running: Request) -> bool:
        """Whether the one that waits may have the other preempted."""
        return waiting.priority < running.priority and self._rank(waiting) < self._rank(running)

    def is_due(self, waiting: Request, running: Request) -> bool:
        """See `policy.Displacement`."""
        return True


class RankedRunning:
    """Running requests by rank, smallest first."""

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank
        self._requests: list[Request] = []
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Add a request that was given a row."""
        insort(self._requests, request, key=self._rank)
        self.num_changes += 1

    def remove(self, request: Request) -> None:
        """Take one out that gives its row back."""
        del self._requests[bisect_left(self._requests, self._rank(request), key=self._rank)]
        self.num_changes += 1

    def in_order(self) -> list[Request]:
        """All of them, smallest rank first."""
        return self._requests.copy()


class RankedWaiting:
    """Waiting requests by rank, smallest first. A rank does not change while its request waits.

    The rank of a request that is removed stays in the heap until it comes to its top or outweighs
    the rest: then the heap is made anew. So it never holds more than twice what waits, and a few.
    """

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank
        self._heap: list[Rank] = []
        self._by_number: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, request: Request) -> bool:
        return request.number in self._by_number

    def push(self, request: Request) -> None:
        """Add a request."""
        heappush(self._heap, self._rank(request))
        self._by_number[request.number] = request

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it stands."""
        del self._by_number[request.number]
        if len(self._heap) > 2 * len(self._by_number) + _SLACK:
            self._heap = [self._rank(waiting) for waiting in self._by_number.values()]
            heapify(self._heap)

    def in_order(self) -> Iterator[Request]:
        """All of them, smallest rank first; the next one costs the log of how many came before.

        The heap is a tree, and nobody comes before the one above: only those below the ones that
        were taken can be next.
        """
        while self._heap and self._of(self._heap[0]) is None:
            heappop(self._heap)
        frontier = [(self._heap[0], 0)] if self._heap else []
        taken: set[int] = set()
        while frontier:
            rank, index = heappop(frontier)
            request = self._of(rank)
            # One that left and came back may be here twice.
            if request is not None and request.number not in taken:
                taken.add(request.number)
                yield request
            for below in (2 * index + 1, 2 * index + 2):
                if below < len(self._heap):
                    heappush(frontier, (self._heap[below], below))

    def _of(self, rank: Rank) -> Request | None:
        """Whose rank this is; None where it waits no longer, or has another rank since."""
        request = self._by_number.get(rank[1])
        return request if request is not None and self._rank(request) == rank else None

    def foremost(self) -> Iterator[Request]:
        """The first ones, too: where they may displace nobody, nobody else may."""
        return islice(self.in_order(), MAX_FOREMOST)
