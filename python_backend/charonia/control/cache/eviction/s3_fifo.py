"""S3-FIFO: two queues, the small one of which quickly drops entries that are used once.

Yang et al. 2023 ("FIFO queues are all you need for cache eviction", SOSP '23, algorithm 1)::

    computed ──► small (a tenth) ──hit twice──► main ──hit──► main, at its end again
        ▲            │                           │ no hit
        │            ▼                           ▼
        └── main, when it comes back ◄── ghosts  gone
"""

from charonia.control.cache.eviction.ghosts import Ghosts
from charonia.control.cache.eviction.scores import ByScore

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
_MAX_HITS = 3
_HITS_FOR_MAIN = 2


class S3Fifo:
    """Entries in two queues, in which held entries keep their places. O(log n)."""

    def __init__(self, num_blocks: int) -> None:
        self._max_small = max(1, int(_SMALL_SHARE * num_blocks))
        self._max_ghosts = num_blocks - self._max_small
        self._ghosts = Ghosts()
        self._free = (ByScore(num_blocks), ByScore(num_blocks))
        self._num_small = 0
        self._num_inserted = 0
        self._key = [b""] * num_blocks
        self._queue = [_SMALL] * num_blocks
        self._place = [0] * num_blocks
        self._num_hits = [0] * num_blocks

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`."""
        self._key[entry] = key
        self._num_hits[entry] = 0
        if key in self._ghosts:
            self._ghosts.remove(key)
            self._append(entry, _MAIN)
        else:
            self._append(entry, _SMALL)

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        self._free[self._queue[entry]].discard(entry)
        self._num_hits[entry] = min(_MAX_HITS, self._num_hits[entry] + 1)

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        self._free[self._queue[entry]].add(entry, self._place[entry])

    def victim(self) -> int:
        """See `Eviction`."""
        small, main = self._free
        while True:
            if small and (self._num_small >= self._max_small or not main):
                entry = small.first()
                if self._num_hits[entry] < _HITS_FOR_MAIN:
                    return entry
                self._num_small -= 1
                self._num_hits[entry] = 0  # its hits have moved it to the main queue
            else:
                entry = main.first()
                if not self._num_hits[entry]:
                    return entry
                self._num_hits[entry] -= 1
            self._free[self._queue[entry]].discard(entry)
            self._append(entry, _MAIN)
            main.add(entry, self._place[entry])

    def evict(self, entry: int) -> None:
        """See `Eviction`."""
        self._free[self._queue[entry]].discard(entry)
        if self._queue[entry] == _SMALL:
            self._num_small -= 1
            self._ghosts.add(self._key[entry])
            self._ghosts.shrink(self._max_ghosts)

    def _append(self, entry: int, queue: int) -> None:
        self._num_inserted += 1
        self._place[entry] = self._num_inserted
        self._queue[entry] = queue
        self._num_small += queue == _SMALL
