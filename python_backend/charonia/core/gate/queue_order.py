"""Which of the requests that wait is the last one, and gives way where the queue is full.

Owns their order as the scheduling policy will serve them: the rank of each, and with fair shares
what each tenant has waiting for its weight. Must not know when a queue is full.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from charonia.control.policies import RankOf, by_arrival


@dataclass(slots=True, eq=False)
class Entry:
    """A request that was let in, or is about to be.

    Attributes:
        num_tokens: of its prompt. entered_at: when it was let in, arrived_at: when it came.
        number: how many came before it.
        priority, expires_at: as `control.Request` has them.
        is_waiting: whether it waits for its first step. is_leaving: whether it is to give way
            instead; neither of both once that has begun.
    """

    key: str
    tenant: str
    num_tokens: int
    entered_at: float
    number: int
    priority: int
    arrived_at: float
    expires_at: float
    is_waiting: bool = True
    is_leaving: bool = False

    @property
    def is_demoted(self) -> bool:
        """Whether it is known that it will be late: the scheduler alone finds out."""
        return False


class QueueOrder:
    """Those that wait for their first step.

    A weight that changes counts from the next time that a request of its tenant comes or goes.

    Args:
        weight_of: of a tenant, where tenants have shares; None where they have none.
    """

    def __init__(self, weight_of: Callable[[str], float] | None = None) -> None:
        self._weight_of = weight_of
        self._rank: RankOf = by_arrival
        self._lines: dict[str, list[Entry]] = {}  # by tenant, if they have shares; else one
        self._shares: dict[str, float] = {}  # of each line: its length, over the weight
        self._by_share: list[tuple[float, str]] = []

    def follow(self, rank: RankOf) -> None:
        """Go on with another policy."""
        self._rank = rank
        for line in self._lines.values():
            line.sort(key=rank)

    def add(self, entry: Entry) -> None:
        """One waits from now on."""
        name = self._name(entry)
        insort(self._lines.setdefault(name, []), entry, key=self._rank)
        self._note_share(name)

    def remove(self, entry: Entry) -> None:
        """It waits no longer."""
        name = self._name(entry)
        line = self._lines[name]
        del line[bisect_left(line, self._rank(entry), key=self._rank)]
        if not line:
            del self._lines[name]
        self._note_share(name)

    def last_behind(self, newcomer: Entry) -> Entry | None:
        """Who is to give way to one that comes, if anybody is.

        With shares it is the last one of the tenant that has the most for its weight, as long as
        the newcomer's has less even with that one. Else it is the last one of all, or of the
        newcomer's tenant, if the newcomer ranks before it.
        """
        own = self._lines.get(self._name(newcomer), [])
        if self._weight_of is not None:
            greatest, tenant = self._by_share[-1] if self._by_share else (0.0, "")
            if (len(own) + 1) / self._weight_of(newcomer.tenant) < greatest:
                return self._lines[tenant][-1]
        if own and self._rank(newcomer) < self._rank(own[-1]):
            return own[-1]
        return None

    def _note_share(self, name: str) -> None:
        if self._weight_of is None:
            return
        if name in self._shares:
            del self._by_share[bisect_left(self._by_share, (self._shares.pop(name), name))]
        if name in self._lines:
            self._shares[name] = len(self._lines[name]) / self._weight_of(name)
            insort(self._by_share, (self._shares[name], name))

    def _name(self, entry: Entry) -> str:
        return "" if self._weight_of is None else entry.tenant
