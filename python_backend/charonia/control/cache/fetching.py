"""Loads from slower tiers, for waiting requests.

Owns which request waits for blocks that are being loaded. Knows nothing about rows, or what a step
computes.

If a slower tier has more of a request's prefix than the KV cache, the request is not admitted yet.
Plans load the blocks into blocks of the pool that only the plan holds. They can be hit from the
`apply()` of the step on, and are reserved for the request::

    plan 1: loads 0-3 of a ─► apply 1: a hits 4 ─► plan 2: loads 4-5 ─► apply 2 ─► plan 3: a joins
         └─ a is skipped ─────────────────────────────┘

Blocks that could not be loaded are computed. The same holds for blocks that were loaded and evicted
again before the request began: the number of loads for a request is limited. A step that computes
loads few blocks, because its rows wait for the loads. Loads need as much room as an admission. If
there is none, the request is treated like any other and does not wait for loads.
"""

from collections import OrderedDict
from collections.abc import Collection
from itertools import islice, takewhile

from charonia.control.cache import Tiers
from charonia.control.cache.block_tables import BlockTables
from charonia.control.state.request import Request
from charonia.control.state.stats import SchedulerStats
from charonia.control.state.step import Fetch

_MIB = 2**20
LOADED_AT_ONCE, LOADED_ALONE = 8 * _MIB, 128 * _MIB
"""Bytes that a step loads if rows compute in it (milliseconds), and if nothing waits for it (some
hundredths of a second). A step may always load one block."""
_MOST_REQUESTS = 16
"""Most requests for which a step loads blocks."""
_MOST_LOADS = 2
"""Most times that a waiting request's blocks are loaded."""


class Fetching:
    """Loads blocks for waiting requests, in the order in which they were noted."""

    def __init__(self, blocks: BlockTables, tiers: Tiers, stats: SchedulerStats) -> None:
        self._blocks = blocks
        self._tiers = tiers
        self._stats = stats
        self._to_fetch: OrderedDict[Request, None] = OrderedDict()
        self._under_way: dict[Request, Fetch] = {}
        self._keys_under_way: set[bytes] = set()
        self._num_loaded: dict[Request, int] = {}  # blocks, by waiting request
        self._most_loads: dict[Request, int] = {}  # limit of these

    @property
    def under_way(self) -> Collection[Fetch]:
        """Loads of the steps in flight."""
        return self._under_way.values()

    @property
    def has_more(self) -> bool:
        """True if there may be something to load."""
        return bool(self._to_fetch)

    def look_ahead(self, request: Request) -> None:
        """Note a waiting request, if there is something to load for it."""
        if self._keys(request, self._blocks.hits(request), 1):
            self._to_fetch[request] = None

    def num_to_load(self, request: Request, hits: list[int]) -> int:
        """Blocks that could be loaded for a request.

        Args:
            hits: its hits, looked up just now.
        """
        if self._is_in_vain(request):
            return 0
        return len(self._keys(request, hits, len(request.block_keys)))

    def waits(self, request: Request, hits: list[int], num_spare: int) -> bool:
        """Return whether a request must wait for blocks that are being loaded, or will be.

        Args:
            num_spare: blocks that a step may load into.
        """
        if request in self._under_way:
            return True
        missing = self._blocks.missing_keys(request, hits, 1)
        if missing and missing[0] in self._keys_under_way:
            return True
        is_there = bool(missing) and missing[0] in self._tiers
        if num_spare <= 0 or not is_there or self._is_in_vain(request):
            self._to_fetch.pop(request, None)
            return False
        self._to_fetch[request] = None
        return True

    def forget(self, request: Request) -> None:
        """A request no longer waits."""
        self._to_fetch.pop(request, None)
        self._num_loaded.pop(request, None)
        self._most_loads.pop(request, None)

    def plan(self, most: int, num_spare: int) -> list[Fetch]:
        """Choose what a step loads.

        Args:
            most: most blocks to load. num_spare: blocks that it may load into.
        """
        fetches: list[Fetch] = []
        first = islice(self._to_fetch, _MOST_REQUESTS)
        for request in [one for one in first if one not in self._under_way]:
            room = min(most, num_spare)
            if room <= 0:
                break
            hits = self._blocks.hits(request)
            keys = self._keys(request, hits, room)
            if not keys or self._is_in_vain(request):
                del self._to_fetch[request]
                continue
            if keys[0] in self._keys_under_way:  # loaded for another request
                continue
            if request not in self._most_loads:
                num_there = len(hits) + self.num_to_load(request, hits)
                self._most_loads[request] = _MOST_LOADS * num_there
            fetch = self._fetch(request, len(hits), keys)
            if fetch.loads:
                self._under_way[request] = fetch
                num_loaded = self._num_loaded.get(request, 0) + len(fetch.loads)
                self._num_loaded[request] = num_loaded
                self._keys_under_way.update(load.key for load in fetch.loads)
                fetches.append(fetch)
            most -= len(fetch.loads)
            num_spare -= len(fetch.loads)
        return fetches

    def apply(self, fetch: Fetch, not_loaded: Collection[int]) -> None:
        """Publish the blocks that a step has loaded.

        Args:
            not_loaded: blocks whose load failed.
        """
        del self._under_way[fetch.request]
        self._keys_under_way.difference_update(load.key for load in fetch.loads)
        failed = [load for load in fetch.loads if load.block_id in not_loaded]
        self._tiers.drop(failed)
        num_loaded = fetch.loads.index(failed[0]) if failed else len(fetch.loads)
        block_ids = fetch.block_ids
        self._blocks.kv.note_draft_kv(
            [one for one, has in zip(block_ids[:num_loaded], fetch.has_draft, strict=False) if has]
        )
        self._blocks.take_loaded(fetch.request, fetch.first, block_ids, num_loaded)
        self._stats.blocks_loaded += num_loaded

    def _is_in_vain(self, request: Request) -> bool:
        """Return whether a request's loads reached their limit, because they keep being evicted."""
        return self._num_loaded.get(request, 0) >= self._most_loads.get(request, 1)

    def _keys(self, request: Request, hits: list[int], most: int) -> list[bytes]:
        """Keys of the blocks that follow a request's hits, as far as tiers hold them."""
        missing = self._blocks.missing_keys(request, hits, most)
        return list(takewhile(self._tiers.__contains__, missing))

    def _fetch(self, request: Request, first: int, keys: list[bytes]) -> Fetch:
        loads, has_draft = [], []
        for key in keys:
            # Allocating may evict a block whose save overwrites the slot to load from.
            (block_id,) = self._blocks.kv.allocate(1, request.tenant)
            if key not in self._tiers:
                self._blocks.kv.release([block_id])
                break
            load, with_draft = self._tiers.load(block_id, key)
            loads.append(load)
            has_draft.append(with_draft)
        return Fetch(request, first, loads, has_draft)
