"""The timeouts of requests.

Owns their order. Must not know what happens at a timeout; the time is an argument.
"""

from charonia.control.lazy_heap import LazyHeap
from charonia.core.generation_request import GenerationRequest


class Deadlines:
    """The timeouts of live requests; each may have one until its first step, and one until its end.

    Requests have numbers here, so that nothing is kept of one that has ended. If two timeouts are
    over at the same time, the one of the smaller number comes first. Of one request, it is the one
    until the first step.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[tuple[int, bool]] = LazyHeap()  # numbers, and whether until the end

    def add(self, number: int, request: GenerationRequest, arrived_at: float) -> None:
        """Add the timeouts of a request. They count from its arrival."""
        if request.timeout_s is not None:
            self._heap.add((number, False), arrived_at + request.timeout_s)
        if request.params.deadline_ms is not None:
            self._heap.add((number, True), arrived_at + request.params.deadline_ms / 1000)

    def remove(self, number: int) -> None:
        """Remove all timeouts of a request."""
        self._heap.discard((number, False))
        self._heap.discard((number, True))

    def take_due(self, now: float) -> list[tuple[int, bool]]:
        """Remove and return the timeouts that are over.

        Returns:
            The number of each request, and whether it was the timeout until its first step.
        """
        due = []
        while (place := self._heap.first()) is not None and place[0] <= now:
            self._heap.pop()
            number, is_until_end = place[1]
            due.append((number, not is_until_end))
        return due
