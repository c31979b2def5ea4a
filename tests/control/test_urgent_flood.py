"""Urgent requests of one tenant beside a flood from all: how soon they run, and what others get."""

from collections import Counter, deque
from random import Random

import pytest

from charonia.control import Request
from charonia.control.policies import DisplacementByPriority, by_priority, fair
from support.stepping import Bench, make_request

WEIGHTS = {"light": 1.0, "middle": 2.0, "heavy": 4.0}
ROWS, NUM_TOKENS = 16, 48
"""The share of the last one is 9 rows."""
FIRST, LAST = 100, 700
"""Steps between which urgent requests come. All the while each tenant has others waiting."""


class Flood:
    """More than rows can do, and urgent requests of one tenant.

    Attributes:
        urgent: those that came.
        num_passing: of each urgent one, plans that were made while it waited.
        num_ordinary: requests of its tenant without urgency that began while an urgent one waited.
        tokens: that each tenant was given since the first urgent one came.
    """

    def __init__(self, overlaps: bool) -> None:
        rank = by_priority()
        policy = fair(rank, WEIGHTS.__getitem__, DisplacementByPriority(rank))
        self.bench = Bench(
            policy,
            num_blocks=1024,
            max_num_seqs=ROWS,
            max_model_len=128,
            max_num_batched_tokens=2048,
            async_scheduling=overlaps,
        )
        self.random = Random(0)
        self.in_flight: deque = deque()
        self.urgent: list[Request] = []
        self.num_passing: Counter[Request] = Counter()
        self.num_ordinary = 0
        self.tokens: Counter[str] = Counter()
        self.num_steps = 0
        tenants = [tenant for tenant in WEIGHTS for _ in range(200)]
        self.random.shuffle(tenants)
        for tenant in tenants:
            self.bench.add(self.request(tenant, 0))

    def request(self, tenant: str, priority: int) -> Request:
        ids = [self.random.randrange(250) for _ in range(20)]
        name = f"{tenant}{self.random.random()}"
        values = {"tenant": tenant, "token_ids": ids, "max_tokens": NUM_TOKENS}
        return make_request(name, priority, **values)

    def add_urgent(self) -> None:
        self.urgent.append(self.request("heavy", -1))
        self.bench.add(self.urgent[-1])

    @property
    def num_started(self) -> int:
        return sum(one.started_at is not None for one in self.urgent)

    def run(self, rows: float) -> None:
        """Have so many urgent ones run at once, in the mean."""
        next_at = max(FIRST, self.num_steps)
        while self.num_steps < LAST:
            if self.num_steps >= next_at:
                self.add_urgent()
                next_at += self.random.uniform(0.4, 1.6) * NUM_TOKENS / rows
            self.step()

    def step(self) -> None:
        """As many plans as there may be in flight, and one result."""
        scheduler = self.bench.scheduler
        while len(self.in_flight) < scheduler.limits.max_steps_in_flight:
            plan = scheduler.plan(0.0)
            if plan is None:
                break
            self.num_steps += 1
            waiting = [one for one in self.urgent if one.started_at is None]
            self.num_passing.update(waiting)
            started = scheduler.take_started()
            self.num_ordinary += sum(
                bool(waiting) and one.tenant == "heavy" and not one.priority for one in started
            )
            self.in_flight.append(self.bench.engine.submit(plan))
        for update in scheduler.apply(self.in_flight.popleft().result(None), 0.0):
            if self.urgent:
                self.tokens[update.request.tenant] += len(update.token_ids)

    def check_shares(self, num_off: int = 0) -> None:
        """Whether tokens are by weight, but for a tenth of a tenant's own, or so many tokens."""
        total = sum(self.tokens.values())
        for tenant, weight in WEIGHTS.items():
            share = total * weight / sum(WEIGHTS.values())
            assert self.tokens[tenant] == pytest.approx(share, rel=0.1, abs=num_off)


overlapping = pytest.mark.parametrize("overlaps", [False, True])


@overlapping
@pytest.mark.parametrize("rows", [2.0, 5.0, 8.0])
def test_urgent_requests_within_the_share_of_their_tenant_are_in_the_next_plan(rows, overlaps):
    flood = Flood(overlaps)
    flood.run(rows)
    assert len(flood.urgent) > 20
    assert len(flood.num_passing) <= 0.01 * len(flood.urgent)
    flood.check_shares()


@overlapping
def test_more_of_them_wait_and_those_that_come_when_others_have_caught_up_do_not(overlaps):
    flood = Flood(overlaps)
    while flood.num_steps < FIRST:
        flood.step()
    for _ in range(5 * ROWS):
        flood.add_urgent()
    while flood.num_started < 5 * ROWS:
        flood.step()
    assert flood.num_ordinary == 0
    flood.check_shares(num_off=ROWS * NUM_TOKENS)  # rows that end together go to one tenant
    assert len(flood.num_passing) > 2 * ROWS
    flood.num_passing.clear()
    for _ in range(NUM_TOKENS):
        flood.step()
    flood.run(5.0)
    assert len(flood.urgent) > 5 * ROWS + 10
    assert not flood.num_passing
    flood.check_shares()
