"""Admission: waiting requests get a row, urgent ones before the running ones are planned.

Owns the limits of admission in a step, and what is counted and sent for each joining request. Knows
nothing about which request fits or comes next, or what a row computes.
"""

from charonia.control.cache.block_tables import BlockTables
from charonia.control.policies import Policy
from charonia.control.scheduling.fitting import Fit, Fitting
from charonia.control.scheduling.live_requests import LiveRequests
from charonia.control.scheduling.prefix_sharing import PrefixSharing
from charonia.control.scheduling.row_planner import RowPlanner
from charonia.control.scheduling.rows import Rows
from charonia.control.scheduling.step_budget import StepBudget
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request
from charonia.control.state.stats import SchedulerStats
from charonia.control.state.step import Step
from charonia.protocol import NewRow

MAX_DISPLACED = 16
"""Number of preemptions for urgent requests after which a step admits no more of those."""


class Admission:
    """Admits requests to one epoch's steps.

    Args:
        fitting: finds the next request. planner: plans the rows of admitted requests.
        sharing: told about each admission; None without prefix sharing.
        stats: counts cache hits.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        blocks: BlockTables,
        live: LiveRequests,
        rows: Rows,
        budget: StepBudget,
        fitting: Fitting,
        planner: RowPlanner,
        sharing: PrefixSharing | None,
        stats: SchedulerStats,
    ) -> None:
        self._limits = limits
        self._waiting = policy.waiting
        self._running = policy.running
        self._service = policy.service
        self._blocks = blocks
        self._live = live
        self._rows = rows
        self._budget = budget
        self._fitting = fitting
        self._planner = planner
        self._sharing = sharing
        self._stats = stats

    def admit_urgent(self, step: Step) -> None:
        """Admit urgent requests, which may displace running ones, before those are planned.

        As few requests are preempted as necessary. A preempted request is not admitted again in
        this step: it was the last in order, so it cannot displace others. A request that joined
        the step stays in it, even if charging its prompt has changed the order of the tenants, and
        so does one of which it copies a block.
        """
        self._fitting.begin(step)
        if not self._waiting:
            return
        num_tokens = num_displaced = 0
        owed: int | None = None  # see `Fitting.num_owed`
        while num_displaced < MAX_DISPLACED:
            if num_tokens >= step.prompt_budget:  # the next would join, but compute nothing
                return
            budget = step.budget
            if not self._limits.enable_chunked_prefill:  # running requests come first
                budget -= sum(request.num_to_compute for request in self._running.in_order())
            found = self._fitting.next_urgent(budget, owed, num_free_rows=self._num_free_rows())
            if found is None:
                return
            num_running = len(self._running) + 1 - len(found.victims)
            if len(step.joins) >= self._budget.share(num_running):
                return
            if any(map(step.keeps, found.victims)):
                return
            if any(victim.num_in_flight for victim in found.victims):
                step.is_short = True
                return
            owed = found.owed - self._blocks.num_owed(found.victims)
            for victim in found.victims:
                self._live.preempt(victim)
            if found.victims:  # duplicates may have replaced blocks that they held
                found = found._replace(hits=self._blocks.hits(found.request))
            self._admit(step, found)
            owed += self._blocks.num_owed([found.request])
            num_displaced += len(found.victims)
            num_tokens += found.request.num_to_compute

    def admit_waiting(self, step: Step, suspect: Request | None) -> None:
        """Admit waiting requests while tokens, rows and blocks are left, and plan their rows.

        Args:
            suspect: the only request that may run; None if there is no suspect.
        """
        if not self._waiting or not (num_free_rows := self._num_free_rows()):
            return
        self._fitting.begin(step)
        owed = self._fitting.num_owed()
        if self._sharing is not None:
            self._sharing.begin(self._running.in_order())
        num_joining = min(len(self._waiting), num_free_rows)
        max_rows = self._budget.share(len(self._running) + num_joining)
        while min(step.budget, step.prompt_budget) > 0 and self._num_free_rows():
            if len(step.rows) >= max_rows:
                return
            found = self._fitting.next_admissible(step.budget, owed, suspect, step.planned_at)
            if found is None:
                return
            self._admit(step, found)
            self._planner.plan_row(step, found.request, [])
            owed += self._blocks.num_owed([found.request])

    def _num_free_rows(self) -> int:
        """Rows that may be given to requests."""
        return self._budget.num_rows(self._rows.num_free, len(self._running))

    def _admit(self, step: Step, found: Fit) -> None:
        request = found.request
        for other in found.passed:
            other.num_passed += 1
        copy = self._live.admit(request, found.hits)
        if copy is not None:
            step.copies.append(copy)
        if self._sharing is not None:
            self._sharing.note_admission(request)
        self._count(step, request)
        assert request.row is not None
        new_row = NewRow(
            row=request.row,
            token_ids=list(request.token_ids),
            num_prompt=request.num_prompt,
            num_computed=request.num_computed,
            block_ids=list(request.block_ids),
            sampling=request.sampling,
            num_draft_computed=request.num_draft_computed,
        )
        step.joins.append(new_row)

    def _count(self, step: Step, request: Request) -> None:
        """Record when a request began, and its cache hits."""
        is_first = request.started_at is None
        num_cached = request.num_computed
        if is_first:
            request.started_at = step.planned_at
            request.num_cached = num_cached
            step.started.append(request)
            if self._service is not None:
                self._service.note_admission(request)
        if request.is_probe:
            return
        if is_first:
            self._stats.prompt_tokens_cached += num_cached
            self._stats.prompt_tokens_computed += request.num_prompt - num_cached
        if self._limits.enable_prefix_caching and request.takes_hits:
            self._stats.prefix_queried_tokens += len(request.token_ids)
            self._stats.prefix_hit_tokens += num_cached
