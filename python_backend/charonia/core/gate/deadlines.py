"""When requests run out of time.

Owns the order of the points in time at which something is to be looked at. Must not know what that
is, nor the time of day: it is an argument.
"""

from charonia.control.lazy_heap import LazyHeap


class Deadlines:
    """Points in time, each of one request; a request may have several."""

    def __init__(self) -> None:
        self._heap: LazyHeap[int] = LazyHeap()  # numbers of points
        self._points: dict[int, tuple[str, bool]] = {}  # by number, as `take_due` returns them
        self._numbers: dict[str, list[int]] = {}  # by key
        self._next_number = 0

    def add(self, key: str, when: float, *, is_until_start: bool = False) -> None:
        """Note a point in time of a request.

        Args:
            is_until_start: whether it matters only as long as the request has not started.
        """
        number = self._next_number
        self._next_number += 1
        self._numbers.setdefault(key, []).append(number)
        self._points[number] = key, is_until_start
        self._heap.add(number, when)

    def remove(self, key: str) -> None:
        """Forget all of a request."""
        for number in self._numbers.pop(key, ()):
            self._heap.discard(number)
            del self._points[number]

    def take_due(self, now: float) -> list[tuple[str, bool]]:
        """All whose time has come, which are forgotten: the key, and `is_until_start`."""
        due = []
        while (place := self._heap.first()) is not None and place[0] <= now:
            _, number = place
            self._heap.pop()
            point = self._points.pop(number)
            self._numbers[point[0]].remove(number)
            due.append(point)
        return due
