"""Keys by a score, the smallest score first.

Owns the heap and which of its places are stale. Must not know what keys and scores mean.
"""

from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

Key = TypeVar("Key", int, str)
_SLACK = 64


class LazyHeap(Generic[Key]):
    """A heap that any key can leave, in O(log n) amortized.

    A key that is discarded leaves a stale place. This is dropped when it comes to the top. All of
    them are dropped by the `discard` that finds that they outweigh the live ones: after it, the
    heap never holds more than twice what is live, and a few. Keys of equal score come in their own
    order.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, Key]] = []
        self._scores: dict[Key, float] = {}  # a place with another score is stale

    @property
    def num_places(self) -> int:
        """Places in the heap, stale ones included."""
        return len(self._heap)

    def add(self, key: Key, score: float) -> None:
        """Add a key that is not there."""
        self._scores[key] = score
        heappush(self._heap, (score, key))

    def discard(self, key: Key) -> None:
        """Take a key out, if it is there."""
        scores = self._scores
        if scores.pop(key, None) is not None and len(self._heap) > 2 * len(scores) + _SLACK:
            self._heap = [(score, one) for one, score in scores.items()]
            heapify(self._heap)

    def first(self) -> tuple[float, Key] | None:
        """The smallest score and its key; None if there is none."""
        heap, scores = self._heap, self._scores
        while heap:
            place = heap[0]
            if scores.get(place[1]) == place[0]:
                return place
            heappop(heap)
        return None

    def pop(self) -> None:
        """Take out what `first` has just returned."""
        _, key = heappop(self._heap)
        del self._scores[key]

    def raise_first(self, score: float) -> None:
        """Give the key that `first` has just returned a score that is not smaller."""
        key = self._heap[0][1]
        self._scores[key] = score
        heapreplace(self._heap, (score, key))
