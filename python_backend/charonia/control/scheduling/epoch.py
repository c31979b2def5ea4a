"""One epoch of the engine: its rows, its blocks, and its steps from plan() to apply().

Owns the order in which a step is given out, and the order of the steps in flight. Must not know how
requests come and go, nor what comes after the engine is lost.

A step's tokens, rows and blocks go to these, in turn::

    transfers.set_aside        nobody: blocks for which there is no memory any more
    admission.admit_urgent     who may displace running requests, and whom that costs their rows
    row_planner.plan_running   the running: blocks that run out are taken from the last of them
    admission.admit_waiting    those that wait, unless somebody was preempted
    row_planner.add_drafts     drafts, unless tokens are in flight that they would follow
    transfers.plan             blocks of slower tiers, with what memory is left

An engine of several stages has as many steps in flight, over disjoint rows, each row coming back
when its step is applied:

    plan 1 (a b) ─► plan 2 (c d) ─► apply 1 ─► plan 3 (a b) ─► apply 2 ─► plan 4 (c d) ─► ...

Where an engine has one stage, a step may be planned while the one before it computes, for the same
rows: what that one samples is not known then, but that it is one token is, and the engine has it::

    plan 1 (a b) ─► plan 2 (a b) ─► apply 1 ─► plan 3 (a b) ─► apply 2 ─► plan 4 (a b) ─► ...

So a request that ends in step 1, otherwise than by its length, is in step 2 for nothing. What needs
the tokens themselves, or the blocks of a request in flight, waits until nothing is: drafts,
preemption, displacement, and suspects.

The engine executes plans in order, so what is freed may be used in the next plan, whatever is in
flight.
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
from charonia.control.scheduling.prefix_sharing import PrefixSharing
from charonia.control.scheduling.row_planner import RowPlanner
from charonia.control.scheduling.rows import Rows
from charonia.control.scheduling.step_budget import StepBudget
from charonia.control.scheduling.suspects import Suspects
from charonia.control.scheduling.transfers import Transfers
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request, Update
from charonia.control.state.stats import SchedulerStats
from charonia.control.state.step import Step
from charonia.protocol import StepPlan, StepResult

_LOOK_AT_MEMORY_S = 1.0
"""After so long without a step an engine that watches its memory gets one that does nothing."""


class Epoch:
    """The steps of one epoch, from its first one on.

    Args:
        number: of the epoch.
        blocks: of this engine, all of them free.
        tiers: of this engine, slower than its KV cache; None where it has none.
        live: who may be in a step; nobody has a row. The others: see `Scheduler`.

    Attributes:
        transfers: what its steps move beside what they compute.
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
        suspects: Suspects,
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
        self._suspects = suspects
        self._speculation = speculation
        self._prompt_time = prompt_time
        self._stats = stats
        self._in_flight: deque[Step] = deque()  # in the order of their plans
        self._next_step_id = 0
        self._applied_at = 0.0
        self._is_short = False  # so was the step that was planned last
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
        self._commit = Commit(blocks, live, suspects, policy.service, speculation, stats)
        self.transfers = Transfers(limits, blocks, fitting, tiers, fetching)
        live.start_epoch(limits, blocks, self._rows, self._lookups)
        budget.start_epoch(limits)
        prompt_time.start_epoch(limits)
        if sharing is not None:
            sharing.start_epoch(limits, prompt_time, stats)

    def num_cached(self, request: Request) -> int:
        """Tokens of a waiting request that need not be computed, if nothing is evicted before."""
        return self._lookups.num_found(request) * self.limits.block_size

    def may_plan_ahead(self, shedding: LoadShedding) -> bool:
        """Whether a step may be planned for rows of which tokens are in flight.

        A suspect runs alone, or its guilt would not be known.
        """
        if not self.limits.overlaps or not self._in_flight:
            return False
        last = self._in_flight[-1]
        if self._is_short or last.drafts or self._suspects.first is not None:
            return False
        if self._speculation is None or not shedding.speculates:
            return True
        return self._speculation.rests_after(last)

    def take_started(self) -> list[Request]:
        """The requests that the last plan began, which had none of their tokens computed before."""
        started, self._started = self._started, []
        return started

    # ------------------------------------------------------------------ plan

    def plan(self, now: float, shedding: LoadShedding) -> StepPlan | None:
        """Choose what the next step computes; None when nothing is to be done before an apply()."""
        assert len(self._in_flight) < self.limits.max_steps_in_flight, "too many steps in flight"
        is_ahead = self.limits.overlaps and bool(self._in_flight)
        if is_ahead and not self.may_plan_ahead(shedding):
            return None
        speculation = self._speculation if shedding.speculates else None
        self._lookups.reserve(len(self._policy.waiting))
        suspect = self._suspects.first
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
        """Have nobody run but a suspect.

        None of the others is in flight: suspicion comes with a new epoch.
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
        """Give the tokens, rows and blocks of a step out.

        Args:
            suspect: the only one that may run, if there is any.
            speculation: None where nobody may draft.
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
        """Whether a step is due in which the engine does nothing but look at its memory."""
        is_idle = self.limits.watches_memory and not self._in_flight
        return is_idle and now >= self._applied_at + _LOOK_AT_MEMORY_S

    # ------------------------------------------------------------------ apply

    def apply(self, result: StepResult, now: float) -> list[Update]:
        """Commit what the oldest step in flight did, and end those of its requests that ended.

        Returns:
            One update per request that committed tokens or prompt log-probabilities.
        """
        step = self._in_flight.popleft()
        assert (result.epoch, result.step_id) == (self.number, step.step_id), "wrong result"
        self.transfers.apply(step, result)
        if step.rows:
            self._learn_from(step, result, now)
        self._applied_at = now
        return self._commit.commit(step, result.rows)

    def _learn_from(self, step: Step, result: StepResult, now: float) -> None:
        """Take note of how long a step took that has rows."""
        # The cycle of one of several stages includes waiting behind others, which no choice of what
        # it computes changes: then it is what the engine says that is the same for each.
        is_alone = self.limits.num_stages == 1
        seconds = now - max(step.planned_at, self._applied_at) if is_alone else result.seconds
        if self._speculation is not None:
            self._speculation.observe_step(step, seconds, result, self._stats.drafts)
        self._budget.observe(step, result, seconds, len(self._policy.running))
        num_tokens = step.num_tokens + step.num_drafts
        self._prompt_time.note_step(
            num_tokens, step.num_prompt_tokens, step.num_pairs, result.seconds
        )
        if self._policy.deadlines is not None:
            self._policy.deadlines.note_step(result.seconds)
