"""W-TinyLFU: what leaves a small window stays where it was asked for more often than another.

Einziger, Friedman, Manes 2017 ("TinyLFU: A Highly Efficient Cache Admission Policy", ACM
Transactions on Storage 13, section 4)::

    computed ──► window (1 %) ──more often asked for?──► probation ──hit──► protected (80 %)
                     │ no                                 │    ▲                │
                     ▼                                    ▼    └── when full ───┘
                    gone                                 gone

There one key comes at a time, and goes from the window at once where it is asked for less often
than the victim. Here a request makes room for all its blocks before any of them is computed, and
holds them: so the window may have more than its share for the moment, the main segments less, and
it is decided who stays when room is needed again. Only while the cache fills does everybody stay.
"""

from collections import OrderedDict

from charonia.control.cache.eviction.frequency_sketch import FrequencySketch

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8  # of all but the window


class WTinyLfu:
    """Entries in three segments, each by recency. O(1), but for the aging of the sketch.

    What is held counts in the sizes of the segments, too.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_window = max(1, int(_WINDOW_SHARE * num_blocks))
        self._max_main = num_blocks - 1 - self._max_window  # no block is number 0
        self._max_protected = int(_PROTECTED_SHARE * self._max_main)
        self._sketch = FrequencySketch(num_blocks)
        self._free: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(3))
        self._num_entries = [0, 0, 0]
        self._is_filling = True
        self._key = [b""] * num_blocks
        self._segment = [_WINDOW] * num_blocks

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`."""
        self._key[entry] = key
        self._segment[entry] = _WINDOW
        self._num_entries[_WINDOW] += 1
        self._sketch.add(key)

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        self._sketch.add(self._key[entry])
        segment = self._segment[entry]
        self._free[segment].pop(entry, None)
        if segment == _PROBATION:
            self._move(entry, _PROTECTED)
            self._demote()

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        self._free[self._segment[entry]][entry] = None
        self._demote()
        window, num_entries = self._free[_WINDOW], self._num_entries
        while window and self._is_filling and num_entries[_WINDOW] > self._max_window:
            self._let_in(next(iter(window)))

    def victim(self) -> int:
        """See `Eviction`."""
        window, probation, protected = self._free
        while main := probation or protected:
            incumbent = next(iter(main))
            if not window or self._num_entries[_WINDOW] < self._max_window:
                return incumbent
            candidate = next(iter(window))
            if self._count(candidate) <= self._count(incumbent):
                return candidate
            has_room = (
                self._num_entries[_PROBATION] + self._num_entries[_PROTECTED] < self._max_main
            )
            self._let_in(candidate)
            if not has_room:
                return incumbent
        return next(iter(window))

    def evict(self, entry: int) -> None:
        """See `Eviction`."""
        self._is_filling = False
        segment = self._segment[entry]
        del self._free[segment][entry]
        self._num_entries[segment] -= 1

    def _demote(self) -> None:
        """Have no more protected entries than there may be, as far as they are free."""
        protected = self._free[_PROTECTED]
        while self._num_entries[_PROTECTED] > self._max_protected and protected:
            entry = protected.popitem(last=False)[0]
            self._move(entry, _PROBATION)
            self._free[_PROBATION][entry] = None

    def _let_in(self, entry: int) -> None:
        """Move a free entry from the window to the others."""
        del self._free[_WINDOW][entry]
        self._move(entry, _PROBATION)
        self._free[_PROBATION][entry] = None

    def _count(self, entry: int) -> int:
        return self._sketch.count(self._key[entry])

    def _move(self, entry: int, segment: int) -> None:
        self._num_entries[self._segment[entry]] -= 1
        self._num_entries[segment] += 1
        self._segment[entry] = segment
