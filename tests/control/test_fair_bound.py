"""How far the service of two tenants comes apart, whatever they ask for: the bound of the paper."""

from collections import deque
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from charonia.control import Policy, Request
from charonia.control.policies import (
    DeadlineWatch,
    DisplacementByDeadline,
    DisplacementByPriority,
    by_arrival,
    by_deadline,
    by_priority,
    fair,
)
from charonia.control.policies.fair import FairWaiting, VirtualCounters
from charonia.control.state.step import Step
from charonia.protocol import BlockCopy
from charonia.simulate.service import ServiceDifference
from support.long import long
from support.stepping import Bench, make_request

NUM_STEPS = 400
NUM_ROWS = 4
LONGEST_PROMPT = 30
POOL_TOKENS = 16 * 4


def policy_of(rank: str, weights: dict[str, float]) -> Policy:
    if rank == "priority":
        by_rank = by_priority()
        return fair(by_rank, weights.__getitem__, DisplacementByPriority(by_rank))
    if rank == "deadline":
        watch = DeadlineWatch(demotes=True)
        return fair(by_deadline, weights.__getitem__, DisplacementByDeadline(), watch)
    return fair(by_arrival, weights.__getitem__)


class Tenants:
    """Tenants that have three requests waiting most of the time, and some time none at all.

    Attributes:
        num_displaced: preemptions for more urgent requests, not those for lack of blocks.
        num_ahead: requests that got a row while the counter of another waiting tenant was smaller.
        demoted: keys of requests that were put behind all others.
    """

    def __init__(self, rank: str, weights: dict[str, float], overlaps: bool, seed: int) -> None:
        self.random = Random(seed)
        self.rank = rank
        self.policy = policy = policy_of(rank, weights)
        self.bench = Bench(policy, max_num_seqs=NUM_ROWS, async_scheduling=overlaps)
        self.difference = ServiceDifference(weights.__getitem__)
        self.waiting: set[tuple[str, str]] = set()  # keys and tenants
        self.steps_away = dict.fromkeys(weights, 0)
        self.in_flight: deque = deque()
        self.now = 0.0
        self.num_added = 0
        self.num_displaced = 0
        self.num_ahead = 0
        self.demoted: set[str] = set()
        self._count_displaced()
        self._watch_lead(weights.__getitem__)

    def _count_displaced(self) -> None:
        scheduler = self.bench.scheduler
        admission = scheduler._epoch._admission
        admit_urgent = admission.admit_urgent

        def admit_and_count(step: Step) -> None:
            num_before = scheduler.stats.preemptions
            admit_urgent(step)
            self.num_displaced += scheduler.stats.preemptions - num_before

        admission.admit_urgent = admit_and_count

    def _watch_lead(self, weight_of: Callable[[str], float]) -> None:
        live = self.bench.scheduler._live
        waiting, running, counters = self.policy.waiting, self.policy.running, self.policy.service
        assert isinstance(waiting, FairWaiting)
        assert isinstance(counters, VirtualCounters)
        admit = live.admit

        def admit_and_compare(request: Request, hits: list[int]) -> BlockCopy | None:
            lead = counters[request.tenant] - waiting.least
            if lead > 1e-9:
                assert self.policy.displacement is not None
                own = [one for one in running.in_order() if one.tenant == request.tenant]
                num_left = sum(one.max_known - len(one.token_ids) for one in own)
                num_left += request.max_known - request.num_prompt
                beside = 2 * POOL_TOKENS - request.num_prompt - 2 * num_left
                assert lead <= beside / weight_of(request.tenant)
                self.num_ahead += 1
            return admit(request, hits)

        live.admit = admit_and_compare

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            self.come_and_go()
            self.step()

    def come_and_go(self) -> None:
        for tenant, steps_away in self.steps_away.items():
            if not steps_away and self.random.random() < 0.01:
                steps_away = self.random.randint(5, 60)
            self.steps_away[tenant] = max(0, steps_away - 1)
            if not steps_away:
                num_waiting = sum(one == tenant for _, one in self.waiting)
                for _ in range(3 - num_waiting):
                    self.add(tenant)

    def add(self, tenant: str) -> None:
        random, number = self.random, self.num_added
        self.num_added += 1
        changes = {
            "token_ids": [number % 60] * random.randint(1, LONGEST_PROMPT),
            "max_tokens": random.randint(1, 20),
            "arrived_at": self.now,
            "tenant": tenant,
            "number": number,
        }
        if self.rank == "priority":
            changes["priority"] = random.choice((0, 0, -1, -2))
        if self.rank == "deadline" and random.random() < 0.6:
            changes["expires_at"] = self.now + random.uniform(1, 400)
        self.bench.add(make_request(f"{tenant}{number}", **changes))

    def step(self) -> None:
        scheduler, difference = self.bench.scheduler, self.difference
        while len(self.in_flight) < scheduler.limits.max_steps_in_flight:
            plan = scheduler.plan(self.now)
            if plan is None:
                break
            self.in_flight.append(self.bench.engine.submit(plan))
            for one in scheduler.take_started():
                difference.note_input(one.tenant, one.num_prompt - one.num_cached)
        self.look()
        if self.in_flight:
            for update in scheduler.apply(self.in_flight.popleft().result(None), self.now):
                difference.note_output(update.request.tenant, len(update.token_ids))
        self.look()
        self.now += 1.0

    def look(self) -> None:
        requests = self.bench.scheduler.requests
        self.demoted |= {one.key for one in requests if one.is_demoted}
        waiting = {(one.key, one.tenant) for one in requests if one.row is None}
        for _, tenant in waiting - self.waiting:
            self.difference.note_arrival(tenant)
        for _, tenant in self.waiting - waiting:
            self.difference.note_start(tenant)
        self.waiting = waiting
        self.difference.look()


def check_bound(rank: str, overlaps: bool, weights: dict[str, float], seed: int) -> Tenants:
    """2 max(longest prompt, 2 * KV tokens) / weight, whoever has had requests waiting for long."""
    tenants = Tenants(rank, weights, overlaps, seed)
    tenants.run()
    bound = tenants.difference.bound(LONGEST_PROMPT, POOL_TOKENS, min(weights.values()))
    assert 0 < tenants.difference.greatest <= bound
    assert rank != "arrival" or not (tenants.num_ahead or tenants.num_displaced)
    return tenants


ranks = pytest.mark.parametrize("rank", ["arrival", "priority", "deadline"])
overlapping = pytest.mark.parametrize("overlaps", [False, True])
EQUAL = {"a": 1.0, "b": 1.0}
some_weights = st.sampled_from([EQUAL, {"a": 1.0, "b": 2.0, "c": 4.0}])
seeds = st.integers(0, 2**32)


@ranks
@overlapping
@settings(max_examples=2)
@given(weights=some_weights, seed=seeds)
@example(weights=EQUAL, seed=5887)
@example(weights=EQUAL, seed=484468552)
def test_backlogged_tenants_stay_within_the_bound_of_the_paper(rank, overlaps, weights, seed):
    check_bound(rank, overlaps, weights, seed)


@pytest.mark.parametrize("rank", ["priority", "deadline"])
@overlapping
def test_displacement_decides_much_of_that(rank, overlaps):
    tenants = check_bound(rank, overlaps, EQUAL, seed=5887)
    assert tenants.num_ahead
    assert tenants.num_displaced


@long
@ranks
@overlapping
def test_whatever_many_tenants_ask_for_they_stay_within_that_bound(rank, overlaps):
    """One seed of six demotes, so that this is asked of all of them together."""
    num_demoted = 0

    @settings(max_examples=60)
    @given(weights=some_weights, seed=seeds)
    def check(weights: dict[str, float], seed: int) -> None:
        nonlocal num_demoted
        num_demoted += len(check_bound(rank, overlaps, weights, seed).demoted)

    check()
    assert bool(num_demoted) == (rank == "deadline")
