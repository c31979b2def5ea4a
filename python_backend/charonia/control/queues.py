"""Requests that wait for a row, in the policy's order.

Owns the order of the waiting. Must not know blocks or rows.
"""

from heapq import heapify, heappop, heappush

from charonia.control.request import Request

_SLACK = 64


class WaitingQueue:
    """Waiting requests by rank, smallest first. A preempted request keeps its rank.

    The rank of a request that is removed stays in the heap until it comes to its top or outweighs
    the rest: then the heap is made anew. So it never holds more than twice what waits, and a few.
    """

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self._by_rank: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._by_rank)

    def __contains__(self, request: Request) -> bool:
        return request.rank in self._by_rank

    def push(self, request: Request) -> None:
        """Add a request at its rank, which no other request has."""
        heappush(self._ranks, request.rank)
        self._by_rank[request.rank] = request

    def first(self) -> Request | None:
        """The request that is next in order, or None."""
        while self._ranks and self._ranks[0] not in self._by_rank:
            heappop(self._ranks)
        return self._by_rank[self._ranks[0]] if self._ranks else None

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it stands."""
        del self._by_rank[request.rank]
        if len(self._ranks) > 2 * len(self._by_rank) + _SLACK:
            self._ranks = list(self._by_rank)
            heapify(self._ranks)
