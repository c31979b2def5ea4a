"""Requests that wait for a row, in the policy's order.

Owns the order of the waiting. Must not know blocks or rows.
"""

from heapq import heappop, heappush

from charonia.control.request import Request


class WaitingQueue:
    """Waiting requests by rank, smallest first. A preempted request keeps its rank.

    Removal is lazy: a removed request's rank stays in the heap until it comes to the top.
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
