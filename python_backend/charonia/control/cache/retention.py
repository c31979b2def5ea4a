"""Retention that requests ask for: what is evicted before, and what after all that nobody spoke of.

Owns the order of what has a priority of its own; leaves all else to the policy of eviction that it
wraps. Must not know requests, tenants or the clock: time is an argument.

    evicted first                                                           evicted last
    below the default ─────────────► the policy's own order ─────────────► above the default
    by priority, then by recency     the default, nothing above behind it  by priority, then recency

An entry that continues another goes before it. So an entry is *protected* whose priority is above
the default, or behind which there is one: it does not go as long as others are there. Of the
protected ones those behind which there is none come up for eviction, of those below the default
those behind which there is nothing at all; with the entry behind it gone the next one does.

Priorities and what they mean are TensorRT-LLM's (`KvCacheRetentionConfig`). There, too, what is
asked for last counts, and a duration begins when nobody holds an entry any more.
"""

from collections.abc import Iterable

from charonia.control.cache.eviction import Eviction
from charonia.control.cache.eviction.scores import ByScore
from charonia.control.cache.prefix_index import PrefixIndex
from charonia.protocol import DEFAULT_CACHE_PRIORITY

_MANY = 2**64  # more than ever become free
_DEFAULT = DEFAULT_CACHE_PRIORITY
_MOST_FORGOTTEN = 128
"""Wishes that run out at a time; the rest do so the next time, that nothing waits for them."""


class Retention:
    """An `Eviction` around another one, for entries of which some are retained. O(log n).

    To protect an entry costs a step for each entry before it that is not protected yet.

    At most half of the blocks are protected, whoever asks for it: the other half is there for all.
    Where there are as many, who comes takes the place of what would be evicted first among them,
    unless that has a higher priority; then it has the default. Where blocks are set aside, so that
    more than half of the others are protected, those that would go first are so no longer.

    Args:
        policy: of all that has the default priority.
        index: which entry continues which.
        free: entries that the policy orders so far.
        num_usable: blocks of the cache that are not set aside.

    Attributes:
        num_protected: entries.
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
        self._num_ordered = 0  # by the policy
        for entry in free:
            self._is_free[entry] = True
            self._num_ordered += 1

    @property
    def has_low(self) -> bool:
        """Whether something is to go before all that the policy orders."""
        return len(self._low) > 0

    def set(self, entry: int, priority: int, ttl_ms: int) -> bool:
        """A request that holds an entry asks for this, whatever was asked for before.

        Args:
            ttl_ms: how long it lasts once nobody holds the entry; 0 is until it is evicted.

        Returns:
            Whether it is as asked for. Else it has the default, as would what continues it.
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
        """Say how many blocks are not set aside. Up to half of these are protected."""
        self._max_protected = num_usable // 2

    def pass_time(self, now: float) -> None:
        """What was asked for until now, in seconds, counts no longer, a few entries at a time.

        Nor does, of what is protected beyond half of the blocks, what would be evicted first. What
        is held is protected until it is released.
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
        """See `Eviction`."""
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
        """See `Eviction`; nothing continues the entry, which is in the index yet."""
        priority = self._priority[entry]
        self._is_free[entry] = False
        self._leave(entry)
        if priority != _DEFAULT:
            self._policy.free(entry)  # it has not heard of that
            self._priority[entry] = _DEFAULT
        self._policy.evict(entry)
        if priority > _DEFAULT:
            self._unprotect(entry)
        parent = self._index.parent_of(entry)
        is_last = self._index.is_only_child(entry)
        if is_last and self._is_free[parent] and self._priority[parent] < _DEFAULT:
            self._add(self._low, parent)

    # ------------------------------------------------------------------ where a free entry is

    def _order(self, entry: int) -> None:
        """Have an entry that is free come up for eviction, if it is its turn."""
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
        """Undo `_order`, but for the policy, which is told by who calls."""
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

    # ------------------------------------------------------------------ what is protected

    def _is_protected(self, entry: int) -> bool:
        return self._priority[entry] > _DEFAULT or self._num_protected_children[entry] > 0

    def _protect(self, entry: int) -> None:
        """An entry that is held is protected from now on, and so are those before it."""
        while entry:
            self.num_protected += 1
            entry = self._index.parent_of(entry)
            was_protected = self._is_protected(entry)
            self._num_protected_children[entry] += 1
            if was_protected:
                return

    def _unprotect(self, entry: int) -> None:
        """An entry is protected no longer, nor are those before it that were for its sake."""
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
        """Whether an entry may be protected; what it takes the place of is so no longer.

        That is seen one by one. Where there turns out to be too little, what was taken is lost.
        """
        while True:
            room = self._max_protected - self.num_protected
            if room <= 0 and not self._can_displace(priority):
                return False  # at once: each block of a request may ask for it
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
        """Of an entry and those before it, how many are not protected."""
        num = 0
        while entry and not self._is_protected(entry):
            num += 1
            entry = self._index.parent_of(entry)
        return num
