"""The entries of live requests: their timeouts, and the one place where requests end.

Owns that each request is counted once, at its end. Must not know why one ends, nor what else an
entry has.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

from charonia.core.gate.attainment import Attainment, LiveEntry
from charonia.core.gate.deadlines import Deadlines

EntryT = TypeVar("EntryT", bound=LiveEntry)


class LiveEntries(Generic[EntryT]):
    """Entries of requests that have not ended."""

    def __init__(self, attainment: Attainment) -> None:
        self._attainment = attainment
        self._live: dict[int, EntryT] = {}  # by their numbers
        self._num_added = 0
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        """Number of live requests."""
        return len(self._live)

    def __iter__(self) -> Iterator[EntryT]:
        """The entries of all live requests, in order of arrival."""
        return iter(self._live.values())

    def __contains__(self, entry: EntryT) -> bool:
        """Return whether a request that was added has not ended."""
        return entry.number in self._live

    def add(self, entry: EntryT) -> None:
        """Add a request. Its timeouts count from its arrival."""
        self._num_added += 1
        entry.number = self._num_added
        self._live[entry.number] = entry
        self._deadlines.add(entry.number, entry.request, entry.arrived_at)

    def take_due(self, now: float) -> Iterator[tuple[EntryT, bool]]:
        """Entries whose timeouts are over, and whether it was the timeout until the first step.

        The caller may end requests while it iterates; those that have ended are left out.
        """
        for number, is_until_start in self._deadlines.take_due(now):
            if (entry := self._live.get(number)) is not None:
                yield entry, is_until_start

    def _end(self, entry: EntryT, reason: str, now: float) -> None:
        """Remove and count a request. Each ends here once, before its last chunk is sent.

        It may end without having been added, with a cached answer. Neither a probe nor a shared
        computation is counted.
        """
        self._live.pop(entry.number, None)
        self._deadlines.remove(entry.number)
        if not (entry.request.is_probe or entry.request.is_shared):
            self._attainment.note_end(entry, reason, now)
