"""The order of the waiting requests, and which one gives way if the queue is full.

Owns the order in which the scheduling policy will serve them: the rank of each, and with fair
shares the number of requests of each tenant for its weight. Must not know when a queue is full.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from charonia.control.policies import RankOf, by_arrival
from charonia.core.gate.tenants import Tenants


@dataclass(slots=True, eq=False)
class Entry:
    """An admitted request, or one that is about to be.

    Attributes:
        num_tokens: of its prompt. entered_at: when it was admitted. arrived_at: its arrival.
        number: how many entered before it.
        priority, expires_at: as in `control.Request`.
        is_waiting: whether it waits for its first step. is_leaving: whether it is to give way. Both
            are False once its first step has begun.
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
        """Always False: only the scheduler knows which requests will be late."""
        return False


class QueueOrder:
    """Those that wait for their first step.

    A changed weight counts from the next arrival or start of a request of its tenant.

    Args:
        tenants: have the weights of fair shares; None without fair shares.
    """

    def __init__(self, tenants: Tenants | None) -> None:
        self._tenants = tenants
        self._rank: RankOf = by_arrival
        self._lines: dict[str, list[Entry]] = {}  # by tenant, with fair shares; else one
        self._shares: dict[str, float] = {}  # of each line: length / weight
        self._by_share: list[tuple[float, str]] = []

    def follow(self, rank: RankOf) -> None:
        """Change to another policy."""
        self._rank = rank
        for line in self._lines.values():
            line.sort(key=rank)

    def add(self, entry: Entry) -> None:
        """Add a waiting request."""
        name = self._name(entry)
        insort(self._lines.setdefault(name, []), entry, key=self._rank)
        self._note_share(name)

    def remove(self, entry: Entry) -> None:
        """Remove a request."""
        name = self._name(entry)
        line = self._lines[name]
        del line[bisect_left(line, self._rank(entry), key=self._rank)]
        if not line:
            del self._lines[name]
        self._note_share(name)

    def last_behind(self, newcomer: Entry) -> Entry | None:
        """The request that gives way to a new one, or None.

        With fair shares it is the last request of the tenant that has the most for its weight, if
        the newcomer's tenant has less even with the newcomer. Else it is the last one of all, or
        with fair shares of the newcomer's tenant, if the newcomer ranks before it.
        """
        own = self._lines.get(self._name(newcomer), [])
        if self._tenants is not None:
            greatest, tenant = self._by_share[-1] if self._by_share else (0.0, "")
            if (len(own) + 1) / self._tenants.weight_of(newcomer.tenant) < greatest:
                return self._lines[tenant][-1]
        if own and self._rank(newcomer) < self._rank(own[-1]):
            return own[-1]
        return None

    def _note_share(self, name: str) -> None:
        if self._tenants is None:
            return
        if name in self._shares:
            del self._by_share[bisect_left(self._by_share, (self._shares.pop(name), name))]
        if name in self._lines:
            self._shares[name] = len(self._lines[name]) / self._tenants.weight_of(name)
            insort(self._by_share, (self._shares[name], name))

    def _name(self, entry: Entry) -> str:
        return "" if self._tenants is None else entry.tenant
