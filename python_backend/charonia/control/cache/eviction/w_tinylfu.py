"""W-TinyLFU: an entry that leaves a small window stays only if it is used more than another one.

Einziger, Friedman, Manes 2017 ("TinyLFU: A Highly Efficient Cache Admission Policy", ACM
Transactions on Storage 13, section 4)::

    computed ──► window (1 %) ──── used more often? ───► probation ──hit──► protected (80 %)
                     │ no                                 │    ▲                │
                     ▼                                    ▼    └── when full ───┘
                    gone                                 gone

In the paper keys arrive one at a time, and a key leaves the window at once if it is used less often
than the victim. Here a request allocates all its blocks before it computes any, and holds them. So
the window may exceed its share for a moment, with fewer entries in the main segments, and the
choice is made when room is needed again. While the cache fills for the first time, all stay.
"""

from collections import OrderedDict

from charonia.control.cache.eviction.frequency_sketch import FrequencySketch

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
_WINDOW_SHARE = 0.01
_PROTECTED_SHARE = 0.8  # share of the cache without the window


class WTinyLfu:
    """Entries in three segments, each by recency. O(1), except for the aging of the sketch.

    The sizes of the segments include held entries.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_window = max(1, int(_WINDOW_SHARE * num_blocks))
        self._max_main = num_blocks - 1 - self._max_window  # without the null block
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
        """Move free entries out of the protected segment until it is within its limit."""
        protected = self._free[_PROTECTED]
        while self._num_entries[_PROTECTED] > self._max_protected and protected:
            entry = protected.popitem(last=False)[0]
            self._move(entry, _PROBATION)
            self._free[_PROBATION][entry] = None

    def _let_in(self, entry: int) -> None:
        """Move a free entry from the window to probation."""
        del self._free[_WINDOW][entry]
        self._move(entry, _PROBATION)
        self._free[_PROBATION][entry] = None

    def _count(self, entry: int) -> int:
        return self._sketch.count(self._key[entry])

    def _move(self, entry: int, segment: int) -> None:
        self._num_entries[self._segment[entry]] -= 1
        self._num_entries[segment] += 1
        self._segment[entry] = segment
