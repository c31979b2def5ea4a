"""Fair shares: each tenant gets service in proportion to its weight, whatever the others ask for.

Owns what tenants were given, and both orders by it. Must not know in which order the requests of
one tenant come: that is a rank of theirs.

The Virtual Token Counter of Sheng et al. 2024 ("Fairness in Serving Large Language Models",
arXiv 2401.00588, algorithm 2, with weights)::

    counter of a tenant += (input_cost * prompt tokens + output_cost * generated tokens) / weight
    next is the first request of the tenant whose counter is the smallest
    a tenant that comes back is lifted to the smallest counter of those that wait,
        so that nobody saves up service by staying away

Two tenants that always have requests waiting differ, whenever one looks, by no more than
2 max(input_cost * longest prompt, output_cost * tokens of the KV cache) / smaller weight.
Prompt tokens that the prefix cache held are not charged, nor is anything that a preemption or
another engine makes be computed again.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.lazy_heap import LazyHeap
from charonia.control.policies.policy import Deadlines, Displacement, Policy
from charonia.control.policies.ranked import Levels, RankedWaiting, RankOf
from charonia.control.state.request import Request, Update

MAX_REMEMBERED = 4096
"""Tenants without a request whose counters are kept."""
_FOREMOST = 4  # tenants that have had the least, of which somebody may displace others
MAX_LOST = 4


def fair(
    rank: RankOf,
    weight_of: Callable[[str], float],
    displacement: Displacement | None = None,
    deadlines: Deadlines | None = None,
) -> Policy:
    """Fair between tenants, and by rank among the requests of each.

    Args:
        weight_of: of a tenant, > 0; asked whenever it is charged.
        displacement: by rank; see `FairDisplacement`.
    """
    counters = VirtualCounters(weight_of)
    level = displacement.level if displacement else None
    running = FairRunning(counters, rank, level)
    return Policy(
        FairWaiting(counters, rank, running.tenants, level),
        running,
        displacement and FairDisplacement(displacement, counters, running),
        counters,
        deadlines,
    )


class VirtualCounters:
    """What each tenant was given, weighted.

    Args:
        weight_of: see `fair`.
        input_cost, output_cost: of a token. Generating one takes more of an engine than reading
            one; 1 and 2 are the paper's.

    Attributes:
        num_changes: how often counters were raised so far.
    """

    def __init__(
        self,
        weight_of: Callable[[str], float] = lambda _: 1.0,
        *,
        input_cost: float = 1.0,
        output_cost: float = 2.0,
    ) -> None:
        self._weight_of = weight_of
        self._input_cost = input_cost
        self._output_cost = output_cost
        self.num_changes = 0
        self._counters: dict[str, float] = {}
        self._lengths: OutputLengths

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def start(self, lengths: OutputLengths) -> None:
        """See `policy.Service`."""
        self._lengths = lengths

    def note_admission(self, request: Request) -> None:
        """Charge the prompt tokens that are to be computed."""
        if not request.is_probe:
            num_tokens = request.num_prompt - request.num_cached
            self._charge({request.tenant: self._input_cost * num_tokens})

    def note_outputs(self, updates: Iterable[Update]) -> None:
        """Charge the tokens that were generated."""
        tokens: defaultdict[str, int] = defaultdict(int)
        for update in updates:
            request = update.request
            if not request.is_probe:
                tokens[request.tenant] += len(update.token_ids)
        self._charge({one: self._output_cost * num for one, num in tokens.items()})

    def swing(self, tenant: str, num_requests: int) -> float:
        """How far a tenant's counter goes up while so many requests of common length run."""
        num_output = self._lengths.mean(0) or 0.0
        return num_requests * self._output_cost * num_output / self._weight_of(tenant)

    def in_order(self, tenants: Iterable[str]) -> list[str]:
        """Who has had the least first."""
        counters = self._counters
        return [tenant for _, tenant in sorted((counters.get(one, 0.0), one) for one in tenants)]

    def _charge(self, costs: Mapping[str, float]) -> None:
        counters, weight_of = self._counters, self._weight_of
        for tenant, cost in costs.items():
            counters[tenant] = counters.get(tenant, 0.0) + cost / weight_of(tenant)
        self.num_changes += 1

    def lift(self, tenant: str, least: float) -> None:
        """Raise a tenant's counter to `least`, if it is below."""
        self._counters[tenant] = max(self[tenant], least)
        self.num_changes += 1

    def forget_some(self, keep: Callable[[str], bool]) -> None:
        """Forget tenants when there are too many, the least served first.

        These lose nothing: a tenant that comes back is lifted.
        """
        if len(self._counters) <= 2 * MAX_REMEMBERED:
            return
        gone = sorted((c, tenant) for tenant, c in self._counters.items() if not keep(tenant))
        for _, tenant in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
            del self._counters[tenant]


class FairDisplacement:
    """Displacement among the requests of a tenant, and of those that have had more, or hardly less.

    Requests that begin together are charged as they generate, so the counters of tenants that are
    served fairly differ by what all running ones may be charged yet, as far as it is known how long
    answers are. Who is ahead by less than that counts as having had less: else an urgent request
    would wait whenever its tenant has none of the running ones for the moment. In the long run
    nobody gets more by that: what an urgent request is given is charged, too. Who was preempted
    `MAX_LOST` times keeps its row from other tenants, however many urgent requests they have.
    """

    def __init__(
        self, inner: Displacement, counters: VirtualCounters, running: "FairRunning"
    ) -> None:
        self._inner = inner
        self._counters = counters
        self._running = running

    def level(self, request: Request) -> float:
        """See `policy.Displacement`."""
        return self._inner.level(request)

    def victims(self, waiting: Request, running: Iterable[Request]) -> Iterator[Request]:
        """See `policy.Displacement`."""
        tenant, counters = waiting.tenant, self._counters
        bound = counters[tenant] - counters.swing(tenant, len(self._running))
        return (
            one
            for one in self._inner.victims(waiting, running)  # mostly few of those that run
            if one.tenant == tenant
            or (counters[one.tenant] > bound and one.num_preemptions < MAX_LOST)
        )


class FairRunning:
    """Running requests, those of the tenant that has had the least first.

    Args:
        level: see `Levels`.
    """

    def __init__(
        self,
        counters: VirtualCounters,
        rank: RankOf,
        level: Callable[[Request], float] | None = None,
    ) -> None:
        self._counters = counters
        self._rank = rank
        self._of: dict[str, list[Request]] = {}  # by rank
        self._levels = Levels(level)
        self._num_running = 0
        self._num_changes = 0
        self._in_order: list[Request] = []  # as of so many changes here, and of the counters:
        self._in_order_at = (0, 0)

    def __len__(self) -> int:
        return self._num_running

    @property
    def tenants(self) -> Collection[str]:
        """Those that have requests that run, now and later."""
        return self._of.keys()

    def add(self, request: Request) -> None:
        """Add a request that was given a row."""
        insort(self._of.setdefault(request.tenant, []), request, key=self._rank)
        self._levels.add(request)
        self._num_running += 1
        self._num_changes += 1

    def remove(self, request: Request) -> None:
        """Take one out that gives its row back."""
        requests = self._of[request.tenant]
        del requests[bisect_left(requests, self._rank(request), key=self._rank)]
        self._levels.remove(request)
        self._num_running -= 1
        self._num_changes += 1
        if not requests:
            del self._of[request.tenant]

    def in_order(self) -> list[Request]:
        """All of them, tenant by tenant."""
        at = self._num_changes, self._counters.num_changes
        if at != self._in_order_at:
            tenants = self._counters.in_order(self._of)
            self._in_order = list(chain.from_iterable(map(self._of.__getitem__, tenants)))
            self._in_order_at = at
        return self._in_order.copy()

    @property
    def highest_level(self) -> float:
        """See `policy.RunningOrder`."""
        return self._levels.highest


class FairWaiting:
    """Waiting requests, the first one of the tenant that has had the least first.

    Counters only grow, so that a heap of them is never too late: one that has grown since is put
    back to where it belongs when it comes to the top.

    Args:
        running: the tenants that have requests that run: their counters are kept, and they have
            something that one of their own may take.
        level: see `Levels`.
    """

    def __init__(
        self,
        counters: VirtualCounters,
        rank: RankOf,
        running: Collection[str] = (),
        level: Callable[[Request], float] | None = None,
    ) -> None:
        self._counters = counters
        self._rank = rank
        self._running = running
        self._of: dict[str, RankedWaiting] = {}
        self._heap: LazyHeap[str] = LazyHeap()  # tenants in `_of`, by counters as they were
        self._num_waiting = 0
        self._levels = Levels(level)
        self._last = ""  # the tenant of the last one that waited, when nobody does

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, request: Request) -> bool:
        return request.tenant in self._of and request in self._of[request.tenant]

    def push(self, request: Request, *, is_new: bool) -> None:
        """Add a request; if it is the first of its tenant, the counter of that may be lifted."""
        tenant = request.tenant
        if tenant not in self._of:
            if is_new:
                self._counters.lift(tenant, self._least())
            self._of[tenant] = RankedWaiting(self._rank)
            self._heap.add(tenant, self._counters[tenant])
            self._counters.forget_some(self._counts)
        self._of[tenant].push(request, is_new=is_new)
        self._num_waiting += 1
        self._levels.add(request)

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it stands."""
        tenant = request.tenant
        self._of[tenant].remove(request)
        self._num_waiting -= 1
        self._levels.remove(request)
        if not self._of[tenant]:
            del self._of[tenant]
            self._heap.discard(tenant)
            self._last = tenant

    def in_order(self) -> Iterator[Request]:
        """Those of the tenant that has had the least.

        The others pass none of them: what they were given meanwhile would be beyond the bound.
        """
        if (place := self._least_place()) is not None:
            yield from self._of[place[1]].in_order()

    def foremost(self, highest_level: float) -> Iterator[Request]:
        """The first of each tenant that runs, and of some that have had the least.

        Others have nothing of their own to take, and their turn to take from others comes.
        """
        if self._levels.lowest >= highest_level:
            return
        tenants = {tenant for tenant in self._running if tenant in self._of}
        tenants.update(self._least_served())
        for tenant in self._counters.in_order(tenants):
            yield self._of[tenant].first

    def _least_served(self) -> list[str]:
        """The tenants with the smallest counters, of those that wait."""
        least: list[tuple[float, str]] = []
        while len(least) < _FOREMOST and (place := self._least_place()) is not None:
            least.append(place)
            self._heap.pop()
        for counter, tenant in least:
            self._heap.add(tenant, counter)
        return [tenant for _, tenant in least]

    def _least(self) -> float:
        """The smallest counter of those that wait; of the last one that did, if nobody does."""
        place = self._least_place()
        return self._counters[self._last] if place is None else place[0]

    def _counts(self, tenant: str) -> bool:
        """Whether the counter of a tenant is needed."""
        return tenant in self._of or tenant in self._running or tenant == self._last

    def _least_place(self) -> tuple[float, str] | None:
        """The smallest counter and its tenant, which are brought to the top of the heap."""
        heap, counters = self._heap, self._counters
        while (place := heap.first()) is not None and place[0] < counters[place[1]]:
            heap.raise_first(counters[place[1]])
        return place
