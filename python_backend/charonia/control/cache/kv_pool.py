"""The pool of KV blocks that a scheduler is given.

Owns what all block tables of a scheduler have in common: the hash, the eviction policy, who is told
of changes and the tenants' weights. The pool outlives an engine; its block tables and their content
end with it. Knows nothing about requests, steps or scheduling policies.
"""

from collections.abc import Callable

from charonia.control.cache.block_keys import BlockHasher
from charonia.control.cache.block_tables import BlockTables
from charonia.control.cache.cache_events import CacheEvents
from charonia.control.cache.eviction import Eviction, Lru
from charonia.control.cache.kv_cache import KVCache
from charonia.control.cache.tiers import Tiers
from charonia.control.state.limits import Limits
from charonia.control.state.stats import SchedulerStats


class KVPool:
    """Makes the block tables of one engine after the other.

    Args:
        hash_secret: key of the block hash, 1 to 64 random bytes. An engine with slower tiers
            brings its own.
        eviction: makes an eviction policy from the number of blocks.
        events: told which blocks can be hit; None tells nothing.
        weight_of: a tenant's weight, see `TenantShares`; None without shares.
        new_hasher: makes the hasher of blocks from the secret and the tokens per block.

    Attributes:
        hash_secret, new_hasher: as given.
    """

    def __init__(
        self,
        hash_secret: bytes,
        *,
        eviction: Callable[[int], Eviction] = Lru,
        events: CacheEvents | None = None,
        weight_of: Callable[[str], float] | None = None,
        new_hasher: Callable[[bytes, int], BlockHasher] = BlockHasher,
    ) -> None:
        self.hash_secret = hash_secret
        self._new_eviction = eviction
        self._events = events
        self._weight_of = weight_of
        self.new_hasher = new_hasher

    def open(
        self, limits: Limits, tiers: Tiers | None = None, stats: SchedulerStats | None = None
    ) -> BlockTables:
        """Make the block tables of the next engine, with all blocks empty.

        Args:
            tiers: slower tiers of that engine; None without tiers.
            stats: counts evictions.
        """
        if self._events is not None:
            self._events.cleared()
        eviction = self._new_eviction(limits.num_blocks)
        kv = KVCache(limits.num_blocks, eviction, stats, self._events, tiers, self._weight_of)
        secret = self.hash_secret if tiers is None else tiers.hash_secret
        return BlockTables(limits, kv, self.new_hasher(secret, limits.block_size), self._events)
