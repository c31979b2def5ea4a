"""First in, first out."""

from charonia.control.cache.eviction.scores import ByScore


class Fifo:
    """Entries in the order in which they were computed, regardless of hits. O(log n)."""

    def __init__(self, num_blocks: int) -> None:
        self._free = ByScore(num_blocks)
        self._number = [0] * num_blocks
        self._num_inserted = 0

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`."""
        self._num_inserted += 1
        self._number[entry] = self._num_inserted

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        self._free.discard(entry)

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        self._free.add(entry, self._number[entry])

    def victim(self) -> int:
        """See `Eviction`."""
        return self._free.first()

    def evict(self, entry: int) -> None:
        """See `Eviction`."""
        self._free.discard(entry)
