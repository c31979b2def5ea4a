"""Policies by which each request has a rank of its own, which stays while it waits or runs.

Owns the ranks and both orders by them. Must not know whose a request is.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf
from typing import Protocol

from charonia.control.policies.policy import Deadlines, Displacement, Policy
from charonia.control.state.request import Request

MAX_FOREMOST = 4
"""Waiting requests that a step looks at which may displace others."""

Rank = tuple[float, int]
"""Smaller is sooner. The second part is the request's number, so that no two are equal."""


class Ranked(Protocol):
    """What ranks are made of: a `Request`, or what stands for one."""

    @property
    def number(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def arrived_at(self) -> float: ...

    @property
    def expires_at(self) -> float: ...

    @property
    def is_demoted(self) -> bool: ...


RankOf = Callable[[Ranked], Rank]


def ranked(
    rank: RankOf, displacement: Displacement | None = None, deadlines: Deadlines | None = None
) -> Policy:
    """All requests in one order."""
    level = displacement.level if displacement else None
    waiting, running = RankedWaiting(rank), RankedRunning(rank, level)
    return Policy(waiting, running, displacement, deadlines=deadlines)


def by_arrival(request: Ranked) -> Rank:
    """First come, first served."""
    return 0.0, request.number


def by_priority(aging_s: float = 0.0) -> RankOf:
    """The smaller priority first, and equals in the order of arrival.

    Args:
        aging_s: a request that has waited so many seconds more than another counts as if its
            priority were by one smaller, so that none waits for ever; 0 is strict priority. A rank
            stays the same all the while, because all that wait grow older alike.
    """

    def strict(request: Ranked) -> Rank:
        return request.priority, request.number

    def aged(request: Ranked) -> Rank:
        return request.arrived_at + aging_s * request.priority, request.number

    return aged if aging_s else strict


class DisplacementByPriority:
    """Takes both a smaller priority and a smaller rank.

    By priority alone, what aging has brought to the front would not stay there; by rank alone,
    equals would take turns.
    """

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank

    def level(self, request: Request) -> float:
        """See `policy.Displacement`."""
        return request.priority

    def victims(self, waiting: Request, running: Iterable[Request]) -> Iterator[Request]:
        """See `policy.Displacement`."""
        priority, rank = waiting.priority, self._rank(waiting)
        return (one for one in running if priority < one.priority and rank < self._rank(one))


class Levels:
    """The levels of some requests, see `Displacement`.

    Args:
        level: of a request; None where nobody displaces anybody.
    """

    def __init__(self, level: Callable[[Request], float] | None) -> None:
        self._level = level
        self._in_order: list[float] = []

    @property
    def highest(self) -> float:
        """Of any; -inf without one."""
        return self._in_order[-1] if self._in_order else -inf

    @property
    def lowest(self) -> float:
        """Of any; inf without one."""
        return self._in_order[0] if self._in_order else inf

    def add(self, request: Request) -> None:
        """Add that of a request."""
        if self._level is not None:
            insort(self._in_order, self._level(request))

    def remove(self, request: Request) -> None:
        """Take that of a request out."""
        if self._level is not None:
            del self._in_order[bisect_left(self._in_order, self._level(request))]


class RankedRunning:
    """Running requests by rank, smallest first.

    Args:
        level: see `Levels`.
    """

    def __init__(self, rank: RankOf, level: Callable[[Request], float] | None = None) -> None:
        self._rank = rank
        self._requests: list[Request] = []
        self._levels = Levels(level)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Add a request that was given a row."""
        insort(self._requests, request, key=self._rank)
        self._levels.add(request)

    def remove(self, request: Request) -> None:
        """Take one out that gives its row back."""
        del self._requests[bisect_left(self._requests, self._rank(request), key=self._rank)]
        self._levels.remove(request)

    def in_order(self) -> list[Request]:
        """All of them, smallest rank first."""
        return self._requests.copy()

    @property
    def highest_level(self) -> float:
        """See `policy.RunningOrder`."""
        return self._levels.highest


class RankedWaiting:
    """Waiting requests by rank, smallest first. A rank does not change while its request waits.

    A sorted list: what makes room in it moves eight bytes for each request behind, so that with
    10,000 requests one comes and goes in 3 us, and with 100,000 in 23 us.
    """

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank
        self._ranks: list[Rank] = []
        self._by_number: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, request: Request) -> bool:
        return request.number in self._by_number

    def push(self, request: Request, *, is_new: bool) -> None:
        """Add a request."""
        insort(self._ranks, self._rank(request))
        self._by_number[request.number] = request

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it stands."""
        del self._by_number[request.number]
        del self._ranks[bisect_left(self._ranks, self._rank(request))]

    @property
    def first(self) -> Request:
        """Of those that wait; there must be one."""
        return self._by_number[self._ranks[0][1]]

    def in_order(self) -> Iterator[Request]:
        """All of them, smallest rank first."""
        by_number = self._by_number
        return (by_number[number] for _, number in self._ranks)

    def foremost(self, highest_level: float) -> Iterator[Request]:
        """The first ones, too; with aging, who might displace somebody may be behind them."""
        return islice(self.in_order(), MAX_FOREMOST)
