"""Retention: cache priorities that requests set, by which entries are evicted earlier or later.

Owns the order of entries with a priority of their own; leaves all others to the eviction policy
that it wraps. Knows nothing about requests, tenants or the clock: time is an argument.

    evicted first                                                           evicted last
    below the default ─────────────► the policy's own order ─────────────► above the default
    by priority, then by recency     default, without a descendant above   by priority, then recency

An entry is evicted after all entries that continue it. So an entry is *protected* if its priority,
or that of a descendant, is above the default: it is evicted after all unprotected entries. A
protected entry becomes evictable once it has no protected descendant. An entry below the default
becomes evictable once it has no descendant at all.

Priorities and their meaning are TensorRT-LLM's (`KvCacheRetentionConfig`). There, too, the last
request's setting counts, and a duration begins when an entry becomes free.
"""

from collections.abc import Iterable

from charonia.control.cache.eviction import Eviction
from charonia.control.cache.eviction.scores import ByScore
from charonia.control.cache.prefix_index import PrefixIndex
from charonia.protocol import DEFAULT_CACHE_PRIORITY

_MANY = 2**64  # more than the entries that ever become free
_DEFAULT = DEFAULT_CACHE_PRIORITY
_MOST_FORGOTTEN = 128
"""Most priorities that expire in one call, which keeps it short; the rest expire in the next."""


class Retention:
    """An `Eviction` that wraps another one and knows priorities. O(log n).

    Protecting an entry costs a step for each entry before it that is not protected yet.

    At most half of the blocks are protected, over all requests; the other half is there for all. At
    that limit, a new entry replaces the protected entry that would be evicted first, unless that
    has a higher priority; then the new entry is refused and gets the default. If blocks are set
    aside, so that more than half of the rest are protected, those that would be evicted first lose
    their protection.

    Args:
        policy: orders all entries with the default priority.
        index: the tree of entries.
        free: entries that the policy orders so far.
        num_usable: blocks of the cache that are not set aside.

    Attributes:
        num_protected: number of protected entries.
    """

    def __init__(
        self, policy: Eviction, index: PrefixIndex, free: Iterable[int], num_usable: int
    ) -> None:
        num_blocks = index.num_blocks
        self.num_protected = 0
        self._max_protected = num_usable // 2
        self._policy = policy
        self._index = index
        self._low = ByScore(num_blocks)
        self._high = ByScore(num_blocks)
        self._expiring = ByScore(num_blocks)  # by time in ms
        self._now_ms = 0
        self._num_freed = 0
        self._priority = [_DEFAULT] * num_blocks  # these by entry
        self._ttl_ms = [0] * num_blocks  # 0 is for ever
        self._freed_at = [0] * num_blocks
        self._num_protected_children = [0] * num_blocks
        self._is_free = [False] * num_blocks
        self._num_ordered = 0  # entries that the policy orders
        for entry in free:
            self._is_free[entry] = True
            self._num_ordered += 1

    @property
    def has_low(self) -> bool:
        """True if an entry is to be evicted before all that the policy orders."""
        return len(self._low) > 0

    def set(self, entry: int, priority: int, ttl_ms: int) -> bool:
        """Set the priority of a held entry, in place of any earlier one.

        Args:
            ttl_ms: how long it lasts once the entry is free; 0 is until it is evicted.

        Returns:
            Whether the priority was granted. Otherwise the entry has the default priority, and
            entries that continue it would be refused, too.
        """
        assert not self._is_free[entry], "who asks for an entry holds it"
        was_protected = self._is_protected(entry)
        is_granted = priority <= _DEFAULT or was_protected or self._make_room(entry, priority)
        if not is_granted:
            priority = _DEFAULT
        self._priority[entry] = priority
        self._ttl_ms[entry] = ttl_ms
        is_protected = self._is_protected(entry)
        if is_protected and not was_protected:
            self._protect(entry)
        elif was_protected and not is_protected:
            self._unprotect(entry)
        return is_granted

    def resize(self, num_usable: int) -> None:
        """Set the number of blocks that are not set aside. Up to half of these are protected."""
        self._max_protected = num_usable // 2

    def pass_time(self, now: float) -> None:
        """Reset priorities that have expired by `now`, in seconds; a few entries per call.

        If more than half of the blocks are protected, it also resets those that would be evicted
        first. Held entries stay protected until they are released.
        """
        self._now_ms = int(now * 1000)
        for _ in range(min(self.num_protected - self._max_protected, _MOST_FORGOTTEN)):
            if not self._high or self.num_protected <= self._max_protected:
                break
            self._forget(self._high.first())
        for _ in range(min(len(self._expiring), _MOST_FORGOTTEN)):
            entry = self._expiring.first()
            if self._expiring.score_of(entry) > self._now_ms:
                return
            self._forget(entry)

    # ------------------------------------------------------------------ as an eviction

    def insert(self, entry: int, key: bytes, parent: int) -> None:
        """See `Eviction`. The parent may be free, if the entry was loaded and not computed."""
        self._low.discard(parent)  # it has a descendant now
        self._policy.insert(entry, key, parent)

    def hit(self, entry: int) -> None:
        """See `Eviction`."""
        if self._is_free[entry]:
            self._is_free[entry] = False
            self._leave(entry)
        self._policy.hit(entry)

    def free(self, entry: int) -> None:
        """See `Eviction`."""
        self._is_free[entry] = True
        if self._priority[entry] != _DEFAULT:
            self._num_freed += 1
            self._freed_at[entry] = self._num_freed
            if self._ttl_ms[entry]:
                self._expiring.add(entry, self._now_ms + self._ttl_ms[entry])
        self._order(entry)

    def victim(self) -> int:
        """See `Eviction`."""
        if self._low:
            return self._low.first()
        return self._policy.victim() if self._num_ordered else self._high.first()

    def evict(self, entry: int) -> None:
        """See `Eviction`. The entry has no child, and must still be in the index."""
        priority = self._priority[entry]
        self._is_free[entry] = False
        self._leave(entry)
        if priority != _DEFAULT:
            self._policy.free(entry)  # the policy was not told before
            self._priority[entry] = _DEFAULT
        self._policy.evict(entry)
        if priority > _DEFAULT:
            self._unprotect(entry)
        parent = self._index.parent_of(entry)
        is_last = self._index.is_only_child(entry)
        if is_last and self._is_free[parent] and self._priority[parent] < _DEFAULT:
            self._add(self._low, parent)

    # ------------------------------------------------------------------ the order of free entries

    def _order(self, entry: int) -> None:
        """Put a free entry into its order, if it is evictable."""
        priority = self._priority[entry]
        if priority < _DEFAULT:
            if not self._index.child_of(entry):
                self._add(self._low, entry)
        elif self._num_protected_children[entry]:
            return
        elif priority > _DEFAULT:
            self._add(self._high, entry)
        else:
            self._num_ordered += 1
            self._policy.free(entry)

    def _add(self, order: ByScore, entry: int) -> None:
        order.add(entry, self._priority[entry] * _MANY + self._freed_at[entry])

    def _leave(self, entry: int) -> None:
        """Undo `_order`, except in the policy, which the caller must tell."""
        if self._priority[entry] == _DEFAULT:
            self._num_ordered -= not self._num_protected_children[entry]
            return
        self._low.discard(entry)
        self._high.discard(entry)
        self._expiring.discard(entry)

    def _forget(self, entry: int) -> None:
        """Give a free entry the default priority."""
        was_protected = self._is_protected(entry)
        self._leave(entry)
        self._priority[entry] = _DEFAULT
        self._order(entry)
        if was_protected and not self._is_protected(entry):
            self._unprotect(entry)

    # ------------------------------------------------------------------ protected entries

    def _is_protected(self, entry: int) -> bool:
        return self._priority[entry] > _DEFAULT or self._num_protected_children[entry] > 0

    def _protect(self, entry: int) -> None:
        """Protect a held entry and those before it."""
        while entry:
            self.num_protected += 1
            entry = self._index.parent_of(entry)
            was_protected = self._is_protected(entry)
            self._num_protected_children[entry] += 1
            if was_protected:
                return

    def _unprotect(self, entry: int) -> None:
        """End the protection of an entry, and of those before it that were protected by it."""
        while entry:
            self.num_protected -= 1
            entry = self._index.parent_of(entry)
            self._num_protected_children[entry] -= 1
            if self._num_protected_children[entry]:
                return
            if self._is_free[entry]:
                self._order(entry)
            if self._is_protected(entry):
                return

    def _make_room(self, entry: int, priority: int) -> bool:
        """Make room to protect an entry, at the cost of others. Return whether there is room.

        Entries are replaced one by one. If they turn out to be too few, they are not restored.
        """
        while True:
            room = self._max_protected - self.num_protected
            if room <= 0 and not self._can_displace(priority):
                return False  # check this first: each block of a request may ask
            num_needed = self._num_to_protect(entry)
            if num_needed <= room:
                return True
            if num_needed > self._max_protected:
                return False
            for _ in range(num_needed - room):
                if not self._can_displace(priority):
                    return False
                self._forget(self._high.first())

    def _can_displace(self, priority: int) -> bool:
        return bool(self._high) and self._priority[self._high.first()] <= priority

    def _num_to_protect(self, entry: int) -> int:
        """Count this entry and its ancestors, up to the first one that is protected."""
        num = 0
        while entry and not self._is_protected(entry):
            num += 1
            entry = self._index.parent_of(entry)
        return num
