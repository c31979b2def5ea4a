"""A heap of entries by score, for policies that are more than a queue."""

from heapq import heapify, heappop, heappush

_NONE = -1
_SLACK = 64


class ByScore:
    """A set of entries, ordered by their scores, the smallest first.

    A heap with stale items: an item is stale if its entry has left or has another score now. Stale
    items are dropped when they reach the top, and all at once when they outnumber the others. An
    entry that returns with its old score reuses its old item. O(log n) per change.

    It stays apart from `LazyHeap` because of that reuse: blocks are used and freed again far more
    often than they are evicted. Such a return takes less than half of `LazyHeap`'s time.

    Args:
        num_blocks: entries are numbers below it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._score = [_NONE] * num_blocks
        self._placed = [_NONE] * num_blocks  # the score of each entry's last item in the heap
        self._heap: list[tuple[int, int]] = []
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def add(self, entry: int, score: int) -> None:
        """Add an entry that is not there; the score is 0 or more."""
        self._score[entry] = score
        self._num_entries += 1
        if self._placed[entry] == score:
            return
        self._placed[entry] = score
        heappush(self._heap, (score, entry))
        if len(self._heap) > 2 * self._num_entries + _SLACK:
            self._drop_stale()

    def discard(self, entry: int) -> None:
        """Remove an entry, if it is there."""
        if self._score[entry] != _NONE:
            self._score[entry] = _NONE
            self._num_entries -= 1

    def score_of(self, entry: int) -> int:
        """The score of an entry that is there."""
        return self._score[entry]

    def first(self) -> int:
        """The entry with the smallest score; there must be one."""
        while True:
            score, entry = self._heap[0]
            if self._score[entry] == score:
                return entry
            heappop(self._heap)
            if self._placed[entry] == score:
                self._placed[entry] = _NONE

    def _drop_stale(self) -> None:
        for score, entry in self._heap:
            if self._score[entry] == _NONE and self._placed[entry] == score:
                self._placed[entry] = _NONE
        self._heap = list({place for place in self._heap if self._score[place[1]] == place[0]})
        heapify(self._heap)
