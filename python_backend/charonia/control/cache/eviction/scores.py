"""Entries by a score, for policies that are more than a queue."""

from heapq import heapify, heappop, heappush

_NONE = -1
_SLACK = 64


class ByScore:
    """Some of the entries, the one with the smallest score first.

    A heap with stale places: one whose entry has left, or has another score by now, is dropped when
    it comes to the top, and all are when they outweigh the others. An entry that comes back with
    the score that it had takes its old place. O(log n) per change.

    Args:
        num_blocks: entries are below it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._score = [_NONE] * num_blocks
        self._placed = [_NONE] * num_blocks  # the score of the last place of each in the heap
        self._heap: list[tuple[int, int]] = []
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def add(self, entry: int, score: int) -> None:
        """Add one that is not there; the score is 0 or more."""
        self._score[entry] = score
        self._num_entries += 1
        if self._placed[entry] == score:
            return
        self._placed[entry] = score
        heappush(self._heap, (score, entry))
        if len(self._heap) > 2 * self._num_entries + _SLACK:
            self._drop_stale()

    def discard(self, entry: int) -> None:
        """Take one out, if it is there."""
        if self._score[entry] != _NONE:
            self._score[entry] = _NONE
            self._num_entries -= 1

    def score_of(self, entry: int) -> int:
        """The score of one that is there."""
        return self._score[entry]

    def first(self) -> int:
        """The one with the smallest score; there must be one."""
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
