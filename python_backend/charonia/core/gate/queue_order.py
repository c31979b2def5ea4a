"""The order of the waiting requests, and which one gives way if the queue is full.

Owns the order in which the scheduling policy will serve them: the rank of each, and the number of
requests of each tenant, with fair shares for its weight. Must not know when a queue is full.
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
        is_counted: whether it counts for the limits, as all do but probes, until their ends.
        is_waiting: whether it waits for its first step. is_leaving: whether it is to give way. Both
            are False once its first step has begun.
    """

    key: str
    tenant: str
    num_tokens: int
    entered_at: float
    priority: int
    arrived_at: float
    expires_at: float
    number: int = 0
    is_counted: bool = False
    is_waiting: bool = False
    is_leaving: bool = False

    @property
    def is_demoted(self) -> bool:
        """Always False: only the scheduler knows which requests will be late."""
        return False


class QueueOrder:
    """Requests that wait for their first step, in order.

    A changed weight counts from the next arrival or start of a request of its tenant.

    Args:
        tenants: have the weights of fair shares; None without fair shares. Then all tenants weigh
            the same.
    """

    def __init__(self, tenants: Tenants | None) -> None:
        self._tenants = tenants
        self._rank: RankOf = by_arrival
        self._all: list[Entry] = []  # of all tenants; empty with fair shares
        self._lines: dict[str, list[Entry]] = {}  # by tenant
        self._shares: dict[str, float] = {}  # of each line: length / weight
        self._by_share: list[tuple[float, str]] = []

    def follow(self, rank: RankOf) -> None:
        """Change to another policy."""
        self._rank = rank
        for line in (self._all, *self._lines.values()):
            line.sort(key=rank)

    def add(self, entry: Entry) -> None:
        """Add a waiting request."""
        insort(self._lines.setdefault(entry.tenant, []), entry, key=self._rank)
        if self._tenants is None:
            insort(self._all, entry, key=self._rank)
        self._note_share(entry.tenant)

    def remove(self, entry: Entry) -> None:
        """Remove a request."""
        line = self._lines[entry.tenant]
        self._delete(line, entry)
        if not line:
            del self._lines[entry.tenant]
        if self._tenants is None:
            self._delete(self._all, entry)
        self._note_share(entry.tenant)

    def last_behind(self, newcomer: Entry) -> Entry | None:
        """The request that gives way to a new one, or None.

        It is the last request of the tenant that has the most for its weight, if the newcomer's
        tenant has less even with the newcomer. Else it is the last one of all, or with fair shares
        of the newcomer's tenant, if the newcomer ranks before it.
        """
        own = self._lines.get(newcomer.tenant, [])
        greatest, tenant = self._by_share[-1] if self._by_share else (0.0, "")
        if (len(own) + 1) / self._weight_of(newcomer.tenant) < greatest:
            return self._lines[tenant][-1]
        line = self._all if self._tenants is None else own
        if line and self._rank(newcomer) < self._rank(line[-1]):
            return line[-1]
        return None

    def _note_share(self, tenant: str) -> None:
        if tenant in self._shares:
            del self._by_share[bisect_left(self._by_share, (self._shares.pop(tenant), tenant))]
        if tenant in self._lines:
            self._shares[tenant] = len(self._lines[tenant]) / self._weight_of(tenant)
            insort(self._by_share, (self._shares[tenant], tenant))

    def _weight_of(self, tenant: str) -> float:
        return 1.0 if self._tenants is None else self._tenants.weight_of(tenant)

    def _delete(self, line: list[Entry], entry: Entry) -> None:
        del line[bisect_left(line, self._rank(entry), key=self._rank)]
