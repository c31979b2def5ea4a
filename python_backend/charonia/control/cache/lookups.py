"""The cached blocks of waiting requests: looked up once, and reserved.

Owns the queue of requests whose blocks have not been looked up. Knows nothing about rows, steps, or
the order of admission.
"""

from collections import OrderedDict
from collections.abc import Iterable

from charonia.control.cache.block_tables import BlockTables
from charonia.control.cache.fetching import Fetching
from charonia.control.state.request import Request

MAX_RESERVING = 256
"""Most waiting requests whose cached blocks are reserved; the first to arrive."""
LOOKED_UP_AT_ONCE = 128
"""Blocks that a plan looks up for waiting requests; it completes the last request."""
_LOOK_UP = 4
"""Fixed cost of a request's lookup, in blocks."""


class Lookups:
    """Looks up the blocks of waiting requests, in the order of arrival.

    If the policy's order differs, blocks may be loaded for a request before its lookup; they are
    reserved then.

    Args:
        fetching: told about requests that may need loads; None without tiers.
        waiting: requests that wait already.
    """

    def __init__(
        self, blocks: BlockTables, fetching: Fetching | None, waiting: Iterable[Request]
    ) -> None:
        self._blocks = blocks
        self._fetching = fetching
        self._pending: OrderedDict[Request, None] = OrderedDict.fromkeys(waiting)

    def add(self, request: Request) -> None:
        """A new request waits."""
        self._pending[request] = None

    def forget(self, request: Request) -> None:
        """A request no longer waits."""
        self._pending.pop(request, None)
        if self._fetching is not None:
            self._fetching.forget(request)

    def num_found(self, request: Request) -> int:
        """Blocks that a waiting request would find in the cache or load from a tier."""
        hits = self._blocks.hits(request)
        if self._fetching is None:
            return len(hits)
        return len(hits) + self._fetching.num_to_load(request, hits)

    def reserve(self, num_waiting: int) -> None:
        """Reserve cached blocks for some waiting requests; few at a time, because keys take time.

        Args:
            num_waiting: number of all waiting requests.
        """
        num_blocks = 0
        while self._pending and num_blocks < LOOKED_UP_AT_ONCE:
            if num_waiting - len(self._pending) >= MAX_RESERVING:
                return
            request, _ = self._pending.popitem(last=False)
            num_blocks += _LOOK_UP + self._blocks.reserve(request)
            if self._fetching is not None:
                self._fetching.look_ahead(request)
