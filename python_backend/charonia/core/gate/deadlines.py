"""The timeouts of requests.

Owns their order. Must not know what happens at a timeout; the time is an argument.
"""

from charonia.control.lazy_heap import LazyHeap


class Deadlines:
    """Timeouts, each of one request; a request may have several."""

    def __init__(self) -> None:
        self._heap: LazyHeap[int] = LazyHeap()  # numbers of timeouts
        self._points: dict[int, tuple[str, bool]] = {}  # by number, as `take_due` returns them
        self._numbers: dict[str, list[int]] = {}  # by key
        self._next_number = 0

    def add(self, key: str, when: float, *, is_until_start: bool = False) -> None:
        """Add a timeout of a request.

        Args:
            is_until_start: whether it counts only until the request has started.
        """
        number = self._next_number
        self._next_number += 1
        self._numbers.setdefault(key, []).append(number)
        self._points[number] = key, is_until_start
        self._heap.add(number, when)

    def remove(self, key: str) -> None:
        """Remove all timeouts of a request."""
        for number in self._numbers.pop(key, ()):
            self._heap.discard(number)
            del self._points[number]

    def take_due(self, now: float) -> list[tuple[str, bool]]:
        """Remove and return the timeouts that are over, each as its key and `is_until_start`."""
        due = []
        while (place := self._heap.first()) is not None and place[0] <= now:
            _, number = place
            self._heap.pop()
            point = self._points.pop(number)
            self._numbers[point[0]].remove(number)
            due.append(point)
        return due
