"""Blocks of KV: who holds them, what they contain, and which content is given up first.

    BlockTables (of requests)
        │
    KVCache ──┬── BlockPool      references; blocks without content
              ├── PrefixIndex    keys of prefixes, the blocks that hold them, which continues which
              ├── Eviction       which content nobody holds, and which of it goes first
              │   └── Retention    around it, once a request has asked for some to be kept
              └── Tiers          which content slower memory holds

Must not know rows, steps or policies of scheduling.
"""

from charonia.control.cache.block_keys import BlockHasher
from charonia.control.cache.cache_events import CacheEvents
from charonia.control.cache.kv_cache import KVCache
from charonia.control.cache.tiers import Tiers

__all__ = ["BlockHasher", "CacheEvents", "KVCache", "Tiers"]
