"""The cached blocks of requests that wait: looked up once, and reserved.

Owns the line of those whose blocks have not been looked up. Must not know rows, steps, or whose
turn it is.
"""

from collections import OrderedDict
from collections.abc import Iterable

from charonia.control.cache.block_tables import BlockTables
from charonia.control.cache.fetching import Fetching
from charonia.control.state.request import Request

MAX_RESERVING = 256
"""Waiting requests, those that came first, for which cached blocks are reserved."""
LOOKED_UP_AT_ONCE = 128
"""Blocks of waiting requests that a plan looks for in the cache; it ends the request begun."""
_LOOK_UP = 4
"""Blocks that could be looked for in the time that a request takes beside its own."""


class Lookups:
    """Looks for the blocks of those that wait, in the order in which they came.

    Who comes first by another order may have blocks loaded before that; these are reserved then.

    Args:
        fetching: told of those that might have blocks loaded; None where there are no slower tiers.
        waiting: that wait already.
    """

    def __init__(
        self, blocks: BlockTables, fetching: Fetching | None, waiting: Iterable[Request]
    ) -> None:
        self._blocks = blocks
        self._fetching = fetching
        self._pending: OrderedDict[Request, None] = OrderedDict.fromkeys(waiting)

    def add(self, request: Request) -> None:
        """A request has come that waits."""
        self._pending[request] = None

    def forget(self, request: Request) -> None:
        """A request waits no longer."""
        self._pending.pop(request, None)
        if self._fetching is not None:
            self._fetching.forget(request)

    def num_found(self, request: Request) -> int:
        """Blocks that a waiting request would find in the cache, or have loaded from a tier."""
        hits = self._blocks.hits(request)
        if self._fetching is None:
            return len(hits)
        return len(hits) + self._fetching.num_to_load(request, hits)

    def reserve(self, num_waiting: int) -> None:
        """Reserve what those that wait find in the cache; few look at once, as keys take time.

        Args:
            num_waiting: requests that wait in all.
        """
        num_blocks = 0
        while self._pending and num_blocks < LOOKED_UP_AT_ONCE:
            if num_waiting - len(self._pending) >= MAX_RESERVING:
                return
            request, _ = self._pending.popitem(last=False)
            num_blocks += _LOOK_UP + self._blocks.reserve(request)
            if self._fetching is not None:
                self._fetching.look_ahead(request)
