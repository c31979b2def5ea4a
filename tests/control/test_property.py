"""Random scenarios against an engine that hashes what it reads through its block tables.

Whatever is cached, chunked, preempted, cancelled or lost, and however many steps are in flight:
each request's output equals its run alone without any of that, the invariants hold after every
plan and every step, and the pool is empty at the end.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charonia.control import (
    NO_RELIEF,
    AdaptiveDepth,
    FixedDepth,
    Limits,
    PeakMemory,
    Policy,
    Relief,
    Request,
    Scheduler,
    Speculation,
    StepSize,
)
from charonia.control.fitting import MAX_PASSES
from charonia.control.policies import (
    Deadlines,
    DeadlineWatch,
    Displacement,
    DisplacementByDeadline,
    DisplacementByPriority,
    by_arrival,
    by_deadline,
    by_priority,
    fair,
    ranked,
)
from charonia.control.prompt_budget import PromptBudget
from charonia.errors import EngineDiedError, StepFailedError
from charonia.protocol import Pending, RowSampling
from support.echo import EchoDrafter, EchoExecutor, echo_guess, echo_run
from support.invariants import check_invariants, check_parents_outlive_children
from support.long import long

VOCAB = 64


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario; prompts share prefixes so that the cache is hit."""

    at_step: int
    family: int
    shared: int
    own: int
    max_tokens: int
    seed: int
    tenant: int
    stops: bool
    takes_hits: bool
    cancel_after: int | None
    speculates: bool = True
    num_guessed: int = 0
    priority: int = 0
    due_in: int | None = None

    @property
    def prompt_ids(self) -> list[int]:
        shared = [(self.family * 7 + i * 3) % VOCAB for i in range(self.shared)]
        return shared + [(self.seed + i) % VOCAB for i in range(self.own)]


@dataclass(frozen=True)
class Scenario:
    """Sizes of an engine, requests that come and go, and steps at which things break.

    Attributes:
        is_early: which steps the engine executes at once, see `EchoExecutor`.
        prompt_tokens: of prompts in a step beside rows that decode; None is all that fit.
        reliefs: what steps do without, in turns.
        expects: how long answers are taken to be, see `PeakMemory`; None is without it.
        max_rows: how far a choice of rows and tokens goes that changes all the time; None is none.
    """

    arrivals: list[Arrival]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    prefix_caching: bool
    chunked: bool
    failures: set[int] = field(default_factory=set)
    deaths: set[int] = field(default_factory=set)
    drafts: str = "none"
    max_drafts: int = 4
    adaptive: bool = False
    num_stages: int = 1
    async_scheduling: bool = False
    is_early: tuple[bool, ...] = (False,)
    policy: str = "fcfs"
    prompt_tokens: int | None = None
    reliefs: tuple[Relief, ...] = (NO_RELIEF,)
    expects: bool | None = None
    max_rows: int | None = None


class FewPromptTokens(PromptBudget):
    """Always the same number of them."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def tokens(self, num_decodes: int) -> int:
        assert num_decodes > 0
        return self._num_tokens


class Restless(StepSize):
    """Chooses other sizes after every step."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 20, adapts_rows=True, adapts_tokens=True)
        self._num_steps = 0

    def observe(
        self, num_decodes: int, num_prompt_tokens: int, num_rows: int, seconds: float
    ) -> None:
        self._num_steps += 1
        self.max_rows = 1 + self._num_steps % self._max_rows
        self.max_tokens = 1 + self._num_steps % 5


RANKS = {
    "fcfs": by_arrival,
    "priority": by_priority(),
    "aging": by_priority(5.0),
    "deadline": by_deadline,
    "deadline, demoting": by_deadline,
}
WEIGHTS = {"0": 1.0, "1": 2.0}


def _no_watch() -> None:
    """Nobody looks whether deadlines can be met."""


def _policies() -> dict[str, Callable[[], Policy]]:
    """Every order, alone and within fair shares."""
    found: dict[str, Callable[[], Policy]] = {}
    for name, rank in RANKS.items():
        displacement: Displacement | None = None
        watch: Callable[[], Deadlines | None] = _no_watch
        if name.startswith("deadline"):
            displacement = DisplacementByDeadline()
            watch = partial(DeadlineWatch, 32, demotes=name.endswith("demoting"))
        elif name != "fcfs":
            displacement = DisplacementByPriority(rank)

        def alone(rank=rank, displacement=displacement, watch=watch) -> Policy:
            return ranked(rank, displacement, watch())

        def shared(rank=rank, displacement=displacement, watch=watch) -> Policy:
            return fair(rank, WEIGHTS.__getitem__, displacement, watch())

        found |= {name: alone, f"fair {name}": shared}
    return found


POLICIES = _policies()
arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 30),
    family=st.integers(0, 2),
    shared=st.integers(0, 24),
    own=st.integers(1, 12),
    max_tokens=st.integers(1, 16),
    seed=st.integers(0, 3),
    tenant=st.integers(0, 1),
    stops=st.booleans(),
    takes_hits=st.sampled_from([True, True, True, False]),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    speculates=st.sampled_from([True, True, False]),
    num_guessed=st.sampled_from([0, 0, 3, 20]),
    priority=st.integers(-1, 2),
    due_in=st.sampled_from([None, 5, 20, 100]),
)
scenarios = st.builds(
    Scenario,
    arrivals=st.lists(arrivals, min_size=1, max_size=10),
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 3, 8, 32, 1000]),
    prefix_caching=st.sampled_from([True, True, False]),
    chunked=st.sampled_from([True, True, False]),
    failures=st.sets(st.integers(0, 60), max_size=2),
    deaths=st.sets(st.integers(0, 60), max_size=2),
    drafts=st.sampled_from(["none", "text", "model", "model", "model of few tokens"]),
    max_drafts=st.sampled_from([1, 2, 5, 16]),
    adaptive=st.booleans(),
    num_stages=st.sampled_from([1, 1, 1, 2, 4]),
    async_scheduling=st.booleans(),
    is_early=st.lists(st.booleans(), min_size=1, max_size=5).map(tuple),
    policy=st.sampled_from(list(POLICIES)),
    prompt_tokens=st.sampled_from([None, None, 1, 4]),
    reliefs=st.lists(
        st.sampled_from([NO_RELIEF, Relief(speculates=False), Relief(prompt_share=0.25)]),
        min_size=1,
        max_size=4,
    ).map(tuple),
    expects=st.sampled_from([None, None, True, False]),
    max_rows=st.sampled_from([None, None, 1, 3]),
)


class Driver:
    """Plays one scenario step by step; time is the step's number."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.executor = EchoExecutor(
            num_blocks=scenario.num_blocks,
            block_size=scenario.block_size,
            max_model_len=60,
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=max(scenario.budget, 1 if scenario.chunked else 60),
            vocab_size=VOCAB,
            max_draft_len={"model": 60, "model of few tokens": 20}.get(scenario.drafts, 0),
            num_stages=scenario.num_stages,
            is_early=scenario.is_early,
        )
        self.limits = Limits.of_engine(
            self.executor.info(),
            async_scheduling=scenario.async_scheduling,
            enable_prefix_caching=scenario.prefix_caching,
            enable_chunked_prefill=scenario.chunked,
        )
        self.drafter = EchoDrafter(VOCAB) if scenario.drafts == "text" else None
        self.policy = POLICIES[scenario.policy]()
        self.scheduler = Scheduler(
            self.limits,
            hash_secret=b"s" * 16,
            speculation=self._speculation(),
            policy=self.policy,
            prompt_budget=self._prompt_budget(),
            peak_memory=self._peak_memory(),
            step_size=self._step_size(),
        )
        self.in_flight: deque[Pending] = deque()
        self.most_in_flight = 0
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.guilty: set[str] = set()
        self.parent_of: dict[bytes, bytes] = {}
        self.now = 0

    def _speculation(self) -> Speculation | None:
        if self.scenario.drafts == "none":
            return None
        adaptive = AdaptiveDepth(has_draft_model=self.drafter is None)
        return Speculation(
            max_drafts=self.scenario.max_drafts,
            policy=adaptive if self.scenario.adaptive else FixedDepth(),
            drafter=self.drafter,
        )

    def _prompt_budget(self) -> PromptBudget | None:
        num_tokens = self.scenario.prompt_tokens
        if num_tokens is None or not self.scenario.chunked:
            return None
        return FewPromptTokens(num_tokens)

    def _step_size(self) -> StepSize | None:
        max_rows = self.scenario.max_rows
        return None if max_rows is None else Restless(max_rows)

    def _peak_memory(self) -> PeakMemory | None:
        expects = self.scenario.expects
        return None if expects is None else PeakMemory(expects=expects)

    def run(self) -> None:
        last = max(arrival.at_step for arrival in self.scenario.arrivals)
        while self.now <= last or self.scheduler.requests or self.in_flight:
            self._arrive()
            self._step()
            self._check()
            self.now += 1
            assert self.now < 5000, "a request hangs"
        assert self.scheduler.kv.num_used == 0
        assert self.scheduler.kv.num_free == self.limits.num_blocks - 1
        if self.scenario.expects is False and "fcfs" in self.scenario.policy:
            assert self.scheduler.stats.preemptions == 0 or self.scenario.deaths
        if self.drafter is not None:
            assert sorted(self.drafter.forgotten) == sorted(self.outputs)

    def _check(self) -> None:
        check_invariants(self.scheduler)
        for request in self.scheduler.requests:
            keys = request.block_keys
            self.parent_of.update(zip(keys[1:], keys, strict=False))
        check_parents_outlive_children(self.scheduler, self.parent_of)

    def _arrive(self) -> None:
        for index, arrival in enumerate(self.scenario.arrivals):
            if arrival.at_step == self.now and self._fits(arrival):
                self.outputs[str(index)] = []
                self.scheduler.add(self._request(str(index), arrival))

    def _fits(self, arrival: Arrival) -> bool:
        return len(arrival.prompt_ids) < self.limits.max_model_len

    def _request(self, key: str, arrival: Arrival) -> Request:
        return Request(
            key=key,
            token_ids=arrival.prompt_ids,
            num_prompt=len(arrival.prompt_ids),
            sampling=RowSampling(seed=arrival.seed),
            max_tokens=arrival.max_tokens,
            stop_ids=frozenset(range(8)) if arrival.stops else frozenset(),
            arrived_at=float(self.now),
            tenant=str(arrival.tenant),
            priority=arrival.priority,
            expires_at=inf if arrival.due_in is None else self.now + arrival.due_in,
            cache_scope=str(arrival.tenant).encode(),
            takes_hits=arrival.takes_hits,
            speculates=arrival.speculates,
            expected_ids=deque(self._guess(arrival) if arrival.speculates else []),
        )

    def _guess(self, arrival: Arrival) -> list[int]:
        """What a client guesses: each token is right three times out of four."""
        token_ids = arrival.prompt_ids
        for _ in range(arrival.num_guessed):
            token_ids.append(echo_guess(token_ids, arrival.seed, VOCAB))
        return token_ids[len(arrival.prompt_ids) :]

    def _step(self) -> None:
        reliefs = self.scenario.reliefs
        self.scheduler.relief = reliefs[self.now % len(reliefs)]
        self.executor.fail_next = int(self.now in self.scenario.failures)
        self.executor.die_next = int(self.now in self.scenario.deaths)
        self._submit()
        self._cancel()  # while steps are in flight
        if not self.in_flight:
            assert not self.scheduler.requests, "live requests, but nothing is planned"
            return
        try:
            result = self.in_flight.popleft().result(None)
        except StepFailedError:
            self.in_flight.clear()
            self.scheduler.reset()
        except EngineDiedError:
            self.in_flight.clear()
            guilty = self.scheduler.blame()
            if guilty is not None:
                self.guilty.add(guilty.key)
            self.executor.restart()
            self.scheduler.reset(self.limits, epoch=self.executor.info().epoch)
        else:
            for update in self.scheduler.apply(result, self.now):
                self.outputs[update.request.key] += update.token_ids
                if update.finish_reason is not None:
                    self.reasons[update.request.key] = update.finish_reason

    def _submit(self) -> None:
        while len(self.in_flight) < self.limits.max_steps_in_flight:
            waiting = [one for one in self.scheduler.requests if one.row is None]
            plan = self.scheduler.plan(self.now)
            self.cancelled |= {late.request.key for late in self.scheduler.take_late()}
            self._check()
            if plan is None:
                break
            assert len(set(plan.leaves)) == len(plan.leaves)
            joined = {join.row for join in plan.joins}
            assert joined <= {one.row for one in self.scheduler.requests}, "joined and preempted"
            if not self.limits.enable_chunked_prefill:
                assert all(
                    one.num_to_compute <= 1
                    for one in self.scheduler.requests
                    if one.row is not None
                )
            self._check_order([one for one in waiting if one.row is not None])
            self.in_flight.append(self.executor.submit(plan))
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def _check_order(self, admitted: list[Request]) -> None:
        """Nobody is admitted before one that comes first, unless that does not fit.

        One that does not fit is passed so many times and no more; one that was preempted, just now
        even, is not passed at all.
        """
        name = self.scenario.policy
        if name not in RANKS or self.scheduler._suspects.first is not None:
            return
        waiting = [one for one in self.scheduler.requests if one.row is None and not one.is_ended]
        for first in waiting:
            if any(RANKS[name](first) < RANKS[name](one) for one in admitted):
                assert not first.num_preemptions
                assert 0 < first.num_passed <= MAX_PASSES

    def _cancel(self) -> None:
        for index, arrival in enumerate(self.scenario.arrivals):
            if arrival.cancel_after is not None and self.now == (
                arrival.at_step + arrival.cancel_after
            ):
                ended = self.scheduler.finish(str(index))
                if ended is not None:
                    self.cancelled.add(str(index))

    def expected(self, key: str) -> list[int]:
        arrival = self.scenario.arrivals[int(key)]
        return echo_run(
            arrival.prompt_ids,
            seed=arrival.seed,
            max_tokens=arrival.max_tokens,
            vocab_size=VOCAB,
            stop_ids=frozenset(range(8)) if arrival.stops else frozenset(),
            max_model_len=self.limits.max_model_len,
        )


patient = settings(
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow],
)


def check_tokens(scenario):
    """Run a scenario; every request gets the tokens of its run alone."""
    driver = Driver(scenario)
    driver.run()
    for key, output in driver.outputs.items():
        expected = driver.expected(key)
        if key in driver.cancelled | driver.guilty:
            assert output == expected[: len(output)]
        else:
            assert output == expected
            is_stop = output[-1] in range(8) and driver.scenario.arrivals[int(key)].stops
            assert driver.reasons[key] == ("stop" if is_stop else "length")


@settings(patient, max_examples=200)
@given(scenarios)
def test_every_request_gets_the_tokens_of_its_run_alone(scenario):
    check_tokens(scenario)


def test_no_more_urgent_prompts_join_a_step_than_it_computes_where_they_may_not_be_split():
    """Two come at once that are more urgent than two that run, and a step has one row."""
    running, urgent = Arrival(0, 0, 0, 1, 1, 0, 0, False, True, None), 5
    first = replace(running, at_step=1, due_in=urgent)
    arrivals = [running, running, first, replace(first, own=2)]
    scenario = Scenario(arrivals, 14, 2, 3, 1, True, chunked=False, num_stages=4)
    check_tokens(replace(scenario, policy="deadline"))


def test_a_prompt_that_displaces_makes_the_share_of_a_step_smaller():
    """The second of two urgent ones takes the row of the only one that ran beside them."""
    short = Arrival(0, 0, 0, 1, 1, 0, 0, False, True, None)
    arrivals = [
        *[replace(short) for _ in range(2)],
        replace(short, shared=2, own=3, max_tokens=3),
        *[replace(short) for _ in range(4)],
        replace(short, at_step=2, shared=1, own=12, due_in=5),
        replace(short, at_step=3, own=3, due_in=5),
    ]
    scenario = Scenario(arrivals, 14, 2, 5, 1, True, chunked=False, num_stages=2)
    check_tokens(replace(scenario, policy="deadline"))


@long
@settings(patient, max_examples=1200)
@given(scenarios)
def test_in_many_more_scenarios_every_request_gets_the_tokens_of_its_run_alone(scenario):
    check_tokens(scenario)


@pytest.mark.parametrize(
    ("num_stages", "async_scheduling"), [(1, False), (1, True), (2, True), (4, False)]
)
def test_the_scenarios_can_preempt_hit_and_evict(num_stages, async_scheduling):
    """The property test would prove little if its scenarios never came to these states."""
    arrival = Arrival(0, 0, 8, 2, 14, 0, 0, False, True, None)
    others = [Arrival(i, 0, 8, 2, 14, i % 4, 0, False, True, None) for i in range(1, 6)]
    num_blocks = 14 if num_stages > 1 else 11
    scenario = Scenario([arrival, *others], num_blocks, 4, 6, 32, True, True, {9}, {12})
    driver = Driver(replace(scenario, num_stages=num_stages, async_scheduling=async_scheduling))
    driver.run()
    assert driver.most_in_flight == driver.limits.max_steps_in_flight
    assert driver.scheduler.stats.preemptions > 0
    assert driver.scheduler.stats.prefix_hit_tokens > 0
    assert driver.executor.num_restarts == 1
    assert all(output == driver.expected(key) for key, output in driver.outputs.items())


@pytest.mark.parametrize(("num_stages", "async_scheduling"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("drafts", ["text", "model"])
def test_the_scenarios_can_accept_reject_and_catch_up(drafts, num_stages, async_scheduling):
    arrivals = [Arrival(i % 3, 0, 8, 2, 14, i % 4, 0, False, True, None) for i in range(6)]
    scenario = Scenario(arrivals, 16, 4, 6, 64, True, True, set(), set(), drafts)
    driver = Driver(replace(scenario, num_stages=num_stages, async_scheduling=async_scheduling))
    driver.run()
    counts = driver.scheduler.stats.drafts
    assert driver.scheduler.stats.preemptions > 0
    assert driver.scheduler.stats.prefix_hit_tokens > 0
    assert 0 < counts.num_accepted < counts.num_drafted
    assert all(output == driver.expected(key) for key, output in driver.outputs.items())
