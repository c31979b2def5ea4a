"""When requests run out of time.

Owns the order of the points in time at which something is to be looked at. Must not know what that
is, nor the time of day: it is an argument.
"""

from heapq import heapify, heappop, heappush

_SLACK = 64


class Deadlines:
    """Points in time, each of one request; a request may have several.

    What is removed stays in the heap until it comes to its top or outweighs the rest: then the heap
    is made anew. So it never holds more than twice what is live, and a few.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, bool]] = []
        self._numbers: dict[str, list[int]] = {}  # by key, of those that are live
        self._live: set[int] = set()
        self._next_number = 0

    def __len__(self) -> int:
        """How many points in time are kept, those that were removed included."""
        return len(self._heap)

    def add(self, key: str, when: float, *, is_until_start: bool = False) -> None:
        """Note a point in time of a request.

        Args:
            is_until_start: whether it matters only as long as the request has not started.
        """
        number = self._next_number
        self._next_number += 1
        self._numbers.setdefault(key, []).append(number)
        self._live.add(number)
        heappush(self._heap, (when, number, key, is_until_start))

    def remove(self, key: str) -> None:
        """Forget all of a request."""
        numbers = self._numbers.pop(key, None)
        if numbers is None:
            return
        self._live.difference_update(numbers)
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapify(self._heap)

    def take_due(self, now: float) -> list[tuple[str, bool]]:
        """All whose time has come, which are forgotten: the key, and `is_until_start`."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, number, key, is_until_start = heappop(self._heap)
            if number in self._live:
                self._live.remove(number)
                self._numbers[key].remove(number)
                due.append((key, is_until_start))
        return due
