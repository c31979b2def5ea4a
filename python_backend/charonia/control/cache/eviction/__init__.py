"""Eviction policies: one protocol, one file per policy.

Reservations, cache priorities and tenants' shares take precedence over any policy's order;
`KVCache`, `Retention` and `TenantShares` see to that.
"""

from collections.abc import Callable, Mapping

from charonia.control.cache.eviction.adaptive import Adaptive
from charonia.control.cache.eviction.arc import Arc
from charonia.control.cache.eviction.eviction import Eviction
from charonia.control.cache.eviction.fifo import Fifo
from charonia.control.cache.eviction.lfu import Lfu
from charonia.control.cache.eviction.lru import Lru
from charonia.control.cache.eviction.s3_fifo import S3Fifo
from charonia.control.cache.eviction.w_tinylfu import WTinyLfu

EVICTIONS: Mapping[str, Callable[[int], Eviction]] = {
    "adaptive": Adaptive,
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "w_tinylfu": WTinyLfu,
    "s3_fifo": S3Fifo,
    "arc": Arc,
}
"""Policies by name; each is made from the number of blocks, with the null block."""

__all__ = ["EVICTIONS", "Adaptive", "Arc", "Eviction", "Fifo", "Lfu", "Lru", "S3Fifo", "WTinyLfu"]
