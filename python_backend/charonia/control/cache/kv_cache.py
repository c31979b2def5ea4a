"""The KV cache: blocks that requests hold, and content that outlives them.

Owns what becomes of a block. Must not know tensors, requests or rows.

    free, empty ──allocate──► held ──publish──► held, has an entry
        ▲                       │                   │ release (last reference)
        │                    release                ▼
        └───────────────────────┴──evict─── free, has an entry ──acquire (a hit)──► held, ...
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from charonia.control.cache.block_pool import BlockPool
from charonia.control.cache.cache_events import CacheEvents
from charonia.control.cache.eviction import Eviction
from charonia.control.cache.prefix_index import ROOT, PrefixIndex
from charonia.control.cache.retention import Retention
from charonia.control.cache.tenant_shares import TenantShares
from charonia.control.cache.tiers import Tiers
from charonia.control.state.stats import SchedulerStats
from charonia.protocol import DEFAULT_CACHE_PRIORITY

NO_ENTRIES: list[int] = []  # nobody appends to it
_MOST_RESERVED = 4
"""Reservations per block of the cache; whoever comes then is far from its turn. Those of who was
displaced come on top, which has had a row, and those of blocks that were loaded."""


class KVCache:
    """Blocks with reference counts and content.

    Whoever holds a block holds those before it in its prefix, so an entry that nobody holds is
    continued by such alone; and what continues an entry is evicted before it, whatever the order:
    without it, it could never be found. A block that nobody holds is the only one with its content.

    Entries that somebody waits for are kept as well as if they were held, as long as others can be
    evicted: to the eviction a request asks for them when it comes, not when it begins. Their blocks
    are free all the same. Where nothing else is left, who came last loses what it waits for first.

    What was hit is saved to slower tiers: some blocks in each step, and when one is evicted that
    has not been saved yet, in the step that writes to it next.

    Args:
        num_blocks: with the null block 0.
        eviction: of this cache alone.
        stats: where to count what is evicted.
        events: told of what is evicted; None where nobody listens.
        tiers: where to save what was hit; None where there are none.
        weight_of: of a tenant, see `TenantShares`; None where nobody has a share.

    Attributes:
        num_cached: free blocks that still hold content.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: Eviction,
        stats: SchedulerStats | None = None,
        events: CacheEvents | None = None,
        tiers: Tiers | None = None,
        weight_of: Callable[[str], float] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(num_blocks)
        self._shares: TenantShares | None = None
        if weight_of is not None:
            eviction = self._shares = TenantShares(eviction, self._index, weight_of)
        self._eviction = eviction
        self._retention: Retention | None = None  # around the eviction, where one was asked for
        self._now = 0.0
        self._stats = stats or SchedulerStats()
        self._events = events
        self._tiers = tiers
        self._to_save: OrderedDict[bytes, None] = OrderedDict()  # keys of entries
        self._has_draft_kv = [False] * num_blocks
        self._num_reserved = 0  # free entries that somebody waits for
        self._num_reservations = 0
        self._num_waiting = [0] * num_blocks  # for an entry
        self._reserved: OrderedDict[str, list[int]] = OrderedDict()  # entries, by who waits
        self._to_evict: list[int] = []  # a victim, what continues it, what continues that, ...

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: empty ones and evictable ones."""
        return self._pool.num_empty + self.num_cached

    @property
    def num_usable(self) -> int:
        """Blocks that may be allocated, or are: all but the null block and those set aside."""
        return self.num_blocks - 1 - self._pool.num_aside

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free while others run, so that these can grow."""
        return max(1, (self.num_usable + 1) // 100)

    @property
    def num_used(self) -> int:
        """Blocks that live requests reference."""
        return self.num_usable - self.num_free

    @property
    def num_reserved(self) -> int:
        """Free blocks that somebody waits for."""
        return self._num_reserved

    @property
    def num_retained(self) -> int:
        """Entries that go after all others, as requests have asked for it."""
        return 0 if self._retention is None else self._retention.num_protected

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `keys`. Changes nothing.

        What is released later may have others take their places.
        """
        return self._index.find(keys)

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of these cached blocks are free: acquiring them takes from `num_free`."""
        return sum(not self._pool.num_references(block_id) for block_id in block_ids)

    def num_references(self, block_id: int) -> int:
        """How many requests hold a block."""
        return self._pool.num_references(block_id)

    def count_with_draft_kv(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks, from the first on, hold the draft model's KV as well."""
        with_kv = itertools.takewhile(self._has_draft_kv.__getitem__, block_ids)
        return sum(1 for _ in with_kv)

    def note_draft_kv(self, block_ids: Sequence[int]) -> None:
        """Say that the draft model computed all of these held blocks; eviction forgets it."""
        for block_id in block_ids:
            self._has_draft_kv[block_id] = True

    def reserve(self, name: str, block_ids: Sequence[int], *, were_loaded: bool = False) -> None:
        """Say that somebody waits for the cached blocks of a prefix.

        Who waits for the first of them already waits for the others, too, from now on.

        Args:
            block_ids: as they were just found.
            were_loaded: whether some of them were, for who waits.
        """
        known = self._reserved.get(name, NO_ENTRIES)
        entries = [self._index.entry_of(block_id) for block_id in block_ids]
        assert all(map(int.__eq__, known, entries)), "it waits for another prefix"
        block_ids, entries = block_ids[len(known) :], entries[len(known) :]
        is_full = self._num_reservations + len(entries) > _MOST_RESERVED * self.num_blocks
        if (is_full and not were_loaded) or not entries:
            return
        for block_id, entry in zip(block_ids, entries, strict=True):
            is_free = not self._pool.num_references(block_id)
            self._num_reserved += is_free and not self._num_waiting[entry]
            self._eviction.hit(entry)
        self._note_reserved(name, entries)

    def reserve_first(self, name: str, block_ids: Sequence[int]) -> None:
        """Say that who holds the published blocks of a prefix gives them up and waits for them.

        They are kept before what others wait for. To the eviction nobody has asked for them again.
        """
        if block_ids:
            self._note_reserved(name, [self._index.entry_of(block_id) for block_id in block_ids])
            self._reserved.move_to_end(name, last=False)

    def unreserve(self, name: str) -> None:
        """Somebody waits no longer, if they did."""
        entries = self._reserved.pop(name, NO_ENTRIES)
        self._num_reservations -= len(entries)
        for entry in reversed(entries):
            self._num_waiting[entry] -= 1
            if self._num_waiting[entry]:
                continue
            if not self._is_held(entry):
                self._num_reserved -= 1
                self._eviction.free(entry)

    def acquire(self, block_ids: Sequence[int], name: str = "") -> None:
        """Take references to cached blocks (a hit).

        Args:
            name: under which the first of them may be reserved; they are so no longer.
        """
        num_reserved = len(self._reserved.get(name, NO_ENTRIES))
        for place, block_id in enumerate(block_ids):
            entry = self._index.entry_of(block_id)
            if self._pool.hold(block_id):
                self.num_cached -= 1
                self._num_reserved -= self._num_waiting[entry] > 0
            if place >= num_reserved:  # else it was asked for when that was reserved
                self._eviction.hit(entry)
        self.unreserve(name)
        if self._tiers is not None:
            self._note_hits(self._tiers, block_ids)

    def share(self, block_ids: Sequence[int]) -> None:
        """Take another reference to blocks that somebody holds; to the eviction it is no hit."""
        for block_id in block_ids:
            is_first = self._pool.hold(block_id)
            assert not is_first, f"block {block_id} is shared, held by nobody"

    def save(self, most: int) -> None:
        """Save some of the blocks that were hit and are not saved yet, in the order of hits.

        Args:
            most: blocks.
        """
        for _ in range(most):
            if not self._to_save or self._tiers is None or not self._tiers.may_save_more:
                return
            key, _ = self._to_save.popitem(last=False)
            self._save(key, self._index.block_of(self._index.entry_with(key)))

    def set_retention(self, block_id: int, priority: int, ttl_s: float | None) -> bool:
        """Say how long what a published block holds is to be kept; its holder's wish counts.

        Args:
            priority: see `CacheRange`. ttl_s: how long it counts once nobody holds that any more;
                None is until it is evicted.

        Returns:
            Whether it is as asked for. Else it has the default, as would the blocks behind it.
        """
        if self._retention is None:
            if priority == DEFAULT_CACHE_PRIORITY:
                return True
            free = [entry for entry in self._index.entries() if self._is_ordered(entry)]
            self._retention = self._eviction = Retention(
                self._eviction, self._index, free, self.num_usable
            )
            self._retention.pass_time(self._now)
        self._to_evict = []  # it may have been the eviction's choice no longer
        ttl_ms = 0 if ttl_s is None else math.ceil(ttl_s * 1000)
        return self._retention.set(self._index.entry_of(block_id), priority, ttl_ms)

    def pass_time(self, now: float) -> None:
        """Say what time it is, in seconds: retention may be over."""
        self._now = now
        if self._retention is not None:
            self._retention.pass_time(now)

    def allocate(self, count: int, tenant: str = "") -> list[int]:
        """Take `count` blocks for writing, evicting content where no empty one is left.

        The caller has checked `num_free`.

        Args:
            tenant: who has them until they are empty again.
        """
        if self._shares is not None:
            self._shares.charge(tenant, count)
        block_ids = []
        for _ in range(count):
            if not self._pool.num_empty:
                self._evict()
            block_id = self._pool.take()
            self._has_draft_kv[block_id] = False
            block_ids.append(block_id)
        if self._shares is not None:
            self._shares.assign(block_ids, tenant)
        return block_ids

    def resize(self, num_usable: int) -> list[int]:
        """Have so many blocks in use, as far as others are free; content is evicted for that.

        Returns:
            The blocks that are in use no more.
        """
        aside: list[int] = []
        num_surplus = min(self.num_usable - num_usable, self.num_free)
        if num_surplus < 0:
            self._pool.use_again(-num_surplus)
        else:
            while self._pool.num_empty < num_surplus:
                self._evict()
            aside = self._pool.set_aside(num_surplus)
        if self._retention is not None:
            self._retention.resize(self.num_usable)
        return aside

    def publish(self, block_id: int, key: bytes, previous: int) -> bool:
        """Say that a held block is full and computed: from now on it can be hit.

        Args:
            previous: the block before it, which is published; 0 if it is the first one.

        Returns:
            Whether no other block has its content.
        """
        index = self._index
        assert self._pool.num_references(block_id), f"block {block_id} is published, held by nobody"
        assert not index.entry_of(block_id), f"block {block_id} is published twice"
        entry = index.entry_with(key)
        if entry == ROOT:
            parent = index.entry_of(previous)
            self._eviction.insert(index.add(key, block_id, parent), key, parent)
            return True
        index.add_twin(entry, block_id)
        other = index.block_of(entry)
        if not self._pool.num_references(other):
            index.drop_twin(other)
            self._empty(other)
            self.num_cached -= 1
            self._num_reserved -= self._num_waiting[entry] > 0
            self._eviction.hit(entry)
        return False

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back a request's references; `block_ids` in the order of its table."""
        for block_id in reversed(block_ids):
            if not self._pool.release(block_id):
                continue
            entry = self._index.entry_of(block_id)
            if entry == ROOT or self._index.drop_twin(block_id):
                self._empty(block_id)
            else:
                self.num_cached += 1
                if self._num_waiting[entry]:
                    self._num_reserved += 1
                else:
                    self._eviction.free(entry)

    def _note_reserved(self, name: str, entries: list[int]) -> None:
        self._reserved[name] = self._reserved.get(name, NO_ENTRIES) + entries
        self._num_reservations += len(entries)
        for entry in entries:
            self._num_waiting[entry] += 1

    def _evict(self) -> None:
        """Empty a block that nobody holds."""
        while self.num_cached == self._num_reserved:
            self.unreserve(self._last_in_line())
        path = self._to_evict
        has_low = self._retention is not None and self._retention.has_low
        if has_low or not path or not self._is_ordered(path[0]):
            path = self._to_evict = [self._eviction.victim()]
        while child := self._index.child_of(path[-1]):
            path.append(child)
        entry = path.pop()
        self._eviction.evict(entry)
        key = self._index.key_of(entry)
        if self._events is not None:
            self._events.removed(key)
        block_id = self._index.remove(entry)
        if key in self._to_save:
            del self._to_save[key]
            self._save(key, block_id)
        self._empty(block_id)
        self.num_cached -= 1
        self._stats.blocks_evicted += 1

    def _note_hits(self, tiers: Tiers, block_ids: Sequence[int]) -> None:
        """Have what was hit saved, unless it is."""
        for block_id in reversed(block_ids):
            key = self._index.key_of(self._index.entry_of(block_id))
            if not tiers.note_hit(key):
                self._to_save[key] = None

    def _save(self, key: bytes, block_id: int) -> None:
        assert self._tiers is not None
        if self._tiers.may_save_more:
            self._tiers.save(block_id, key, self._has_draft_kv[block_id])

    def _empty(self, block_id: int) -> None:
        """A block that nobody holds has no content any more."""
        self._pool.empty(block_id)
        if self._shares is not None:
            self._shares.take_back(block_id)

    def _last_in_line(self) -> str:
        """Who came last of those that wait for an entry that nobody holds; there is one.

        Whoever holds an entry holds those before it, so the last one of a prefix tells.
        """
        waiting = reversed(self._reserved.items())
        return next(name for name, entries in waiting if not self._is_held(entries[-1]))

    def _is_ordered(self, entry: int) -> bool:
        """Whether the eviction orders an entry: nobody holds it or waits for it."""
        return not (self._num_waiting[entry] or self._is_held(entry))

    def _is_held(self, entry: int) -> bool:
        return self._pool.num_references(self._index.block_of(entry)) > 0
