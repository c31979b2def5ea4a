"""KV blocks: references to them, their content, and the order of eviction.

    KVPool           outlives an engine; makes the block tables of the next one, all empty
        │
    BlockTables (of requests)
        │
    KVCache ──┬── BlockPool      references; blocks without content
              ├── PrefixIndex    a tree of cached prefixes and their blocks
              ├── Eviction       which free content is evicted first
              │   └── Retention    wraps it, once a request has set a cache priority
              └── Tiers          content of slower tiers

Knows nothing about rows, steps or scheduling policies.
"""

from charonia.control.cache.block_keys import BlockHasher
from charonia.control.cache.cache_events import CacheEvents
from charonia.control.cache.kv_cache import KVCache
from charonia.control.cache.kv_pool import KVPool
from charonia.control.cache.tiers import Tiers

__all__ = ["BlockHasher", "CacheEvents", "KVCache", "KVPool", "Tiers"]
