"""Least recently used."""

from collections import OrderedDict


class Lru:
    """Entries in the order in which they became free.

    An entry becomes free after those that continue it, so it is evicted after them. Everything is
    O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict()

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`."""

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        self._free.pop(entry, None)

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        self._free[entry] = None

    def victim(self) -> int:
        """See `Eviction`."""
        return next(iter(self._free))

    def evict(self, entry: int) -> None:
        """See `Eviction`."""
        del self._free[entry]
