"""One epoch of the engine: its rows, its blocks, and its steps from plan() to apply().

Owns the order in which a step's tokens, rows and blocks are assigned, and the order of the steps in
flight. Knows nothing about how requests come and go, or what follows the loss of the engine.

A step is planned in this order::

    transfers.set_aside        set aside blocks for which there is no memory any more
    admission.admit_urgent     admit urgent requests, which may displace running ones
    row_planner.plan_running   plan running requests; if blocks run out, preempt the last of them
    admission.admit_waiting    admit waiting requests, unless a request was preempted
    row_planner.add_drafts     add drafts, unless the tokens before them are in flight
    transfers.plan             load and save blocks of slower tiers, with the memory that is left

An engine with several stages has as many steps in flight, over disjoint rows. A row can be planned
again when its step is applied::

    plan 1 (a b) ─► plan 2 (c d) ─► apply 1 ─► plan 3 (a b) ─► apply 2 ─► plan 4 (c d) ─► ...

With one stage, a step may be planned while the one before it computes, for the same rows. The plan
needs only the number of tokens that step samples, which is one per row; the engine has the tokens::

    plan 1 (a b) ─► plan 2 (a b) ─► apply 1 ─► plan 3 (a b) ─► apply 2 ─► plan 4 (a b) ─► ...

So a request that ends in step 1, other than by its length, is computed in step 2 for nothing.
Whatever needs the tokens themselves, or the blocks of a request in flight, waits until no step is
in flight: drafts, preemption, displacement, and suspects.

The engine executes plans in order, so the next plan may use whatever is freed, even while other
steps are in flight.
"""

from collections import deque

from charonia.control.cache import Tiers
from charonia.control.cache.block_tables import BlockTables
from charonia.control.cache.fetching import Fetching
from charonia.control.cache.lookups import Lookups
from charonia.control.drafts.speculation import Speculation
from charonia.control.estimators.peak_memory import PeakMemory
from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.policies import Policy
from charonia.control.scheduling.admission import Admission
from charonia.control.scheduling.commit import Commit
from charonia.control.scheduling.fitting import Fitting
from charonia.control.scheduling.live_requests import LiveRequests
from charonia.control.scheduling.load_shedding import LoadShedding
from charonia.control.scheduling.poison_detector import PoisonDetector
from charonia.control.scheduling.prefix_sharing import PrefixSharing
from charonia.control.scheduling.row_planner import RowPlanner
from charonia.control.scheduling.rows import Rows
from charonia.control.scheduling.step_budget import StepBudget
from charonia.control.scheduling.transfers import Transfers
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request, Update
from charonia.control.state.stats import SchedulerStats
from charonia.control.state.step import Step
from charonia.protocol import StepPlan, StepResult

_LOOK_AT_MEMORY_S = 1.0
"""An engine that watches its memory gets an empty step after so long without one."""


class Epoch:
    """The steps of one epoch, from its first one on.

    Args:
        number: number of the epoch.
        blocks: block tables of this engine, all blocks free.
        tiers: slower tiers of this engine's KV cache; None without tiers.
        live: the live requests; none has a row. For the others see `Scheduler`.

    Attributes:
        transfers: the loads and saves of its steps.
    """

    def __init__(
        self,
        number: int,
        limits: Limits,
        blocks: BlockTables,
        tiers: Tiers | None,
        *,
        live: LiveRequests,
        policy: Policy,
        budget: StepBudget,
        poison_detector: PoisonDetector,
        speculation: Speculation | None,
        prompt_time: PromptTime,
        sharing: PrefixSharing | None,
        peak_memory: PeakMemory | None,
        stats: SchedulerStats,
    ) -> None:
        self.number = number
        self.limits = limits
        self.blocks = blocks
        self._live = live
        self._policy = policy
        self._budget = budget
        self._poison_detector = poison_detector
        self._speculation = speculation
        self._prompt_time = prompt_time
        self._stats = stats
        self._in_flight: deque[Step] = deque()  # in the order of their plans
        self._next_step_id = 0
        self._applied_at = 0.0
        self._is_short = False  # `is_short` of the step that was planned last
        self._started: list[Request] = []  # see take_started()

        fetching = None if tiers is None else Fetching(blocks, tiers, stats)
        fitting = Fitting(limits, policy, blocks, peak_memory, sharing, fetching)
        self._rows = Rows(limits.max_num_seqs)
        self._lookups = Lookups(blocks, fetching, live.unparked())
        self._row_planner = RowPlanner(limits, policy, blocks, live, budget, stats)
        self._admission = Admission(
            limits,
            policy,
            blocks,
            live,
            self._rows,
            budget,
            fitting,
            self._row_planner,
            sharing,
            stats,
        )
        self._commit = Commit(
            limits, blocks, live, poison_detector, policy.service, speculation, stats
        )
        self.transfers = Transfers(limits, blocks, fitting, tiers, fetching)
        live.start_epoch(limits, blocks, self._rows, self._lookups)
        budget.start_epoch(limits)
        prompt_time.start_epoch(limits)
        if policy.service is not None:
            policy.service.start_epoch(limits)
        if sharing is not None:
            sharing.start_epoch(limits, prompt_time, stats)

    def num_cached(self, request: Request) -> int:
        """Cached tokens of a waiting request, if nothing is evicted before it is admitted."""
        return self._lookups.num_found(request) * self.limits.block_size

    def may_plan_ahead(self, shedding: LoadShedding) -> bool:
        """Return whether a step may be planned for rows that have tokens in flight.

        Not with a suspect: it runs alone, or a crash would not prove its guilt.
        """
        if not self.limits.overlaps or not self._in_flight:
            return False
        last = self._in_flight[-1]
        if self._is_short or last.drafts or self._poison_detector.first is not None:
            return False
        if self._speculation is None or not shedding.speculates:
            return True
        return self._speculation.rests_after(last)

    def take_started(self) -> list[Request]:
        """The requests that the last plan admitted for the first time."""
        started, self._started = self._started, []
        return started

    # ------------------------------------------------------------------ plan

    def plan(self, now: float, shedding: LoadShedding) -> StepPlan | None:
        """Choose what the next step computes; None if there is nothing to do before an apply()."""
        assert len(self._in_flight) < self.limits.max_steps_in_flight, "too many steps in flight"
        is_ahead = self.limits.overlaps and bool(self._in_flight)
        if is_ahead and not self.may_plan_ahead(shedding):
            return None
        speculation = self._speculation if shedding.speculates else None
        self._lookups.reserve(len(self._policy.waiting))
        suspect = self._poison_detector.first
        if suspect is not None:
            self._isolate(suspect)
        step = self._begin(now, shedding)
        self.transfers.set_aside(step)
        self._plan_rows(step, suspect, None if is_ahead else speculation)
        self._is_short, self._started = step.is_short, step.started
        self.transfers.plan(step, is_alone=not (step.rows or self._in_flight))
        if step.is_empty and not self._is_to_look(now):
            assert not step.joins
            return None
        if step.rows:
            self._budget.note_plan(step)
            if is_ahead and speculation is not None:
                speculation.note_rest()
        self._in_flight.append(step)
        self._next_step_id += 1
        return step.as_plan(self.number, self._rows.take_leaves())

    def _isolate(self, suspect: Request) -> None:
        """Preempt all running requests except a suspect.

        None of them is in flight, because suspicion begins with a new epoch.
        """
        for request in self._policy.running.in_order():
            if request is not suspect:
                self._live.preempt(request)

    def _begin(self, now: float, shedding: LoadShedding) -> Step:
        num_running = len(self._policy.running)
        num_tokens = self._budget.num_tokens(num_running)
        for_prompts = self._budget.num_prompt_tokens(num_tokens, num_running, shedding)
        return Step(self._next_step_id, now, num_tokens, for_prompts)

    def _plan_rows(
        self, step: Step, suspect: Request | None, speculation: Speculation | None
    ) -> None:
        """Assign the tokens, rows and blocks of a step.

        Args:
            suspect: the only request that may run; None if there is no suspect.
            speculation: None if the step has no drafts.
        """
        self._stats.draft_depth = 0.0
        num_preempted = self._stats.preemptions
        if suspect is None:
            self._admission.admit_urgent(step)
        if step.joins or not step.is_short:
            self._row_planner.plan_running(step)
        if self._stats.preemptions > num_preempted or step.is_short:
            return
        self._admission.admit_waiting(step, suspect)
        if speculation is not None:
            self._row_planner.add_drafts(step, speculation.draft(step, self.limits))

    def _is_to_look(self, now: float) -> bool:
        """Return whether an empty step is due, in which the engine only looks at its memory."""
        is_idle = self.limits.watches_memory and not self._in_flight
        return is_idle and now >= self._applied_at + _LOOK_AT_MEMORY_S

    # ------------------------------------------------------------------ apply

    def apply(self, result: StepResult, now: float) -> list[Update]:
        """Commit the results of the oldest step in flight, and end the requests that are complete.

        Returns:
            One update per request that committed tokens or prompt log-probabilities.
        """
        step = self._in_flight.popleft()
        assert (result.epoch, result.step_id) == (self.number, step.step_id), "wrong result"
        self.transfers.apply(step, result)
        # The engine computes one step after another.
        began_at = max(step.planned_at, self._applied_at)
        if step.rows:
            self._learn_from(step, result, now - began_at)
        self._applied_at = now
        return self._commit.commit(step, result, began_at, now)

    def _learn_from(self, step: Step, result: StepResult, seconds: float) -> None:
        """Learn from the time of a step with rows."""
        # With several stages the time between two steps includes waiting for other stages, whatever
        # the step computes. The time that the engine reports does not.
        if self.limits.num_stages > 1:
            seconds = result.seconds
        if self._speculation is not None:
            self._speculation.observe_step(step, seconds, result, self._stats.drafts)
        self._budget.observe(step, result, seconds, len(self._policy.running))
        num_tokens = step.num_tokens + step.num_drafts
        self._prompt_time.note_step(
            num_tokens, step.num_prompt_tokens, step.num_pairs, step.num_keys, result.seconds
        )
        if self._policy.deadlines is not None:
            self._policy.deadlines.note_step(result.seconds)
