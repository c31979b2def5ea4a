"""Fair shares: each tenant gets service in proportion to its weight, whatever the others ask for.

Owns the tenants' counters, and both orders by them. Knows nothing about the order within a tenant,
which is a rank of its requests.

This is the Virtual Token Counter of Sheng et al. 2024 ("Fairness in Serving Large Language Models",
arXiv 2401.00588, algorithm 2, with weights)::

    counter of a tenant += (input_cost * prompt tokens + output_cost * generated tokens) / weight
    next is the first request of the tenant whose counter is the smallest
    a tenant that comes back is lifted to the smallest counter of the waiting tenants,
        so that no tenant saves up service by staying away

While two tenants both have waiting requests, their counters never differ by more than
max(input_cost * longest prompt, output_cost * tokens of the KV cache) / smaller weight, and what
they are given in that time by no more than twice that. `FairDisplacement` keeps within it.

Prompt tokens found in the prefix cache are not charged, and neither are tokens that are computed
again after a preemption or by another engine.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.lazy_heap import LazyHeap
from charonia.control.policies.policy import Deadlines, Displacement, Policy
from charonia.control.policies.ranked import Levels, RankedWaiting, RankOf
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request, Update

MAX_REMEMBERED = 4096
"""Most tenants without a request whose counters are kept."""
_FOREMOST = 4  # least served tenants whose requests are considered for displacing others
MAX_LOST = 4
"""Preemptions after which a request cannot be displaced by other tenants."""


def fair(
    rank: RankOf,
    weight_of: Callable[[str], float],
    displacement: Displacement | None = None,
    deadlines: Deadlines | None = None,
) -> Policy:
    """Fair between tenants, and by rank among the requests of each.

    Args:
        weight_of: a tenant's weight, > 0; read whenever the tenant is charged.
        displacement: displacement by rank; see `FairDisplacement`.
    """
    counters = VirtualCounters(weight_of)
    level = displacement.level if displacement else None
    running = FairRunning(counters, rank, level)
    waiting = FairWaiting(counters, rank, running.tenants, level)
    return Policy(
        waiting,
        running,
        displacement and FairDisplacement(displacement, counters, waiting, running),
        counters,
        deadlines,
    )


class VirtualCounters:
    """The weighted service that each tenant was given.

    Args:
        weight_of: see `fair`.
        input_cost, output_cost: cost of a token. Generating a token costs more than reading one; 1
            and 2 are the paper's values.

    Attributes:
        num_changes: how often counters were changed so far.
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
        self._pool_tokens = 0
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._lengths: OutputLengths

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def start(self, lengths: OutputLengths) -> None:
        """See `policy.Service`."""
        self._lengths = lengths

    def start_epoch(self, limits: Limits) -> None:
        """See `policy.Service`."""
        self._pool_tokens = limits.pool_tokens

    def note_admission(self, request: Request) -> None:
        """Charge the prompt tokens that are not cached."""
        if not request.is_probe:
            num_tokens = request.num_prompt - request.num_cached
            self._charge({request.tenant: num_tokens}, self._input_cost)

    def note_outputs(self, updates: Iterable[Update]) -> None:
        """Charge generated tokens."""
        tokens: defaultdict[str, int] = defaultdict(int)
        for update in updates:
            request = update.request
            if not request.is_probe:
                tokens[request.tenant] += len(update.token_ids)
        self._charge(tokens, self._output_cost)

    def margin(self, request: Request, num_running: int, num_left: int) -> float:
        """Return how far its tenant's counter may be above others when a request displaces others.

        Args:
            num_running: requests of all tenants that run.
            num_left: tokens that running requests of its tenant may still generate.
        """
        num_left += request.max_known - request.num_prompt
        cost = self._input_cost * request.num_prompt + self._output_cost * num_left
        beside = self._output_cost * self._pool_tokens - cost
        expected = self._output_cost * num_running * (self._lengths.mean(0) or 0.0)
        return max(0.0, min(expected, beside)) / self._weight_of(request.tenant)

    def in_order(self, tenants: Iterable[str]) -> list[str]:
        """The tenants, the smallest counter first; among equal ones by name."""
        return sorted(sorted(tenants), key=self._counters.__getitem__)

    def _charge(self, tokens: Mapping[str, int], cost: float) -> None:
        """Charge tenants for so many tokens at the cost of one."""
        counters, weight_of = self._counters, self._weight_of
        for tenant, num in tokens.items():
            counters[tenant] += cost * num / weight_of(tenant)
        self.num_changes += 1

    def lift(self, tenant: str, least: float) -> None:
        """Raise a tenant's counter to `least`, if it is below."""
        self._counters[tenant] = max(self[tenant], least)
        self.num_changes += 1

    def forget_some(self, keep: Callable[[str], bool]) -> None:
        """Forget tenants if there are too many, the least served first.

        They lose nothing, because a tenant that comes back is lifted.
        """
        if len(self._counters) <= 2 * MAX_REMEMBERED:
            return
        gone = sorted((c, tenant) for tenant, c in self._counters.items() if not keep(tenant))
        for _, tenant in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
            del self._counters[tenant]


class FairDisplacement:
    """Displacement within a tenant, and of others, while its counter is hardly above the smallest.

    A request displaces nothing while its tenant's counter exceeds the smallest of the waiting
    tenants by more than a margin, and it never preempts another tenant whose counter is lower by
    more than that. The margin is what the running requests may still add, judged by the mean length
    of answers. Requests are charged only as they generate, so counters of tenants that are served
    fairly differ by that much. Without it an urgent request would wait whenever its tenant has no
    running request. A request that was preempted `MAX_LOST` times is safe from other tenants.

    The first rule also holds for a tenant's own requests. Each urgent one is charged its prompt and
    keeps the row for longer. Without this rule a tenant could keep its rows by ever more urgent
    requests, whatever it was given before, and pass less served tenants that wait for room.

    The margin is smaller where the bound leaves less. Once a request has a row, only its prompt and
    what its tenant's running requests may still generate add to the counter. The margin is no more
    than the bound leaves beside that, and 0 if it leaves nothing.
    """

    def __init__(
        self,
        inner: Displacement,
        counters: VirtualCounters,
        waiting: "FairWaiting",
        running: "FairRunning",
    ) -> None:
        self._inner = inner
        self._counters = counters
        self._waiting = waiting
        self._running = running

    def level(self, request: Request) -> float:
        """See `policy.Displacement`."""
        return self._inner.level(request)

    def victims(self, waiting: Request, running: Iterable[Request]) -> Iterator[Request]:
        """See `policy.Displacement`."""
        tenant, counters = waiting.tenant, self._counters
        num_left = self._running.num_left(tenant)
        bound = counters[tenant] - counters.margin(waiting, len(self._running), num_left)
        if bound > self._waiting.least:
            return iter(())
        return (
            one
            for one in self._inner.victims(waiting, running)  # mostly few of the running ones
            if one.tenant == tenant
            or (counters[one.tenant] > bound and one.num_preemptions < MAX_LOST)
        )


class FairRunning:
    """Running requests, those of the least served tenant first.

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
        self._in_order: list[Request] = []
        self._in_order_at = (0, 0)  # num_changes here, and of the counters, when it was made

    def __len__(self) -> int:
        return self._num_running

    @property
    def tenants(self) -> Collection[str]:
        """A live view of the tenants with running requests."""
        return self._of.keys()

    def num_left(self, tenant: str) -> int:
        """Tokens that a tenant's requests may still generate."""
        return sum(one.max_known - len(one.token_ids) for one in self._of.get(tenant, ()))

    def add(self, request: Request) -> None:
        """Add a request that was given a row."""
        insort(self._of.setdefault(request.tenant, []), request, key=self._rank)
        self._levels.add(request)
        self._num_running += 1
        self._num_changes += 1

    def remove(self, request: Request) -> None:
        """Remove a request that gives its row back."""
        requests = self._of[request.tenant]
        del requests[bisect_left(requests, self._rank(request), key=self._rank)]
        self._levels.remove(request)
        self._num_running -= 1
        self._num_changes += 1
        if not requests:
            del self._of[request.tenant]

    def in_order(self) -> list[Request]:
        """All requests, tenant by tenant."""
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
    """Waiting requests, those of the least served tenant first.

    Counters only grow, so the heap can be updated lazily: a tenant whose counter has grown is moved
    to its place when it reaches the top.

    Args:
        running: the tenants with running requests. Their counters are kept, and their waiting
            requests may displace their own running ones.
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
        self._heap: LazyHeap[str] = LazyHeap()  # tenants in `_of`, by possibly old counters
        self._num_waiting = 0
        self._levels = Levels(level)
        self._last = ""  # the tenant that last left the queue; counts when nothing waits

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, request: Request) -> bool:
        return request.tenant in self._of and request in self._of[request.tenant]

    @property
    def least(self) -> float:
        """The smallest counter of a waiting tenant; if none waits, that of the last one."""
        place = self._least_place()
        return self._counters[self._last] if place is None else place[0]

    def push(self, request: Request, *, is_new: bool) -> None:
        """Add a request. If it is new and the first of its tenant, the counter may be lifted."""
        tenant = request.tenant
        if tenant not in self._of:
            if is_new:
                self._counters.lift(tenant, self.least)
            self._of[tenant] = RankedWaiting(self._rank)
            self._heap.add(tenant, self._counters[tenant])
            self._counters.forget_some(self._counts)
        self._of[tenant].push(request, is_new=is_new)
        self._num_waiting += 1
        self._levels.add(request)

    def remove(self, request: Request) -> None:
        """Remove a waiting request at any position."""
        tenant = request.tenant
        self._of[tenant].remove(request)
        self._num_waiting -= 1
        self._levels.remove(request)
        if not self._of[tenant]:
            del self._of[tenant]
            self._heap.discard(tenant)
            self._last = tenant

    def in_order(self) -> Iterator[Request]:
        """The requests of the least served tenant.

        Other tenants may not pass them: what these were given meanwhile would exceed the bound.
        """
        if (place := self._least_place()) is not None:
            yield from self._of[place[1]].in_order()

    def foremost(self, highest_level: float) -> Iterator[Request]:
        """The first request of each tenant with running requests, and of the least served tenants.

        Other tenants have no running requests to displace, and their turn to displace others comes.
        """
        if self._levels.lowest >= highest_level:
            return
        tenants = {tenant for tenant in self._running if tenant in self._of}
        tenants.update(self._least_served())
        for tenant in self._counters.in_order(tenants):
            yield self._of[tenant].first

    def _least_served(self) -> list[str]:
        """The waiting tenants with the smallest counters."""
        least: list[tuple[float, str]] = []
        while len(least) < _FOREMOST and (place := self._least_place()) is not None:
            least.append(place)
            self._heap.pop()
        for counter, tenant in least:
            self._heap.add(tenant, counter)
        return [tenant for _, tenant in least]

    def _counts(self, tenant: str) -> bool:
        """Return whether a tenant's counter is still needed."""
        return tenant in self._of or tenant in self._running or tenant == self._last

    def _least_place(self) -> tuple[float, str] | None:
        """The smallest counter and its tenant, after moving outdated entries to their places."""
        heap, counters = self._heap, self._counters
        while (place := heap.first()) is not None and place[0] < counters[place[1]]:
            heap.raise_first(counters[place[1]])
        return place
