"""Adaptive eviction: evicts the entries that are expected to bring the fewest hits per time.

The kind of an entry is its number of earlier hits, including requests while it was not cached. For
each kind `reuse` learns how soon entries are used again, both while they are cached and after they
were evicted. So a session that keeps coming back counts more than a prompt that came once. If no
cache could hold all entries of a kind until they are used again, some are kept and the others are
evicted at once. There are few kinds, because entries of one prompt mostly come back together: a
cache sees far fewer independent observations than it has entries.

Entries of one kind that become free together form a batch. A batch is evicted from its deepest
entry on. Batches of the same kind and age are worth the same; the oldest is evicted first::

    free() free() free() ─► batches, by kind ─► age 0 ─► age 1 ─► ... ─► age 11
                                                  └ victim: the cell (kind, age) worth least

Everything is O(1) per entry except the choice of a cell, which is made once for several entries.
"""

from collections import OrderedDict, deque

from charonia.control.cache.eviction.frequency_sketch import FrequencySketch
from charonia.control.cache.eviction.reuse import ReuseTimes
from charonia.control.cache.prefix_index import ROOT

_NUM_KINDS = 6  # by hits: 0, 1, 2 and 3, 4 to 7, 8 to 15, more
_WATCHED = 1024  # entries of a full cache that are observed, also after eviction
_KEY_RANGE = 1 << 32
_MOST_BETWEEN = 16  # entries that become free between two updates of the worst cell
_SLACK = 8


class _Batch:
    """Entries of one kind that became free at once.

    Attributes:
        entries: the deepest last; some may have left the batch since.
        num_free: entries that have not left it.
        num_watched: observed entries that were not used again yet, evicted or not.
        ghosts: keys of evicted ones.
    """

    __slots__ = ("age", "entries", "freed_at", "ghosts", "kind", "num_free", "num_watched")

    def __init__(self, kind: int, freed_at: int) -> None:
        self.kind = kind
        self.freed_at = freed_at
        self.age = 0
        self.entries: list[int] = []
        self.num_free = 0
        self.num_watched = 0
        self.ghosts: list[bytes] = []


class Adaptive:
    """Evicts the entries that are worth least, see above."""

    def __init__(self, num_blocks: int) -> None:
        self._reuse = ReuseTimes(num_blocks, _NUM_KINDS)
        self._sketch = FrequencySketch(8 * num_blocks)
        self._now = 0  # entries that became free so far
        self._between = max(1, min(_MOST_BETWEEN, int(self._reuse.ends[0] / 2)))
        self._looks_at = 0  # time of the next update
        self._max_watched_key = min(_KEY_RANGE, _KEY_RANGE * _WATCHED // num_blocks)
        self._together: list[int] = []  # entries that became free since the last other event
        self._by_age: list[deque[_Batch]] = [deque() for _ in self._reuse.ends]
        self._cells: dict[tuple[int, int], OrderedDict[_Batch, None]] = {}
        self._worst: tuple[int, int] | None = None  # the cell worth least, while it exists
        self._ghosts: dict[bytes, _Batch] = {}
        self._batch_of: list[_Batch | None] = [None] * num_blocks  # of free entries; these by entry
        self._key = [b""] * num_blocks
        self._num_hits = [0] * num_blocks
        self._parent = [ROOT] * num_blocks

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`."""
        self._settle()
        self._key[entry] = key
        self._num_hits[entry] = self._sketch.count(key)
        self._sketch.add(key)
        self._parent[entry] = parent
        if (batch := self._ghosts.pop(key, None)) is not None:
            self._note_asked(batch)

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        self._settle()
        batch = self._batch_of[entry]
        if batch is not None:
            self._leave(entry, batch)
            if self._is_watched(entry):
                self._note_asked(batch)
        self._num_hits[entry] += 1
        self._sketch.add(self._key[entry])

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        if self._together and self._parent[self._together[-1]] != entry:
            self._settle()  # the entry belongs to another prefix
        self._together.append(entry)

    def victim(self) -> int:
        """See `Eviction`."""
        self._settle()
        if self._worst not in self._cells:
            self._worst = min(self._cells, key=lambda cell: self._reuse.density(*cell))
        batch = next(iter(self._cells[self._worst]))
        while self._batch_of[batch.entries[-1]] is not batch:
            batch.entries.pop()
        return batch.entries[-1]

    def evict(self, entry: int) -> None:
        """See `Eviction`."""
        self._settle()
        batch = self._batch_of[entry]
        assert batch is not None
        self._leave(entry, batch)
        if self._is_watched(entry) and batch.freed_at + self._reuse.ends[-1] > self._now:
            self._ghosts[self._key[entry]] = batch
            batch.ghosts.append(self._key[entry])

    def _settle(self) -> None:
        """Make batches of the entries that became free, and advance the time."""
        if not self._together:
            return
        entries, self._together = self._together, []
        self._now += len(entries)
        batches: dict[int, _Batch] = {}
        for entry in reversed(entries):
            kind = min(_NUM_KINDS - 1, self._num_hits[entry].bit_length())
            batch = batches.get(kind)
            if batch is None:
                batch = batches[kind] = _Batch(kind, self._now)
            batch.entries.append(entry)
            batch.num_free += 1
            batch.num_watched += self._is_watched(entry)
            self._batch_of[entry] = batch
        for batch in batches.values():
            self._by_age[0].append(batch)
            self._reuse.note_reached(batch.kind, 0, batch.num_watched)
            self._place(batch)
        self._reuse.pass_time(len(entries))
        if self._now >= self._looks_at:
            self._looks_at = self._now + self._between
            self._age()
            self._reuse.learn()
            self._worst = None

    def _age(self) -> None:
        """Move batches that have reached the next age."""
        last = len(self._by_age) - 1
        for age in range(last, -1, -1):
            batches, oldest = self._by_age[age], self._now - self._reuse.ends[age]
            while batches and batches[0].freed_at <= oldest:
                batch = batches.popleft()
                if age == last:  # its entries are no longer observed
                    batch.num_watched = 0
                    for key in batch.ghosts:
                        if self._ghosts.get(key) is batch:
                            del self._ghosts[key]
                    batch.ghosts = []
                    continue
                if batch.num_free:
                    self._displace(batch)
                batch.age = age + 1
                if batch.num_free:
                    self._place(batch)
                if batch.num_free or batch.num_watched:
                    self._by_age[age + 1].append(batch)
                    self._reuse.note_reached(batch.kind, age + 1, batch.num_watched)

    def _place(self, batch: _Batch) -> None:
        self._cells.setdefault((batch.kind, batch.age), OrderedDict())[batch] = None

    def _displace(self, batch: _Batch) -> None:
        cell = batch.kind, batch.age
        del self._cells[cell][batch]
        if not self._cells[cell]:
            del self._cells[cell]

    def _leave(self, entry: int, batch: _Batch) -> None:
        """An entry is no longer free."""
        self._batch_of[entry] = None
        batch.num_free -= 1
        if not batch.num_free:
            self._displace(batch)
            batch.entries = []
        elif len(batch.entries) > 2 * batch.num_free + _SLACK:
            batch.entries = [one for one in batch.entries if self._batch_of[one] is batch]

    def _note_asked(self, batch: _Batch) -> None:
        if batch.num_watched:
            batch.num_watched -= 1
            self._reuse.note_asked(batch.kind, batch.age)

    def _is_watched(self, entry: int) -> bool:
        return int.from_bytes(self._key[entry][:4], "little") < self._max_watched_key
