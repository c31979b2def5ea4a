"""The timeouts of requests.

Owns their order. Must not know what happens at a timeout; the time is an argument.
"""

from charonia.control.lazy_heap import LazyHeap
from charonia.core.generation_request import GenerationRequest


class Deadlines:
    """The timeouts of live requests; each may have one until its first step, and one until its end.

    If both are over at the same time, the one until the first step comes first.
    """

    def __init__(self) -> None:
        self._heap: LazyHeap[tuple[str, bool]] = LazyHeap()  # keys, and whether until the end

    def add(self, request: GenerationRequest, arrived_at: float) -> None:
        """Add the timeouts of a request. They count from its arrival."""
        if request.timeout_s is not None:
            self._heap.add((request.key, False), arrived_at + request.timeout_s)
        if request.params.deadline_ms is not None:
            self._heap.add((request.key, True), arrived_at + request.params.deadline_ms / 1000)

    def remove(self, key: str) -> None:
        """Remove all timeouts of a request."""
        self._heap.discard((key, False))
        self._heap.discard((key, True))

    def take_due(self, now: float) -> list[tuple[str, bool]]:
        """Remove and return the timeouts that are over.

        Returns:
            The key of each request, and whether it was the timeout until its first step.
        """
        due = []
        while (place := self._heap.first()) is not None and place[0] <= now:
            self._heap.pop()
            key, is_until_end = place[1]
            due.append((key, not is_until_end))
        return due
