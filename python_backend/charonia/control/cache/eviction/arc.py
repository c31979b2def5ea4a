"""ARC: balances recency and frequency by hits on recently evicted keys (ghosts).

Megiddo, Modha 2003 ("ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03, figure 4)::

    used once        ghosts B1 ◄── T1 │ T2 ──► B2 ghosts        used again
                                      ▲
             a hit in B1 lets T1 grow ─┴─ a hit in B2 lets T2 grow
"""

from collections import OrderedDict

from charonia.control.cache.eviction.ghosts import Ghosts

_ONCE, _AGAIN = 0, 1


class Arc:
    """Entries that were used once and entries that were used again, each by recency. O(1).

    The sizes of both lists include held entries.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._target = 0.0  # target number of entries that were used once
        self._free: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._ghosts = (Ghosts(), Ghosts())
        self._num_entries = [0, 0]
        self._key = [b""] * num_blocks
        self._kind = [_ONCE] * num_blocks

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`."""
        once, again = self._ghosts
        kind = _AGAIN
        if key in once:
            change = max(1.0, len(again) / len(once))
            self._target = min(float(self._num_blocks), self._target + change)
            once.remove(key)
        elif key in again:
            change = max(1.0, len(once) / len(again))
            self._target = max(0.0, self._target - change)
            again.remove(key)
        else:
            kind = _ONCE
        self._key[entry] = key
        self._kind[entry] = kind
        self._num_entries[kind] += 1

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        kind = self._kind[entry]
        self._free[kind].pop(entry, None)
        self._num_entries[kind] -= 1
        self._num_entries[_AGAIN] += 1
        self._kind[entry] = _AGAIN

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        self._free[self._kind[entry]][entry] = None

    def victim(self) -> int:
        """See `Eviction`."""
        once, again = self._free
        takes_once = once and (self._num_entries[_ONCE] > self._target or not again)
        return next(iter(once if takes_once else again))

    def evict(self, entry: int) -> None:
        """See `Eviction`."""
        kind = self._kind[entry]
        del self._free[kind][entry]
        self._num_entries[kind] -= 1
        self._ghosts[kind].add(self._key[entry])
        self._ghosts[_ONCE].shrink(self._num_blocks - self._num_entries[_ONCE])
        num_others = sum(self._num_entries) + len(self._ghosts[_ONCE])
        self._ghosts[_AGAIN].shrink(2 * self._num_blocks - num_others)
