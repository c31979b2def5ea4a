"""A router's view of the cache, by its events.

Must not know how the events arrive.
"""

from collections.abc import Sequence

from charonia.control import Scheduler


class CacheView:
    """Believes all events; a `CacheEvents`.

    Attributes:
        prefixes: the tokens up to the end of each block that it believes in, by key.
        counts: events of each kind.
    """

    def __init__(self, block_size: int) -> None:
        self.prefixes: dict[bytes, list[int]] = {}
        self.counts = {"stored": 0, "removed": 0, "cleared": 0}
        self._block_size = block_size
        self._parent_of: dict[bytes, bytes | None] = {}

    def stored(self, key: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        self.counts["stored"] += 1
        assert key not in self.prefixes, "stored twice"
        assert len(token_ids) == self._block_size
        before = [] if parent is None else self.prefixes[parent]
        self.prefixes[key] = [*before, *token_ids]
        self._parent_of[key] = parent

    def removed(self, key: bytes) -> None:
        self.counts["removed"] += 1
        del self.prefixes[key], self._parent_of[key]
        assert key not in self._parent_of.values(), "removed before what continues it"

    def cleared(self) -> None:
        self.counts["cleared"] += 1
        self.prefixes.clear()
        self._parent_of.clear()

    def check(self, scheduler: Scheduler) -> None:
        """Raise AssertionError where it believes anything else than what can be hit."""
        assert self.prefixes.keys() == scheduler.kv._index._by_key.keys()
        for request in scheduler.requests:
            for index in range(request.num_published):
                end = (index + 1) * self._block_size
                assert self.prefixes[request.block_keys[index]] == request.token_ids[:end]
