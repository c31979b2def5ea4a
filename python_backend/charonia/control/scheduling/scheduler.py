"""The scheduler: a state machine that plans steps and applies their results.

Owns how requests come and go, through all epochs of the engine. Knows nothing about text, tensors,
threads or the clock: it is driven by calls, and time is an argument.

There is one rule and no phases: every request has a cursor `num_computed` that chases its known
tokens, under one token budget per step. Prefill, chunked prefill, prefix hits, decode and resuming
after a preemption are all this one rule. Drafts use the budget and blocks that a step has left, and
no new block while any request waits.

    add() ──► waiting ──admit──► running ──apply(): stop, length──► gone
                 ▲                  │  │
                 └──── preempt ─────┘  └── finish() (text stop, cancel): at its step's apply()
                       reset: all of them, in a new epoch

`LiveRequests` holds the requests and moves them along these arrows. An `Epoch` holds the rows and
blocks of one engine and the steps in flight; it chooses which requests move.
"""

from collections.abc import Iterable, Sequence

from charonia.control.cache import KVCache, KVPool, Tiers
from charonia.control.drafts.speculation import Speculation
from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.peak_memory import PeakMemory
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.policies import Deadlines, Late, Policy, by_arrival, ranked
from charonia.control.scheduling.epoch import Epoch
from charonia.control.scheduling.live_requests import LiveRequests
from charonia.control.scheduling.load_shedding import NO_SHEDDING
from charonia.control.scheduling.poison_detector import PoisonDetector
from charonia.control.scheduling.prefix_sharing import PrefixSharing
from charonia.control.scheduling.prompt_budget import PromptBudget
from charonia.control.scheduling.step_budget import StepBudget
from charonia.control.scheduling.step_size import StepSize
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request, Update
from charonia.control.state.stats import SchedulerStats
from charonia.protocol import StepPlan, StepResult


class Scheduler:
    """Continuous batching over a paged KV cache.

    Args:
        limits: capacity of the engine.
        pool: makes the block tables of each epoch. It outlives them; what the cache holds ends
            with its epoch. Must not be shared with another scheduler that is in use.
        epoch: the engine's last epoch; the first plan opens the next one.
        stats: counts to continue, those of a scheduler that this one replaces.
        speculation: makes drafts for rows that sample; None makes none.
        policy: must not be shared with another scheduler; None is first come first served.
        prompt_budget: limits the prompt tokens of a step in which rows decode; None sets no limit.
        peak_memory: admits a request only if all have room until they end; None admits it if they
            have room now.
        step_size: chooses the most rows and tokens of a step; None takes the most that `limits`
            allow.
        sharing: makes requests wait for a prefix that another one is computing; None lets each
            compute what is not cached.
        tiers: slower tiers of this engine's KV cache; None without tiers.

    Attributes:
        shedding: what steps do without under load; may be set at any time.
    """

    def __init__(
        self,
        limits: Limits,
        pool: KVPool,
        *,
        epoch: int = 0,
        stats: SchedulerStats | None = None,
        speculation: Speculation | None = None,
        policy: Policy | None = None,
        prompt_budget: PromptBudget | None = None,
        peak_memory: PeakMemory | None = None,
        step_size: StepSize | None = None,
        sharing: PrefixSharing | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self.stats = stats or SchedulerStats()
        self.shedding = NO_SHEDDING
        self._policy = policy or ranked(by_arrival)
        self._prompt_time = PromptTime()
        self._budget = StepBudget(prompt_budget, self._prompt_time, step_size, self.stats)
        self._speculation = speculation
        self._sharing = sharing
        self._peak_memory = peak_memory
        self._poison_detector = PoisonDetector()
        lengths = OutputLengths()
        if self._policy.deadlines is not None:
            self._policy.deadlines.start(lengths, self._prompt_time)
        if self._policy.service is not None:
            self._policy.service.start(lengths)
        if peak_memory is not None:
            peak_memory.start(lengths)
        self._live = LiveRequests(
            self._policy, self._poison_detector, speculation, lengths, peak_memory, self.stats
        )
        self._pool = pool
        self._late: list[Late] = []  # see take_late()
        self._epoch = self._open_epoch(epoch + 1, limits, tiers)

    # ------------------------------------------------------------------ questions

    @property
    def limits(self) -> Limits:
        """Limits of the current engine."""
        return self._epoch.limits

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._policy.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._policy.waiting)

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live.by_key)

    @property
    def kv(self) -> KVCache:
        """The engine's blocks."""
        return self._epoch.blocks.kv

    def tier_sizes(self) -> Iterable[tuple[str, int]]:
        """Names of slower tiers, and the number of blocks in each."""
        return self._epoch.transfers.sizes()

    @property
    def requests(self) -> Iterable[Request]:
        """All requests that have not ended."""
        return self._live.by_key.values()

    @property
    def may_plan_ahead(self) -> bool:
        """True if a step may be planned for rows that have tokens in flight."""
        return self._epoch.may_plan_ahead(self.shedding)

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Add a request. All but the first of a group are parked until the prompt is computed.

        Raises:
            InvalidRequestError: its prompt is empty or too long, or its key belongs to a live one.
        """
        self._live.add(request)

    def finish(self, key: str, *, is_complete: bool = False) -> Request | None:
        """End a request from outside: its text met a stop string, or its client is gone.

        Its blocks are freed at once, or at the apply() of its last step if it is in flight.

        Args:
            is_complete: whether its answer is complete, so that its length may be learned from.

        Returns:
            The request, or None if no such request is live.
        """
        request = self._live.by_key.get(key)
        if request is not None:
            self._live.end(request, is_complete=is_complete)
        return request

    def take_late(self) -> list[Late]:
        """The requests that were ended since the last call because they would miss a deadline."""
        late, self._late = self._late, []
        return late

    def take_started(self) -> list[Request]:
        """The requests that the last plan admitted for the first time."""
        return self._epoch.take_started()

    # ------------------------------------------------------------------ one step

    def plan(self, now: float) -> StepPlan | None:
        """Choose what the next step computes; None if there is nothing to do before an apply().

        At most `max_steps_in_flight` plans may be in flight: neither applied nor given up by
        `reset`.
        """
        self.kv.pass_time(now)
        if self._policy.deadlines is not None:
            self._give_up_late(self._policy.deadlines, now)
        return self._epoch.plan(now, self.shedding)

    def _give_up_late(self, deadlines: Deadlines, now: float) -> None:
        """End requests that can no longer meet their deadlines, or put them behind all others."""
        late = deadlines.take_late(now, self._epoch.num_cached)
        if deadlines.demotes:
            for one in late:
                self._live.demote(one.request)
            return
        tried = self._to_be_tried(late)
        for one in late:
            if one is tried:
                deadlines.note_waiting(one.request)
            else:
                self._live.end(one.request)
                self._late.append(one)

    def _to_be_tried(self, late: Sequence[Late]) -> Late | None:
        """The late request that runs anyway, if any: the one that lacks the least time.

        If every request were ended as late, nothing would run, and wrong estimates of answers and
        steps would never be corrected. On an idle engine it costs nothing to try one.
        """
        if self.num_running or len(late) < self.num_waiting:
            return None
        left = (one for one in late if one.left_s > 0.0)
        return min(left, key=lambda one: one.needed_s - one.left_s, default=None)

    def apply(self, result: StepResult, now: float) -> list[Update]:
        """Commit the results of the oldest step in flight, and end the requests that are complete.

        Returns:
            One update per request that committed tokens or prompt log-probabilities.
        """
        return self._epoch.apply(result, now)

    # ------------------------------------------------------------------ when the engine fails

    def reset(
        self, limits: Limits | None = None, *, epoch: int = 0, tiers: Tiers | None = None
    ) -> None:
        """Open a new epoch: all KV is lost, and every request is recomputed from its tokens.

        Steps in flight are given up and must not be applied.

        Args:
            limits: limits of the new engine; None keeps the current ones.
            epoch: that engine's last epoch.
            tiers: slower tiers of that engine; None if it has none, or their content is unknown.
        """
        if limits is not None:
            for request in self.requests:
                request.expected_ids.clear()  # this engine may not have such tokens
            if self._speculation is not None:
                self._speculation.note_other_engine()
        limits = limits or self.limits
        self._live.lose_all(limits)
        self._epoch = self._open_epoch(max(self._epoch.number, epoch) + 1, limits, tiers)

    def blame(self) -> Request | None:
        """Note that the engine died with the steps in flight; call before `reset`.

        Returns:
            The request that killed it, which is ended now; None if it is unknown (see
            `PoisonDetector`), or had ended before.
        """
        guilty = self._poison_detector.note_death(self.requests)
        if guilty is None or guilty.is_ended:
            return None
        self._live.end(guilty)
        return guilty

    def _open_epoch(self, number: int, limits: Limits, tiers: Tiers | None) -> Epoch:
        return Epoch(
            number,
            limits,
            self._pool.open(limits, tiers, self.stats),
            tiers,
            live=self._live,
            policy=self._policy,
            budget=self._budget,
            poison_detector=self._poison_detector,
            speculation=self._speculation,
            prompt_time=self._prompt_time,
            sharing=self._sharing,
            peak_memory=self._peak_memory,
            stats=self.stats,
        )
