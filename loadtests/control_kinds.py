"""Events in the steps that `control_bench.py` times: requests come, end or lose a row.

Owns the scheduler of a case, and the way to a step with such an event, and checks that it happened.
Must not know what is done with the times.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from charonia.control import KVPool, Limits, PeakMemory, Policy, Request, Scheduler
from charonia.control.policies.fair import VirtualCounters
from charonia.protocol import RowResult, RowSampling, StepPlan, StepResult

NUM_PRIORITIES = 3
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
BUDGET = 4096
URGENT = -1000
"""A priority before which no other one comes, however long it has waited."""
SOON, FAR = 1e3, 1e6
"""Seconds, of deadlines that nobody misses; those of urgent requests come first."""
_NUM_PAST = 512
"""Answers that ended before."""


@dataclass(frozen=True)
class Size:
    """Size of a case.

    Attributes:
        waiting: requests behind those that have the rows. steps: that are timed.
    """

    rows: int
    waiting: int
    tenants: int
    steps: int


@dataclass(frozen=True)
class Timed:
    """One step: seconds, and what happened in it.

    Attributes:
        change_s: for each request that ended, with the one that came for it.
        num_joins: requests that were given a row. num_preempted: that lost theirs.
    """

    change_s: float
    plan_s: float
    apply_s: float
    num_joins: int
    num_preempted: int


class Peak(PeakMemory):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(expects=True)
        self.num_asked = 0

    def fits(self, *args: Any) -> bool:
        """See `PeakMemory`."""
        self.num_asked += 1
        return super().fits(*args)


class Bench:
    """A scheduler with all its rows decoding, and requests that wait behind them.

    Those that wait have no smaller priority than those that run, and no nearer deadline. Prompts
    are of unlike lengths, so that rows need new blocks in turns: each step has as many to allocate.
    How long answers are is known.
    """

    def __init__(self, policy: Policy, kind: "Kind", size: Size, *, expected_peak: bool) -> None:
        self.size = size
        self.policy = policy
        self.drawn = random.Random(0)
        self._kind = kind
        # A step that is timed may have another one before it.
        self._num_tokens = PROMPT_TOKENS + BLOCK_SIZE + 2 * size.steps + 64
        self.blocks_per_row = -(-self._num_tokens // BLOCK_SIZE) + 1
        num_blocks = 2 + size.rows * self.blocks_per_row * 102 // 100
        max_blocks = num_blocks if kind.has_long_prompts else self.blocks_per_row
        limits = Limits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=BLOCK_SIZE * max_blocks,
            max_num_seqs=size.rows,
            max_num_batched_tokens=BUDGET,
        )
        self._peak = Peak() if expected_peak else None
        self.scheduler = Scheduler(
            limits, KVPool(b"benchmark"), policy=policy, peak_memory=self._peak
        )
        self._num_added = 0
        self._teach_lengths()
        for number in range(size.rows + size.waiting):
            priority = 0 if number < size.rows else number % NUM_PRIORITIES
            is_urgent = number < kind.num_urgent(size)
            self.scheduler.add(self.new_urgent() if is_urgent else self.new(priority))
        while self.scheduler.num_running < size.rows:
            self.plan_and_apply()
        for _ in range(8):  # the last prompts are computed, and one token each is the rest
            self.plan_and_apply()
        kind.begin(self)

    def _teach_lengths(self) -> None:
        """Have answers of all lengths end, as long as those that are timed may be."""
        for number in range(_NUM_PAST):
            request = self.new()
            self.scheduler.add(request)
            request.token_ids += [7] * (1 + number * request.max_tokens // _NUM_PAST)
            self.finish(request)

    @property
    def running(self) -> list[Request]:
        """Requests that have a row."""
        return [one for one in self.scheduler.requests if one.row is not None]

    def new(self, priority: int = 0) -> Request:
        """A request that has not come yet."""
        number, self._num_added = self._num_added, self._num_added + 1
        return Request(
            key=str(number),
            token_ids=self._prompt(PROMPT_TOKENS + number % BLOCK_SIZE),
            num_prompt=PROMPT_TOKENS + number % BLOCK_SIZE,
            sampling=RowSampling(seed=1),
            max_tokens=self._num_tokens - PROMPT_TOKENS - BLOCK_SIZE,
            stop_ids=frozenset({0}),
            arrived_at=float(number),
            tenant=str(number % self.size.tenants),
            priority=0 if self._kind.are_alike else priority,
            expires_at=FAR if self._kind.are_alike else FAR + number,
        )

    def new_urgent(self, num_prompt: int | None = None) -> Request:
        """An urgent one, of a tenant that has a row of one that is not, if there is any.

        With fair shares it is the least served one of these, so that it may displace others.

        Args:
            num_prompt: tokens; None is as many as others have.
        """
        request = self.new()
        request.priority, request.expires_at = URGENT, SOON
        if lesser := [one for one in self.running if one.priority != URGENT]:
            service = self.policy.service
            if isinstance(service, VirtualCounters):
                request.tenant = service.in_order({one.tenant for one in lesser})[0]
            else:
                request.tenant = self.drawn.choice(lesser).tenant
        if num_prompt is not None:
            request.token_ids, request.num_prompt = self._prompt(num_prompt), num_prompt
        return request

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self.drawn.randrange(50_000) for _ in range(num_tokens)]

    def finish(self, request: Request) -> None:
        """End one that has generated something."""
        self.scheduler.finish(request.key, is_complete=True)

    def step(self) -> Timed:
        """Bring about the event of the kind of case, and time its step."""
        num_asked = self._peak.num_asked if self._peak is not None else -1
        change_s = self._kind.prepare(self)
        found = self.plan_and_apply(change_s)
        assert self._kind.happened(self, found), f"not {self._kind.name}: {found}"
        assert self._peak is None or self._peak.num_asked > num_asked, "nobody asked for the peak"
        return found

    def end(self) -> None:
        """All steps were timed: a last look at whether they were what they are said to be."""
        self._kind.end(self)

    def plan_and_apply(self, change_s: float = 0.0) -> Timed:
        """One step."""
        num_preempted = self.scheduler.stats.preemptions
        started = time.perf_counter()
        plan = self.scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = self._result(plan)
        arrived = time.perf_counter()
        self.scheduler.apply(result, 0.0)
        applied = time.perf_counter()
        num_preempted = self.scheduler.stats.preemptions - num_preempted
        return Timed(change_s, planned - started, applied - arrived, len(plan.joins), num_preempted)

    def _result(self, plan: StepPlan) -> StepResult:
        """A token for each row that has computed all it knows."""
        requests = {one.row: one for one in self.policy.running.in_order()}
        rows = []
        for step in plan.rows:
            request = requests[step.row]
            is_through = request.num_computed + step.num_tokens == len(request.token_ids)
            rows.append(RowResult(step.row, [7] if is_through else []))
        num_usable = self._kind.num_usable(self)
        num_blocks = None if num_usable is None else 1 + num_usable
        return StepResult(
            epoch=plan.epoch, step_id=plan.step_id, rows=rows, seconds=0.01, num_blocks=num_blocks
        )

    def num_to_allocate(self, num_steps: int) -> int:
        """Blocks that rows which decode need in so many steps behind the one that is planned."""
        return sum(
            one.num_slots < one.num_computed + one.num_computing + num_steps
            for one in self.policy.running.in_order()
        )


class Kind:
    """A steady state: no request comes or goes.

    Attributes:
        displaces: whether it takes a policy by which requests may displace others.
        has_long_prompts: whether a prompt may fill the cache.
        are_alike: whether all requests but urgent ones have the same priority and deadline, so that
            none of these displaces another.
    """

    name = "steady"
    displaces = False
    has_long_prompts = False
    are_alike = False

    def num_urgent(self, size: Size) -> int:
        """Return the number of rows that have urgent requests."""
        return 0

    def begin(self, bench: Bench) -> None:
        """All rows decode."""

    def prepare(self, bench: Bench) -> float:
        """Do what comes before a step that is timed; `Timed.change_s` of that."""
        return 0.0

    def num_usable(self, bench: Bench) -> int | None:
        """Blocks for which the engine has memory, as the result of a step says."""
        return None

    def happened(self, bench: Bench, found: Timed) -> bool:
        """Return whether that step had the event of this kind."""
        return not found.num_joins and not found.num_preempted

    def end(self, bench: Bench) -> None:
        """All steps were timed."""


class Churn(Kind):
    """One request ends and another one comes."""

    name = "churn"

    def num_changes(self, size: Size) -> int:
        """Requests that end."""
        return 1

    def prepare(self, bench: Bench) -> float:
        """See `Kind`."""
        num_changes = self.num_changes(bench.size)
        gone = bench.drawn.sample(bench.running, num_changes)
        come = [bench.new(bench.drawn.randrange(NUM_PRIORITIES)) for _ in gone]
        started = time.perf_counter()
        for request in gone:
            bench.finish(request)
        for request in come:
            bench.scheduler.add(request)
        return (time.perf_counter() - started) / num_changes

    def happened(self, bench: Bench, found: Timed) -> bool:
        """See `Kind`. A step in which somebody is displaced leaves the other rows to the next."""
        return found.num_joins > 0


class Admission(Churn):
    """One request of 32 ends, and as many come."""

    name = "admission"

    def num_changes(self, size: Size) -> int:
        """See `Churn`."""
        return -(-size.rows // 32)


class Preemption(Kind):
    """A lack of one block that the rows need, so that a row loses its own."""

    name = "preemption"
    are_alike = True

    def __init__(self) -> None:
        self._has_begun = False
        self._is_to_lack = False

    def begin(self, bench: Bench) -> None:
        """See `Kind`."""
        self._has_begun = True

    def num_usable(self, bench: Bench) -> int | None:
        """See `Kind`."""
        if not self._has_begun:
            return None
        num_used, num_needed = bench.scheduler.kv.num_used, bench.num_to_allocate(1)
        if not self._is_to_lack:
            num_later = bench.num_to_allocate(2) + bench.scheduler.kv.watermark
            return num_used + num_later + bench.blocks_per_row
        self._is_to_lack = not num_needed
        return num_used + num_needed - 1 if num_needed else None

    def prepare(self, bench: Bench) -> float:
        """See `Kind`. First who lost its blocks, or another one, has the row again."""
        self._is_to_lack = True
        while self._is_to_lack:
            bench.plan_and_apply()
        return 0.0

    def happened(self, bench: Bench, found: Timed) -> bool:
        """See `Kind`."""
        return found.num_preempted > 0 and not found.num_joins


class Displacement(Kind):
    """An urgent request comes, and takes the row of another one; it ends with its first token."""

    name = "displacement"
    displaces = True
    are_alike = True

    def __init__(self) -> None:
        self._urgent: Request | None = None

    def prepare(self, bench: Bench) -> float:
        """See `Kind`. First who was displaced has its row again."""
        if self._urgent is not None:
            bench.finish(self._urgent)
            bench.plan_and_apply()
        self._urgent = bench.new_urgent()
        bench.scheduler.add(self._urgent)
        return 0.0

    def happened(self, bench: Bench, found: Timed) -> bool:
        """See `Kind`."""
        assert self._urgent is not None
        return found.num_preempted > 0 and self._urgent.row is not None


class Unplaceable(Kind):
    """An urgent request waits that needs more blocks than it may take.

    An eighth of the rows have requests that are as urgent. What the others hold and what is free
    is too little by a block. At the end the urgent ones give their rows back, and it is placed.
    """

    name = "unplaceable"
    displaces = True
    are_alike = True
    has_long_prompts = True

    def __init__(self) -> None:
        self._urgent: Request | None = None
        self._others: list[Request] = []

    def num_urgent(self, size: Size) -> int:
        """See `Kind`."""
        return -(-size.rows // 8)

    def begin(self, bench: Bench) -> None:
        """See `Kind`."""
        self._others = [one for one in bench.running if one.priority == URGENT]
        num_held = sum(len(one.block_ids) for one in self._others)
        num_prompt = (bench.scheduler.kv.num_usable - num_held + 1) * BLOCK_SIZE
        self._urgent = bench.new_urgent(num_prompt)
        bench.scheduler.add(self._urgent)
        bench.plan_and_apply()  # which looks for its prefix once

    def end(self, bench: Bench) -> None:
        """See `Kind`."""
        assert self._urgent is not None
        for request in self._others:
            bench.finish(request)
        found = bench.plan_and_apply()
        assert found.num_preempted > 0, f"nothing to displace: {found}"
        assert self._urgent.row is not None, f"not placed: {found}"


KINDS: Mapping[str, type[Kind]] = {
    kind.name: kind for kind in (Kind, Churn, Admission, Preemption, Displacement, Unplaceable)
}
