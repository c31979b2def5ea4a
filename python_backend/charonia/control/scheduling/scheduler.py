"""The scheduler: a state machine that plans steps and applies their results.

Owns the way of requests in and out, through all epochs of the engine. Must not know text, tensors,
threads or the time of day: it is driven by calls, and time is an argument.

One rule, no phases: every request has a cursor `num_computed` that chases its known tokens, under
one token budget per step. Prefill, chunked prefill, prefix hits, decode and resumption after a
preemption are all that one rule. Drafts take what a step leaves over of budget and blocks, and
no new block while anybody waits.

    add() ──► waiting ──admit──► running ──apply(): stop, length──► gone
                 ▲                  │  │
                 └──── preempt ─────┘  └── finish() (text stop, cancel): at its step's apply()
                       reset: all of them, in a new epoch

Its parts: `LiveRequests` has the requests, and moves them along these arrows. An `Epoch` has the
rows and blocks of one engine, and the steps in flight; it chooses who moves.
"""

from collections.abc import Callable, Iterable, Sequence

from charonia.control.cache import BlockHasher, CacheEvents, KVCache, Tiers
from charonia.control.cache.block_tables import BlockTables
from charonia.control.cache.eviction import Eviction, Lru
from charonia.control.drafts.speculation import Speculation
from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.estimators.peak_memory import PeakMemory
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.policies import Deadlines, Late, Policy, by_arrival, ranked
from charonia.control.scheduling.epoch import Epoch
from charonia.control.scheduling.live_requests import LiveRequests
from charonia.control.scheduling.load_shedding import NO_SHEDDING
from charonia.control.scheduling.prefix_sharing import PrefixSharing
from charonia.control.scheduling.prompt_budget import PromptBudget
from charonia.control.scheduling.step_budget import StepBudget
from charonia.control.scheduling.step_size import StepSize
from charonia.control.scheduling.suspects import Suspects
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request, Update
from charonia.control.state.stats import SchedulerStats
from charonia.protocol import StepPlan, StepResult


class Scheduler:
    """Continuous batching over a paged KV cache.

    Args:
        limits: capacity of the engine.
        hash_secret: key of the block hash, 1 to 64 random bytes.
        epoch: of the engine so far; the first plan opens the next one.
        stats: counts to go on from, those of a scheduler that this one replaces.
        speculation: drafts for rows that sample; None for none.
        policy: of this scheduler alone; None is first come first served.
        prompt_budget: how many tokens of prompts a step computes beside rows that decode; None is
            all that fit.
        peak_memory: requests get a row only where all have room until they end; None is where they
            have it now.
        step_size: chooses how many rows and tokens a step has; None is as many as there may be.
        eviction: of what is cached; called with the number of blocks in each epoch.
        sharing: has requests wait for a prefix that another one is computing; None has each compute
            what is not cached.
        cache_events: told of what can be hit; None where nobody listens.
        tiers: of this engine, slower than its KV cache; None where it has none. Their hash secret
            counts in place of the other one.
        cache_weight_of: of a tenant, its share of what is cached; None where nobody has one.
        new_hasher: makes the hasher of blocks, of the secret and the tokens of a block.

    Attributes:
        shedding: what steps do without; may be set at any time.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        hash_secret: bytes,
        epoch: int = 0,
        stats: SchedulerStats | None = None,
        speculation: Speculation | None = None,
        policy: Policy | None = None,
        prompt_budget: PromptBudget | None = None,
        peak_memory: PeakMemory | None = None,
        step_size: StepSize | None = None,
        eviction: Callable[[int], Eviction] = Lru,
        sharing: PrefixSharing | None = None,
        cache_events: CacheEvents | None = None,
        tiers: Tiers | None = None,
        cache_weight_of: Callable[[str], float] | None = None,
        new_hasher: Callable[[bytes, int], BlockHasher] = BlockHasher,
    ) -> None:
        self.stats = stats or SchedulerStats()
        self.shedding = NO_SHEDDING
        self._policy = policy or ranked(by_arrival)
        self._prompt_time = PromptTime()
        self._budget = StepBudget(prompt_budget, self._prompt_time, step_size, self.stats)
        self._speculation = speculation
        self._sharing = sharing
        self._peak_memory = peak_memory
        self._suspects = Suspects()
        lengths = OutputLengths()
        if self._policy.deadlines is not None:
            self._policy.deadlines.start(lengths, self._prompt_time)
        if self._policy.service is not None:
            self._policy.service.start(lengths)
        if peak_memory is not None:
            peak_memory.start(lengths)
        self._live = LiveRequests(
            self._policy, self._suspects, speculation, lengths, peak_memory, self.stats
        )
        self._hash_secret = hash_secret
        self._new_eviction = eviction
        self._cache_events = cache_events
        self._cache_weight_of = cache_weight_of
        self._new_hasher = new_hasher
        self._late: list[Late] = []  # see take_late()
        self._epoch = self._open_epoch(epoch + 1, limits, tiers)

    # ------------------------------------------------------------------ questions

    @property
    def limits(self) -> Limits:
        """What the engine that is there now can do."""
        return self._epoch.limits

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._policy.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._policy.waiting)

    @property
    def num_live(self) -> int:
        """Requests that have had no end."""
        return len(self._live.by_key)

    @property
    def kv(self) -> KVCache:
        """The engine's pool of blocks."""
        return self._epoch.blocks.kv

    def tier_sizes(self) -> Iterable[tuple[str, int]]:
        """Names of slower tiers, and how many blocks they hold."""
        return self._epoch.transfers.sizes()

    @property
    def requests(self) -> Iterable[Request]:
        """All that have had no end."""
        return self._live.by_key.values()

    @property
    def may_plan_ahead(self) -> bool:
        """Whether a step may be planned for rows of which tokens are in flight."""
        return self._epoch.may_plan_ahead(self.shedding)

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Take a request in. Those of a group that come behind its first one wait for the prompt.

        Raises:
            InvalidRequestError: its prompt is empty or too long.
        """
        self._live.add(request)

    def finish(self, key: str, *, is_complete: bool = False) -> Request | None:
        """End a request from outside: its text met a stop string, or its client is gone.

        Its blocks are free at once, or at the apply() of its last step when it is in flight.

        Args:
            is_complete: whether its answer is, which is as long as it was to be.

        Returns:
            The request, or None when no such request is live.
        """
        request = self._live.by_key.get(key)
        if request is not None:
            self._live.end(request, is_complete=is_complete)
        return request

    def take_late(self) -> list[Late]:
        """The requests that were ended since the last call because they would be late."""
        late, self._late = self._late, []
        return late

    def take_started(self) -> list[Request]:
        """The requests that the last plan began, which had none of their tokens computed before."""
        return self._epoch.take_started()

    # ------------------------------------------------------------------ one step

    def plan(self, now: float) -> StepPlan | None:
        """Choose what the next step computes; None when there is nothing to do before an apply().

        At most `max_steps_in_flight` plans may be neither applied nor given up with `reset`.
        """
        self.kv.pass_time(now)
        if self._policy.deadlines is not None:
            self._give_up_late(self._policy.deadlines, now)
        return self._epoch.plan(now, self.shedding)

    def _give_up_late(self, deadlines: Deadlines, now: float) -> None:
        """End those that cannot meet their deadlines any more, or put them behind all others."""
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
        """Who of the late ones runs all the same, the one that lacks the least time.

        Where all that there are would end nothing would run, and what is expected of answers and
        steps would stay as it is for ever, however wrong. On an idle engine it costs nobody
        anything to try one.
        """
        if self.num_running or len(late) < self.num_waiting:
            return None
        left = (one for one in late if one.left_s > 0.0)
        return min(left, key=lambda one: one.needed_s - one.left_s, default=None)

    def apply(self, result: StepResult, now: float) -> list[Update]:
        """Commit what the oldest step in flight did, and end those of its requests that ended.

        Returns:
            One update per request that committed tokens or prompt log-probabilities.
        """
        return self._epoch.apply(result, now)

    # ------------------------------------------------------------------ when the engine fails

    def reset(
        self, limits: Limits | None = None, *, epoch: int = 0, tiers: Tiers | None = None
    ) -> None:
        """Open a new epoch: all KV is lost, every request is recomputed from its tokens.

        Steps in flight are given up; there will be no apply() of them.

        Args:
            limits: of the engine that is there now; None leaves them.
            epoch: of that engine so far. tiers: of that engine; None where it has none, or where
                it is to be seen what they hold.
        """
        if limits is not None:
            for request in self.requests:
                request.expected_ids.clear()  # they may be no tokens of this engine
        limits = limits or self.limits
        self._live.lose_all(limits)
        self._epoch = self._open_epoch(max(self._epoch.number, epoch) + 1, limits, tiers)

    def blame(self) -> Request | None:
        """Note that the engine died with the steps in flight; call before `reset`.

        Returns:
            The request that it died of, which is ended, or None where that is not known (see
            `suspects`); one that was ended before is told nothing.
        """
        guilty = self._suspects.note_death(self.requests)
        if guilty is None or guilty.is_ended:
            return None
        self._live.end(guilty)
        return guilty

    def _open_epoch(self, number: int, limits: Limits, tiers: Tiers | None) -> Epoch:
        blocks = BlockTables(
            limits,
            self._hash_secret if tiers is None else tiers.hash_secret,
            self._new_eviction,
            self.stats,
            self._cache_events,
            tiers,
            self._cache_weight_of,
            self._new_hasher,
        )
        if self._cache_events is not None:
            self._cache_events.cleared()
        return Epoch(
            number,
            limits,
            blocks,
            tiers,
            live=self._live,
            policy=self._policy,
            budget=self._budget,
            suspects=self._suspects,
            speculation=self._speculation,
            prompt_time=self._prompt_time,
            sharing=self._sharing,
            peak_memory=self._peak_memory,
            stats=self.stats,
        )
