"""The KV cache: blocks that requests hold, and content that outlives them.

Owns the states of a block. Knows nothing about tensors, requests or rows.

    free, empty ──allocate──► held ──publish──► held, has an entry
        ▲                       │                   │ release (last reference)
        │                    release                ▼
        └───────────────────────┴──evict─── free, has an entry ──acquire (a hit)──► held, ...
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from charonia.control.cache.block_pool import BlockPool
from charonia.control.cache.cache_events import CacheEvents
from charonia.control.cache.eviction import Eviction
from charonia.control.cache.prefix_index import ROOT, PrefixIndex
from charonia.control.cache.retention import Retention
from charonia.control.cache.tenant_shares import TenantShares
from charonia.control.cache.tiers import Tiers
from charonia.control.state.stats import SchedulerStats
from charonia.protocol import DEFAULT_CACHE_PRIORITY

NO_ENTRIES: list[int] = []  # never appended to
_MOST_RESERVED = 4
"""Most reservations per block of the cache. Requests beyond that are far from their turn. Preempted
requests and loaded blocks are reserved in any case."""


class BlockUsage(NamedTuple):
    """Blocks of a cache by state.

    Attributes:
        total: without the null block. used: that live requests reference. cached: free ones that
            hold content. empty: free ones without. aside: those for which there is no memory.
        retained: used or cached ones that are evicted after all others.
    """

    total: int
    used: int
    cached: int
    empty: int
    aside: int
    retained: int


class KVCache:
    """Blocks with reference counts and content.

    A request that holds a block holds all blocks before it in its prefix. So only free entries
    continue a free entry. They are always evicted before it, because without it they could never
    be found. A free block is the only one with its content.

    Reserved entries, which a request waits for, are kept like held ones as long as others can be
    evicted. The eviction policy counts the hit when the request arrives, not when it begins. Their
    blocks still count as free. If nothing else is left, the request that reserved last loses its
    reservation first.

    Blocks that were hit are saved to slower tiers, some in each step. If one is evicted before it
    was saved, the step that overwrites it saves it first.

    Args:
        num_blocks: with the null block 0.
        eviction: must not be shared with another cache.
        stats: counts evictions.
        events: told about evictions; None tells nothing.
        tiers: where hit blocks are saved; None without tiers.
        weight_of: a tenant's weight, see `TenantShares`; None without shares.

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
        self._retention: Retention | None = None  # wraps the eviction once a priority was set
        self._now = 0.0
        self._stats = stats or SchedulerStats()
        self._events = events
        self._tiers = tiers
        self._to_save: OrderedDict[bytes, None] = OrderedDict()  # keys of entries
        self._has_draft_kv = [False] * num_blocks
        self._num_reserved = 0  # free entries with a reservation
        self._num_reservations = 0
        self._num_waiting = [0] * num_blocks  # reservations by entry
        self._reserved: OrderedDict[str, list[int]] = OrderedDict()  # entries by waiting request
        self._to_evict: list[int] = []  # a victim, its child, the child of that, ...

    @property
    def usage(self) -> BlockUsage:
        """Its blocks by state."""
        return BlockUsage(
            total=self.num_blocks - 1,
            used=self.num_used,
            cached=self.num_cached,
            empty=self._pool.num_empty,
            aside=self._pool.num_aside,
            retained=self.num_retained,
        )

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: empty or evictable."""
        return self._pool.num_empty + self.num_cached

    @property
    def num_usable(self) -> int:
        """All blocks but the null block and those set aside."""
        return self.num_blocks - 1 - self._pool.num_aside

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free for the growth of running requests."""
        return max(1, (self.num_usable + 1) // 100)

    @property
    def num_used(self) -> int:
        """Blocks that live requests reference."""
        return self.num_usable - self.num_free

    @property
    def num_reserved(self) -> int:
        """Free blocks that are reserved for waiting requests."""
        return self._num_reserved

    @property
    def num_retained(self) -> int:
        """Entries that are evicted after all others, because of a cache priority."""
        return 0 if self._retention is None else self._retention.num_protected

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `keys`. Changes nothing.

        A later release may replace some of them by their duplicates.
        """
        return self._index.find(keys)

    def count_free(self, block_ids: Sequence[int]) -> int:
        """Count the free ones among these cached blocks: acquiring them takes from `num_free`."""
        return sum(not self._pool.num_references(block_id) for block_id in block_ids)

    def num_references(self, block_id: int) -> int:
        """Return the number of requests that hold a block."""
        return self._pool.num_references(block_id)

    def count_with_draft_kv(self, block_ids: Sequence[int]) -> int:
        """Count the blocks, from the first on, that also hold the draft model's KV."""
        with_kv = itertools.takewhile(self._has_draft_kv.__getitem__, block_ids)
        return sum(1 for _ in with_kv)

    def note_draft_kv(self, block_ids: Sequence[int]) -> None:
        """Note that these held blocks contain the draft model's KV; allocation resets it."""
        for block_id in block_ids:
            self._has_draft_kv[block_id] = True

    def reserve(self, name: str, block_ids: Sequence[int], *, were_loaded: bool = False) -> None:
        """Reserve the cached blocks of a prefix for a waiting request.

        If it has already reserved the first of them, the others are added.

        Args:
            name: key of the request.
            block_ids: as they were just found.
            were_loaded: whether some of them were loaded for this request.
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
        """Reserve the published blocks that a preempted request is about to release.

        Its reservation is kept longer than all others. The eviction policy counts no hit.
        """
        if block_ids:
            self._note_reserved(name, [self._index.entry_of(block_id) for block_id in block_ids])
            self._reserved.move_to_end(name, last=False)

    def unreserve(self, name: str) -> None:
        """Drop a request's reservation, if it has one."""
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
            name: key of the request; its reservation, if there is one, ends.
        """
        num_reserved = len(self._reserved.get(name, NO_ENTRIES))
        for place, block_id in enumerate(block_ids):
            entry = self._index.entry_of(block_id)
            if self._pool.hold(block_id):
                self.num_cached -= 1
                self._num_reserved -= self._num_waiting[entry] > 0
            if place >= num_reserved:  # otherwise the hit was counted by `reserve`
                self._eviction.hit(entry)
        self.unreserve(name)
        if self._tiers is not None:
            self._note_hits(self._tiers, block_ids)

    def share(self, block_ids: Sequence[int]) -> None:
        """Take another reference to held blocks. The eviction policy counts no hit."""
        for block_id in block_ids:
            is_first = self._pool.hold(block_id)
            assert not is_first, f"block {block_id} is shared, held by nobody"

    def save(self, most: int) -> None:
        """Save blocks that were hit and are not saved yet, in the order of their hits.

        Args:
            most: most blocks to save.
        """
        for _ in range(most):
            if not self._to_save or self._tiers is None or not self._tiers.may_save_more:
                return
            key, _ = self._to_save.popitem(last=False)
            self._save(key, self._index.block_of(self._index.entry_with(key)))

    def set_retention(self, block_id: int, priority: int, ttl_s: float | None) -> bool:
        """Set the cache priority of a published block, as its holder asks.

        Args:
            priority: see `CacheRange`.
            ttl_s: how long it lasts once the block is free; None is until it is evicted.

        Returns:
            Whether the priority was granted. Otherwise the block has the default priority, and the
            blocks behind it would be refused, too.
        """
        if self._retention is None:
            if priority == DEFAULT_CACHE_PRIORITY:
                return True
            free = [entry for entry in self._index.entries() if self._is_ordered(entry)]
            self._retention = self._eviction = Retention(
                self._eviction, self._index, free, self.num_usable
            )
            self._retention.pass_time(self._now)
        self._to_evict = []  # the eviction may choose differently now
        ttl_ms = 0 if ttl_s is None else math.ceil(ttl_s * 1000)
        return self._retention.set(self._index.entry_of(block_id), priority, ttl_ms)

    def pass_time(self, now: float) -> None:
        """Set the time in seconds; retention may expire."""
        self._now = now
        if self._retention is not None:
            self._retention.pass_time(now)

    def allocate(self, count: int, tenant: str = "") -> list[int]:
        """Take `count` blocks for writing; evict content if no empty block is left.

        The caller must check `num_free` before.

        Args:
            tenant: whose blocks they are until they are empty again.
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
        """Set the number of usable blocks. Only free blocks can be set aside; content is evicted.

        Returns:
            The blocks that are set aside now.
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
        """Publish a held block that is full and computed: from now on it can be hit.

        Args:
            previous: the block before it, which must be published; 0 if it is the first one.

        Returns:
            Whether no other block has the same content.
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
        """Release a request's references; `block_ids` in the order of its table."""
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
        """Empty a free block."""
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
        """Queue hit blocks for saving, unless they are saved already."""
        for block_id in reversed(block_ids):
            key = self._index.key_of(self._index.entry_of(block_id))
            if not tiers.note_hit(key):
                self._to_save[key] = None

    def _save(self, key: bytes, block_id: int) -> None:
        assert self._tiers is not None
        if self._tiers.may_save_more:
            self._tiers.save(block_id, key, self._has_draft_kv[block_id])

    def _empty(self, block_id: int) -> None:
        """Note that a free block has lost its content."""
        self._pool.empty(block_id)
        if self._shares is not None:
            self._shares.take_back(block_id)

    def _last_in_line(self) -> str:
        """The request that reserved last, of those that reserved a free entry; there must be one.

        If any entry of a prefix is free, its last one is, because holding an entry means holding
        those before it.
        """
        waiting = reversed(self._reserved.items())
        return next(name for name, entries in waiting if not self._is_held(entries[-1]))

    def _is_ordered(self, entry: int) -> bool:
        """Return whether the eviction orders an entry: it is neither held nor reserved."""
        return not (self._num_waiting[entry] or self._is_held(entry))

    def _is_held(self, entry: int) -> bool:
        return self._pool.num_references(self._index.block_of(entry)) > 0
