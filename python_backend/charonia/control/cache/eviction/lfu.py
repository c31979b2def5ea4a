"""Least frequently used."""

from charonia.control.cache.eviction.scores import ByScore

_MANY = 2**64  # more than the entries that ever become free


class Lfu:
    """Entries with the fewest hits first; of equal ones, those that became free first.

    Hits are counted from when an entry was computed until it is evicted. O(log n).
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = ByScore(num_blocks)
        self._num_hits = [0] * num_blocks
        self._num_freed = 0

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`."""
        self._num_hits[entry] = 0

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        self._free.discard(entry)
        self._num_hits[entry] += 1

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        self._num_freed += 1
        self._free.add(entry, self._num_hits[entry] * _MANY + self._num_freed)

    def victim(self) -> int:
        """See `Eviction`."""
        return self._free.first()

    def evict(self, entry: int) -> None:
        """See `Eviction`."""
        self._free.discard(entry)
