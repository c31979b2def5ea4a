"""A heap of keys, the smallest score first, from which any key may be removed.

Owns the heap and its stale entries. Knows nothing about the meaning of keys and scores.
"""

from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

Key = TypeVar("Key", int, str, tuple[int, bool])
_SLACK = 64


class LazyHeap(Generic[Key]):
    """A heap that can remove any key, in O(log n) amortized.

    A discarded key leaves a stale entry, which is dropped when it reaches the top. Once stale
    entries outnumber the live ones, `discard` drops all of them. So after a `discard` the heap
    holds at most twice the live keys, and a few more. Keys of equal score come in their own order.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, Key]] = []
        self._scores: dict[Key, float] = {}  # an entry with another score is stale

    @property
    def num_places(self) -> int:
        """Entries in the heap, stale ones included."""
        return len(self._heap)

    def add(self, key: Key, score: float) -> None:
        """Add a key that is not in the heap."""
        self._scores[key] = score
        heappush(self._heap, (score, key))

    def discard(self, key: Key) -> None:
        """Remove a key, if it is in the heap."""
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
        """Remove the key that `first` has just returned."""
        _, key = heappop(self._heap)
        del self._scores[key]

    def raise_first(self, score: float) -> None:
        """Give the key that `first` has just returned a score that is not smaller."""
        key = self._heap[0][1]
        self._scores[key] = score
        heapreplace(self._heap, (score, key))
