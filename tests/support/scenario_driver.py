"""Plays a random scenario step by step, and checks the scheduler after every plan and every step.

Owns the parts of a scheduler that are made restless for it. Must not know what a scenario is to
show: its tokens are compared by whoever plays it.
"""

from collections import deque
from math import inf

from charonia.control import (
    AdaptiveDepth,
    FixedDepth,
    Group,
    KVPool,
    Limits,
    PeakMemory,
    PrefixSharing,
    Request,
    Scheduler,
    SchedulerStats,
    Speculation,
    StepSize,
)
from charonia.control.cache import Tiers
from charonia.control.estimators.pair_cost import AttentionTime
from charonia.control.policies.fair import VirtualCounters
from charonia.control.scheduling.fitting import MAX_PASSES
from charonia.control.scheduling.prompt_budget import NO_ATTENTION, PromptBudget
from charonia.errors import EngineDiedError, StepFailedError
from charonia.protocol import Pending, RowSampling, StepPlan
from support.cache_view import CacheView
from support.echo import EchoDrafter, EchoExecutor, echo_guess, echo_run
from support.invariants import awaits_loads, check_invariants, check_parents_outlive_children
from support.scenarios import ALL_EVICTIONS, POLICIES, RANKS, VOCAB, WEIGHTS, Arrival, Scenario


class FewPromptTokens(PromptBudget):
    """Always the same number of them."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def tokens(
        self, num_decoded: int, num_before: int = 0, attention: AttentionTime = NO_ATTENTION
    ) -> int:
        assert num_decoded > 0
        return self._num_tokens


class Patience(PrefixSharing):
    """Each wait is as long."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_steps = num_steps

    def seconds(self, num_blocks: int, num_before: int) -> float:
        assert num_blocks > 0
        return float(self._num_steps)


class Restless(StepSize):
    """Chooses other sizes after every step."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 20, adapts_rows=True, adapts_tokens=True)
        self._num_steps = 0

    def observe(
        self,
        num_decoded: int,
        num_prompt_tokens: int,
        num_rows: int,
        seconds: float,
        token_s: float,
    ) -> None:
        self._num_steps += 1
        self.max_rows = 1 + self._num_steps % self._max_rows
        self.max_tokens = 1 + self._num_steps % 5


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
            tier_sizes=scenario.tier_sizes if scenario.prefix_caching else (),
        )
        self._set_room(0)
        self.limits = Limits.of_engine(
            self.executor.info(),
            async_scheduling=scenario.async_scheduling,
            enable_prefix_caching=scenario.prefix_caching,
            enable_chunked_prefill=scenario.chunked,
        )
        self.drafter = EchoDrafter(VOCAB) if scenario.drafts == "text" else None
        self.policy = POLICIES[scenario.policy]()
        self.view = CacheView(scenario.block_size)
        self.stats = SchedulerStats()
        pool = KVPool(
            b"s" * 16,
            eviction=ALL_EVICTIONS[scenario.eviction],
            events=self.view,
            weight_of=WEIGHTS.__getitem__ if scenario.has_cache_shares else None,
        )
        self.scheduler = Scheduler(
            self.limits,
            pool,
            stats=self.stats,
            speculation=self._speculation(),
            policy=self.policy,
            prompt_budget=self._prompt_budget(),
            peak_memory=self._peak_memory(),
            step_size=self._step_size(),
            sharing=None if scenario.patience is None else Patience(scenario.patience),
            tiers=self._tiers(),
        )
        self.in_flight: deque[Pending] = deque()
        self.most_in_flight = 0
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.guilty: set[str] = set()
        self.parent_of: dict[bytes, bytes] = {}
        self.now = 0

    def _set_room(self, now: int) -> None:
        if rooms := self.scenario.rooms:
            self.executor.room = min(rooms[now % len(rooms)], self.scenario.num_blocks)

    def _tiers(self) -> Tiers | None:
        kept = self.executor.info().kept
        return None if kept is None else Tiers(kept, self.stats)

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
        assert self.scheduler.kv.num_free == self.scheduler.kv.num_usable
        if self.scenario.expects is False and "fcfs" in self.scenario.policy:
            has_all = not (self.scenario.deaths or self.scenario.rooms)
            assert self.scheduler.stats.preemptions == 0 or not has_all
        if self.drafter is not None:
            assert sorted(self.drafter.forgotten) == sorted(self.outputs)

    def _check(self) -> None:
        check_invariants(self.scheduler)
        self.view.check(self.scheduler)
        for request in self.scheduler.requests:
            keys = request.block_keys
            self.parent_of.update(zip(keys[1:], keys, strict=False))
        check_parents_outlive_children(self.scheduler, self.parent_of)

    def _arrive(self) -> None:
        for index, arrival in enumerate(self.scenario.arrivals):
            if arrival.at_step == self.now and self._fits(arrival):
                group = Group(str(index))
                for sample in range(arrival.num_samples):
                    request = self._request(f"{index}.{sample}", arrival, sample)
                    self.outputs[request.key] = []
                    request.group = group
                    self.scheduler.add(request)

    def _fits(self, arrival: Arrival) -> bool:
        return len(arrival.prompt_ids) < self.limits.max_model_len

    def _request(self, key: str, arrival: Arrival, sample: int) -> Request:
        return Request(
            key=key,
            token_ids=arrival.prompt_ids,
            num_prompt=len(arrival.prompt_ids),
            sampling=RowSampling(seed=arrival.seed + sample),
            index=sample,
            max_tokens=arrival.max_tokens,
            stop_ids=frozenset(range(8)) if arrival.stops else frozenset(),
            arrived_at=float(self.now),
            tenant=str(arrival.tenant),
            priority=arrival.priority,
            expires_at=inf if arrival.due_in is None else self.now + arrival.due_in,
            cache_scope=str(arrival.tenant).encode(),
            takes_hits=arrival.takes_hits,
            speculates=arrival.speculates,
            retention=arrival.retention,
            expected_ids=deque(self._guess(arrival) if arrival.speculates else []),
        )

    def _guess(self, arrival: Arrival) -> list[int]:
        """Guess the answer as a client does: each token is right three times out of four."""
        token_ids = arrival.prompt_ids
        for _ in range(arrival.num_guessed):
            token_ids.append(echo_guess(token_ids, arrival.seed, VOCAB))
        return token_ids[len(arrival.prompt_ids) :]

    def _step(self) -> None:
        sheddings = self.scenario.sheddings
        self.scheduler.shedding = sheddings[self.now % len(sheddings)]
        self.executor.fail_next = int(self.now in self.scenario.failures)
        self.executor.die_next = int(self.now in self.scenario.deaths)
        self._set_room(self.now)
        if self.now in self.scenario.damages:
            self.executor.lose(self.now)
        self._submit()
        self._cancel()  # while steps are in flight
        if not self.in_flight:
            assert not self.scheduler.requests, "live requests, but nothing is planned"
            return
        try:
            result = self.in_flight.popleft().result(None)
        except StepFailedError:
            self.in_flight.clear()
            # By now it may have died of the next step; that is told with the result of another one.
            self.scheduler.reset(tiers=self._tiers() if self.executor.is_alive else None)
        except EngineDiedError:
            self.in_flight.clear()
            guilty = self.scheduler.blame()
            if guilty is not None:
                self.guilty.add(guilty.key)
            self.executor.restart()
            epoch = self.executor.info().epoch
            self.scheduler.reset(self.limits, epoch=epoch, tiers=self._tiers())
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
            self._check_work(plan, waiting)
            self.in_flight.append(self.executor.submit(plan))
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def _check_order(self, admitted: list[Request]) -> None:
        """Check that no request is admitted before one that comes first, unless that does not fit.

        One that does not fit is passed so many times and no more; one that was preempted, just now
        even, is not passed at all. But with aging more urgent ones displace others from behind one
        that comes first, and one that waits for another's prefix, or for one that is loaded, is
        passed by anybody.
        """
        name = self.scenario.policy
        if self.scheduler._poison_detector.first is not None:
            return
        live = self.scheduler.requests
        waiting = [one for one in live if one.row is None and one not in one.group.parked]
        if name == "fair fcfs":
            self._check_tenants(waiting, admitted)
        if name not in RANKS:
            return
        for first in waiting:
            if first.awaits is not None and self.now < first.awaits_until:
                continue
            if awaits_loads(self.scheduler, first):
                continue
            behind = [one for one in admitted if RANKS[name](first) < RANKS[name](one)]
            if name == "aging":
                behind = [one for one in behind if one.priority >= first.priority]
            if behind:
                assert not first.num_preemptions
                assert 0 < first.num_passed <= MAX_PASSES

    def _check_tenants(self, waiting: list[Request], admitted: list[Request]) -> None:
        """Check that no request is admitted while a tenant waits that was served less before."""
        counters = self.policy.service
        assert isinstance(counters, VirtualCounters)
        least = min((counters[one.tenant] for one in waiting), default=inf)
        for tenant in {one.tenant for one in admitted}:
            charged = [
                one.num_prompt - one.num_cached
                for one in admitted
                if one.tenant == tenant and one.started_at == self.now
            ]
            longest = max(charged, default=0) / WEIGHTS[tenant]
            assert counters[tenant] - longest <= least + 1e-9

    def _check_work(self, plan: StepPlan, waited: list[Request]) -> None:
        """Check that the next request does not wait while a step has a row, token and blocks.

        A step that preempted somebody admits nobody else, and one that is planned ahead nobody who
        needs what the steps in flight may free.

        Args:
            waited: requests that waited before the step.
        """
        first = next(self.policy.waiting.in_order(), None)
        running = [one for one in self.scheduler.requests if one.row is not None]
        preempts = {one.key for one in self.scheduler.requests} - {
            one.key for one in (*running, *waited)
        }
        if first is None or preempts or self.in_flight or not self.scenario.is_plain:
            return
        num_rows = len(running) + len(self.scheduler._live.ended)
        num_tokens = sum(row.num_tokens for row in plan.rows)
        owed = sum(max(0, self._num_blocks(one) - len(one.block_ids)) for one in running)
        num_free = self.scheduler.kv.num_free - owed
        if running:
            num_free -= self.scheduler.kv.watermark
        assert (
            num_rows == self.scenario.max_num_seqs
            or num_tokens >= self.scenario.budget
            or num_free < self._num_blocks(first)
        )

    def _num_blocks(self, request: Request) -> int:
        """Blocks for what is known of a request, and for its next token."""
        return -(-(len(request.token_ids) + 1) // self.scenario.block_size)

    def _cancel(self) -> None:
        for index, arrival in enumerate(self.scenario.arrivals):
            if arrival.cancel_after is not None and self.now == (
                arrival.at_step + arrival.cancel_after
            ):
                num_samples = 1 if arrival.cancels_one else arrival.num_samples
                for key in (f"{index}.{sample}" for sample in range(num_samples)):
                    if self.scheduler.finish(key) is not None:
                        self.cancelled.add(key)

    def arrival_of(self, key: str) -> tuple[Arrival, int]:
        """Return the arrival that this is a sample of, and the sample's index."""
        index, _, sample = key.partition(".")
        return self.scenario.arrivals[int(index)], int(sample)

    def expected(self, key: str) -> list[int]:
        arrival, sample = self.arrival_of(key)
        return echo_run(
            arrival.prompt_ids,
            seed=arrival.seed + sample,
            max_tokens=arrival.max_tokens,
            vocab_size=VOCAB,
            stop_ids=frozenset(range(8)) if arrival.stops else frozenset(),
            max_model_len=self.limits.max_model_len,
        )
