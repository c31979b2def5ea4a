"""The scheduler: a state machine that plans steps and applies their results.

Owns every live request, the block pool and the rows. Must not know text, tensors, threads or the
time of day: it is driven by calls, and time is an argument.

One rule, no phases: every request has a cursor `num_computed` that chases its known tokens, under
one token budget per step. Prefill, chunked prefill, prefix hits, decode and resumption after a
preemption are all that one rule. Drafts take what a step leaves over of budget and blocks, and
no new block while anybody waits.

    add() ──► waiting ──admit──► running ──apply(): stop, length──► gone
                 ▲                  │  │
                 └──── preempt ─────┘  └── finish() (text stop, cancel): at its step's apply()
                       reset: all of them, in a new epoch

An engine of several stages has as many steps in flight, over disjoint rows, each row coming back
when its step is applied:

    plan 1 (a b) ─► plan 2 (c d) ─► apply 1 ─► plan 3 (a b) ─► apply 2 ─► plan 4 (c d) ─► ...

Where an engine has one stage, a step may be planned while the one before it computes, for the same
rows: what that one samples is not known then, but that it is one token is, and the engine has it::

    plan 1 (a b) ─► plan 2 (a b) ─► apply 1 ─► plan 3 (a b) ─► apply 2 ─► plan 4 (a b) ─► ...

So a request that ends in step 1, otherwise than by its length, is in step 2 for nothing. What needs
the tokens themselves, or the blocks of a request in flight, waits until nothing is: drafts,
preemption, displacement, and suspects.

A step in flight writes into its requests' blocks. So until its apply() these are not preempted, and
nothing of theirs is freed. The engine executes plans in order, so what others free may be used in
the next plan, whatever is in flight.
"""

from collections import deque
from collections.abc import Iterable

from charonia.control.block_tables import BlockTables
from charonia.control.fitting import Admission, Fitting
from charonia.control.kv_cache import KVCache
from charonia.control.limits import Limits
from charonia.control.peak_memory import PeakMemory
from charonia.control.policies import Deadlines, Late, Policy, by_arrival, ranked
from charonia.control.prompt_budget import PromptBudget
from charonia.control.relief import NO_RELIEF
from charonia.control.request import Request, Update
from charonia.control.speculation import Speculation
from charonia.control.stats import SchedulerStats
from charonia.control.step import NO_BLOCKS, NO_DRAFT, Draft, Step
from charonia.control.step_size import StepSize
from charonia.control.suspects import Suspects
from charonia.protocol import NewRow, RowResult, RowStep, StepPlan, StepResult


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

    Attributes:
        relief: what steps do without; may be set at any time.
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
    ) -> None:
        self.stats = stats or SchedulerStats()
        self.relief = NO_RELIEF
        self._speculation = speculation
        self._requests: dict[str, Request] = {}
        self._policy = policy or ranked(by_arrival)
        self._prompt_budget = prompt_budget
        self._peak_memory = peak_memory
        self._step_size = step_size
        self._waiting = self._policy.waiting
        self._running = self._policy.running
        self._next_number = 0
        self._hash_secret = hash_secret
        self._suspects = Suspects()
        self._late: list[Late] = []  # see take_late()
        self._started: list[Request] = []  # see take_started()
        self._ended: list[Request] = []  # that are in flight yet: their rows and blocks are kept
        self._epoch = epoch
        self._in_flight: deque[Step]  # in the order of their plans
        self._num_sampling: deque[int]  # rows of the last steps, one of each stage
        self._leaves: list[int]
        self._applied_at: float
        self._is_short: bool  # somebody lacks what requests in flight hold
        self._start_epoch(limits)

    # ------------------------------------------------------------------ questions

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        """Requests that have had no end."""
        return len(self._requests)

    @property
    def kv(self) -> KVCache:
        """The engine's pool of blocks."""
        return self._blocks.kv

    @property
    def requests(self) -> Iterable[Request]:
        """All that have had no end."""
        return self._requests.values()

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Take a request in.

        Raises:
            InvalidRequestError: its prompt is empty or too long.
        """
        self.limits.check_prompt(request.num_prompt)
        request.max_known = min(self.limits.max_model_len, request.num_prompt + request.max_tokens)
        request.number = self._next_number
        self._next_number += 1
        self._requests[request.key] = request
        self._wait(request)

    def finish(self, key: str) -> Request | None:
        """End a request from outside: its text met a stop string, or its client is gone.

        Its blocks are free at once, or at the apply() of its last step when it is in flight.

        Returns:
            The request, or None when no such request is live.
        """
        request = self._requests.get(key)
        if request is not None:
            self._end(request)
        return request

    def take_late(self) -> list[Late]:
        """The requests that were ended since the last call because they would be late."""
        late, self._late = self._late, []
        return late

    def take_started(self) -> list[Request]:
        """The requests that the last plan began, which had none of their tokens computed before."""
        started, self._started = self._started, []
        return started

    # ------------------------------------------------------------------ one step

    def plan(self, now: float) -> StepPlan | None:
        """Choose what the next step computes; None when there is nothing to do before an apply().

        At most `max_steps_in_flight` plans may be neither applied nor given up with `reset`.
        """
        assert len(self._in_flight) < self.limits.max_steps_in_flight, "too many steps in flight"
        if self._policy.deadlines is not None:
            self._give_up_late(self._policy.deadlines, now)
        is_ahead = self.limits.overlaps and bool(self._in_flight)
        if is_ahead and not self._may_plan_ahead():
            return None
        self._is_short = False
        self._started = []
        self._isolate_suspect()
        self.stats.draft_depth = 0.0
        budget = self._max_tokens()
        step = Step(self._step_id, now, budget, self._tokens_for_prompts(budget))
        num_preempted = self.stats.preemptions
        self._admit_urgent(step)
        if step.joins or not self._is_short:
            self._plan_running(step)
        if self.stats.preemptions == num_preempted and not self._is_short:
            self._admit_waiting(step)
            if not is_ahead:
                self._add_drafts(step)
        if not step.rows:
            assert not step.joins
            return None
        if is_ahead and self._speculation is not None and self.relief.speculates:
            self._speculation.note_rest()
        self._num_sampling.append(step.num_sampling)
        self._in_flight.append(step)
        self._step_id += 1
        leaves, self._leaves = self._leaves, []
        return StepPlan(
            epoch=self._epoch,
            step_id=step.step_id,
            reset=step.step_id == 0,
            leaves=leaves,
            joins=step.joins,
            rows=step.rows,
        )

    def apply(self, result: StepResult, now: float) -> list[Update]:
        """Commit what the oldest step in flight did, and end those of its requests that ended.

        Returns:
            One update per request that committed tokens or prompt log-probabilities.
        """
        step = self._in_flight.popleft()
        assert (result.epoch, result.step_id) == (self._epoch, step.step_id), "wrong result"
        if self._speculation is not None:
            # The cycle of one of several stages includes waiting behind others, which no choice of
            # its drafts changes: then it is what the engine says that is the same for each.
            is_alone = self.limits.num_stages == 1
            seconds = now - max(step.planned_at, self._applied_at) if is_alone else result.seconds
            self._speculation.observe_step(step, seconds, result, self.stats.drafts)
        if not step.drafts:
            self._learn_time(step, result, now)
        self._applied_at = now
        if self._policy.deadlines is not None:
            num_tokens = sum(row.num_tokens + row.num_drafts for row in step.rows)
            self._policy.deadlines.note_step(num_tokens, result.seconds)
        updates, drafts = [], step.drafts
        rows = zip(step.requests, step.rows, result.rows, strict=True)
        for place, (request, planned, row_result) in enumerate(rows):
            assert row_result.row == planned.row, "wrong row"
            draft = drafts.get(place, NO_DRAFT) if drafts else NO_DRAFT
            num_tokens = planned.num_tokens
            request.num_in_flight -= 1
            request.num_computing -= num_tokens
            if row_result.token_ids:
                request.num_sampling -= 1
            if not request.is_ended:
                update = self._take(request, num_tokens, draft, row_result)
                if update is not None:
                    updates.append(update)
            else:
                # What was sampled since its end is in no block that others can hit.
                num_tokens = min(num_tokens, len(request.token_ids) - request.num_computed)
                self._blocks.commit(request, num_tokens, draft, num_accepted=0)
        if self._policy.service is not None:
            self._policy.service.note_outputs(updates)
        if self._ended:
            self._drop_ended()
        return updates

    # ------------------------------------------------------------------ when the engine fails

    def reset(self, limits: Limits | None = None, *, epoch: int = 0) -> None:
        """Open a new epoch: all KV is lost, every request is recomputed from its tokens.

        Steps in flight are given up; there will be no apply() of them.

        Args:
            limits: of the engine that is there now; None leaves them.
            epoch: of that engine so far.
        """
        for request in self._running.in_order():
            self._running.remove(request)
            self._blocks.forget(request)
            self._wait(request)
        for request in (*self._requests.values(), *self._ended):
            request.row = None
            request.block_keys = []  # the new engine's blocks may be of another size
            request.num_in_flight = request.num_computing = request.num_sampling = 0
            longest = request.num_prompt + request.max_tokens
            request.max_known = min((limits or self.limits).max_model_len, longest)
        self._drop_ended()
        self._epoch = max(self._epoch, epoch)
        self._start_epoch(limits or self.limits)

    def blame(self) -> Request | None:
        """Note that the engine died with the steps in flight; call before `reset`.

        Returns:
            The request that it died of, which is ended, or None where that is not known (see
            `suspects`); one that was ended before is told nothing.
        """
        guilty = self._suspects.note_death(self._requests.values())
        if guilty is None or guilty.is_ended:
            return None
        self._end(guilty)
        return guilty

    # ------------------------------------------------------------------ parts of plan()

    def _start_epoch(self, limits: Limits) -> None:
        self.limits = limits
        self._epoch += 1
        self._step_id = 0
        self._in_flight = deque()
        self._num_sampling = deque(maxlen=limits.num_stages)
        self._is_short = False
        self._applied_at = 0.0
        self._leaves = []
        self._one_token = [RowStep(row, 1) for row in range(limits.max_num_seqs)]
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._blocks = BlockTables(limits, self._hash_secret)
        self._fitting = Fitting(limits, self._policy, self._blocks, self._peak_memory)
        self._show_sizes()

    def _tokens_for_prompts(self, budget: int) -> int:
        """How many a step may compute, whose rows that decode should not wait for them long.

        Those that decode are the ones that were given a token when last their stage had a step.
        """
        in_turn = len(self._num_sampling) == self.limits.num_stages
        num_decodes = self._num_sampling[0] if in_turn else 0
        if not num_decodes or not self.limits.enable_chunked_prefill:
            return budget
        if self._prompt_budget is not None:
            budget = min(budget, self._prompt_budget.tokens(num_decodes))
        return max(1, int(budget * self.relief.prompt_share))

    def _max_tokens(self) -> int:
        """Of the next step. Those that were chosen are beside the one of each row."""
        most = self.limits.max_num_batched_tokens
        if self._step_size is None or not self.limits.enable_chunked_prefill:
            return most
        return min(most, len(self._running) + self._step_size.max_tokens)

    def _num_free_rows(self) -> int:
        """Rows that requests may be given."""
        if self._step_size is None:
            return len(self._free_rows)
        num_more = self._step_size.max_rows * self.limits.num_stages - len(self._running)
        return max(0, min(len(self._free_rows), num_more))

    def _show_sizes(self) -> None:
        sizes, limits = self._step_size, self.limits
        self.stats.max_rows = sizes.max_rows if sizes else limits.max_num_seqs
        self.stats.max_step_tokens = self._max_tokens()

    def _learn_time(self, step: Step, result: StepResult, now: float) -> None:
        """Tell what a step took that had no drafts."""
        if self._prompt_budget is None and self._step_size is None:
            return
        seconds = result.seconds
        if self.limits.num_stages == 1:
            seconds = now - max(step.planned_at, self._applied_at)
        num_rows = len(step.rows)
        num_decodes = num_rows - step.num_prompts
        if self._prompt_budget is not None:
            self._prompt_budget.observe(num_decodes, step.num_prompt_tokens, seconds)
        if self._step_size is not None:
            self._step_size.observe(num_decodes, step.num_prompt_tokens, num_rows, seconds)
            self._show_sizes()

    def _wait(self, request: Request) -> None:
        self._waiting.push(request)
        if self._policy.deadlines is not None:
            self._policy.deadlines.note_waiting(request)

    def _give_up_late(self, deadlines: Deadlines, now: float) -> None:
        """End those that cannot meet their deadlines any more, or put them behind all others."""
        for late in deadlines.take_late(now):
            if not deadlines.demotes:
                self._end(late.request)
                self._late.append(late)
            else:
                self._waiting.remove(late.request)
                late.request.is_demoted = True
                self._waiting.push(late.request)

    def _may_plan_ahead(self) -> bool:
        """Whether a step may be planned for rows of which tokens are in flight.

        A suspect runs alone, or its guilt would not be known.
        """
        last = self._in_flight[-1]
        if self._is_short or last.drafts or self._suspects.first is not None:
            return False
        if self._speculation is None or not self.relief.speculates:
            return True
        return self._speculation.rests_after(last)

    def _isolate_suspect(self) -> None:
        """While there are suspects, only the first of them may run.

        None of the others is in flight: suspicion comes with a new epoch.
        """
        if suspect := self._suspects.first:
            for request in self._running.in_order():
                if request is not suspect:
                    self._preempt(request)

    def _share(self, num_joining: int) -> int:
        """Rows that a step takes at most, so that each step that may be in flight has as many.

        Who joins is in the step that it joins with, so no more may join.

        All rows count alike. What prompts compute is not shared out: a chunk fills the budget of
        its step, which keeps every stage busy for long, however few rows come with it.

        Args:
            num_joining: requests that may get a row beside those that have one, less such as lose
                theirs.
        """
        return -(-(len(self._running) + num_joining) // self.limits.num_stages)

    def _admit_urgent(self, step: Step) -> None:
        """Admit those first in order that may displace others, before these are planned.

        As few are preempted as it takes. None of those has a row of this step in turn: they were
        the last ones in order, so there is nobody whom they might displace. Who has joined the step
        stays in it, though a prompt may have made another tenant the one that has had less.
        """
        num_tokens = 0
        joined: set[int | None] = set()  # rows
        while self._suspects.first is None:
            if num_tokens >= step.prompt_budget:  # it would join without being in the step
                return
            budget = step.budget
            if not self.limits.enable_chunked_prefill:  # those that run come first
                budget -= sum(request.num_to_compute for request in self._running.in_order())
            found = self._fitting.next_urgent(budget, has_free_row=self._num_free_rows() > 0)
            if found is None or len(step.joins) >= self._share(1 - len(found.victims)):
                return
            if any(victim.row in joined for victim in found.victims):
                return
            if any(victim.num_in_flight for victim in found.victims):
                self._is_short = True
                return
            for victim in found.victims:
                self._preempt(victim)
            self._admit(step, found)
            joined.add(found.request.row)
            num_tokens += found.request.num_to_compute

    def _plan_running(self, step: Step) -> None:
        """Plan those that have a row, as far as budget and blocks go."""
        max_rows = self._share(0)
        order = self._running.in_order()
        is_short = step.prompt_budget < step.budget
        if step.joins and (is_short or not self.limits.enable_chunked_prefill):
            # There is room for them in this step: without chunks perhaps in no other one.
            joined = {join.row for join in step.joins}
            order.sort(key=lambda request: request.row not in joined)
        for request in order:  # which gets shorter at its end
            if step.budget <= 0 or len(step.rows) >= max_rows:
                return
            if request.num_in_flight and not (self.limits.overlaps and self._goes_on(request)):
                continue
            if not self._plan_row(step, request, order):
                self._is_short = True
                return

    def _plan_row(self, step: Step, request: Request, order: list[Request]) -> bool:
        """Plan the next tokens of a request that has a row.

        Args:
            order: of those that have one; whoever loses its blocks is the last, and is removed.

        Returns:
            Whether those behind it may be planned, too.
        """
        num_left = num_tokens = request.num_to_compute
        if num_tokens > step.budget:
            num_tokens = step.budget
        if num_tokens > 1:
            if step.prompt_budget <= 0:
                return True
            num_tokens = min(num_tokens, step.prompt_budget)
        end = request.num_computed + request.num_computing + num_tokens
        num_new = self._blocks.num_missing(request, end)
        while num_new > self.kv.num_free:
            victim = order[-1]
            # Of one in flight its blocks are to be had when its step is applied.
            if victim.num_in_flight or any(join.row == victim.row for join in step.joins):
                return not self.limits.overlaps
            self._preempt(order.pop())
            if self._step_size is not None:
                self._step_size.note_preemption(len(self._running))
            if victim is request:
                return True
        assert request.row is not None
        if num_tokens == 1 and not num_new:
            row_step = self._one_token[request.row]
        else:
            new_block_ids = self._blocks.grow(request, num_new) if num_new else NO_BLOCKS
            row_step = RowStep(request.row, num_tokens, new_block_ids)
        request.num_in_flight += 1
        request.num_computing += num_tokens
        if num_tokens == num_left:
            request.num_sampling += 1
            step.num_sampling += 1
        if num_left > 1:
            step.prompt_budget -= num_tokens
            step.num_prompts += 1
            step.num_prompt_tokens += num_tokens
        step.requests.append(request)
        step.rows.append(row_step)
        step.budget -= num_tokens
        return True

    def _goes_on(self, request: Request) -> bool:
        """Whether a request in flight will need another step, as far as that is known."""
        return len(request.token_ids) + request.num_sampling < request.max_known

    def _admit_waiting(self, step: Step) -> None:
        """Admit those that wait, while there are tokens, rows and blocks left."""
        num_free_rows = self._num_free_rows()
        if not num_free_rows or not self._waiting:
            return
        owed = self._fitting.num_owed()
        max_rows = self._share(min(len(self._waiting), num_free_rows))
        while min(step.budget, step.prompt_budget) > 0 and self._num_free_rows():
            if len(step.rows) >= max_rows:
                return
            found = self._fitting.next_admissible(step.budget, owed, self._suspects.first)
            if found is None:
                return
            self._admit(step, found)
            self._plan_row(step, found.request, [])
            owed += self._blocks.num_owed(found.request)

    def _add_drafts(self, step: Step) -> None:
        """Have rows that decode verify drafts, with what the step leaves of budget and blocks."""
        if self._speculation is None or not self.relief.speculates:
            return
        found = self._speculation.draft(step, self.limits)
        for place, wanted in found:
            request, planned = step.requests[place], step.rows[place]
            # A draft that is rejected leaves its block with the row.
            spare = 0 if self._waiting else max(0, self.kv.num_free - self.limits.watermark)
            num_held = (len(request.block_ids) + spare) * self.limits.block_size
            draft = wanted.capped(num_held - len(request.token_ids))
            if draft is NO_DRAFT:
                continue
            num_new = self._blocks.num_missing(request, len(request.token_ids) + draft.num_drafts)
            step.drafts[place] = draft
            step.rows[place] = RowStep(
                planned.row,
                planned.num_tokens,
                planned.new_block_ids + self._blocks.grow(request, num_new),
                draft.num_drafts,
                draft.draft_ids,
                draft.num_draft_tokens,
            )
        num_drafts = sum(draft.num_drafts for draft in step.drafts.values())
        self.stats.draft_depth = num_drafts / max(1, len(found))

    def _admit(self, step: Step, admission: Admission) -> None:
        """Give a waiting request a row and the cached blocks of its prefix."""
        request, hits, _, passed = admission
        for other in passed:
            other.num_passed += 1
        self._blocks.begin(request, hits)
        self._waiting.remove(request)
        self._running.add(request)
        request.row = self._free_rows.pop()
        self._count_admission(request, step.planned_at)
        new_row = NewRow(
            row=request.row,
            token_ids=list(request.token_ids),
            num_prompt=request.num_prompt,
            num_computed=request.num_computed,
            block_ids=list(hits),
            sampling=request.sampling,
            num_draft_computed=request.num_draft_computed,
        )
        step.joins.append(new_row)

    def _count_admission(self, request: Request, now: float) -> None:
        is_first = request.started_at is None
        num_cached = request.num_computed
        if is_first:
            request.started_at = now
            request.num_cached = num_cached
            self._started.append(request)
            if self._policy.service is not None:
                self._policy.service.note_admission(request)
        if request.is_probe:
            return
        if is_first:
            self.stats.prompt_tokens_cached += num_cached
            self.stats.prompt_tokens_computed += request.num_prompt - num_cached
        if self.limits.enable_prefix_caching and request.takes_hits:
            self.stats.prefix_queried_tokens += len(request.token_ids)
            self.stats.prefix_hit_tokens += num_cached

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request that is in no step."""
        self.stats.preemptions += 1
        request.num_preemptions += 1
        self._running.remove(request)
        self._release(request)
        self._wait(request)

    # ------------------------------------------------------------------ parts of apply()

    def _take(
        self, request: Request, num_tokens: int, draft: Draft, row_result: RowResult
    ) -> Update | None:
        """Take what a row committed; the request may end with it."""
        run, prompt_offset = row_result.token_ids, request.num_computed
        token_ids, reason = request.append(run)
        # What follows a token that ended the request counts for nothing.
        num_accepted = len(token_ids) - 1 if token_ids else 0
        if draft is not NO_DRAFT and draft.num_drafts:
            assert self._speculation is not None
            counts = self.stats.drafts
            self._speculation.observe_run(request, draft, len(run), num_accepted, counts)
        self._blocks.commit(request, num_tokens, draft, num_accepted)
        if token_ids and self._suspects.first is not None:
            self._suspects.acquit(request)
        if reason is not None:
            if self._policy.deadlines is not None:
                self._policy.deadlines.note_end(request)
            if self._peak_memory is not None:
                self._peak_memory.note_end(request)
            self._end(request)
        elif not token_ids and row_result.prompt_logprobs is None:
            return None
        logprobs = row_result.logprobs
        if logprobs:
            logprobs = logprobs[: len(token_ids)]
        return Update(
            request, token_ids, logprobs, row_result.prompt_logprobs, prompt_offset, reason
        )

    # ------------------------------------------------------------------ shared

    def _end(self, request: Request) -> None:
        """Forget a request, but for its row and blocks as long as it is in flight."""
        request.is_ended = True
        del self._requests[request.key]
        if self._speculation is not None:
            self._speculation.forget(request)
        (self._waiting if request in self._waiting else self._running).remove(request)
        self._ended.append(request)
        self._drop_ended()

    def _drop_ended(self) -> None:
        """Free what requests that have ended held for steps in flight."""
        ended, self._ended = self._ended, []
        for request in ended:
            if request.num_in_flight:
                self._ended.append(request)
                continue
            self._suspects.forget(request)
            if request.row is not None:
                self._release(request)

    def _release(self, request: Request) -> None:
        """Take the row and the blocks of a request that runs no longer. They keep their content."""
        assert request.row is not None
        assert not request.num_in_flight, "a step in flight writes into these blocks"
        self._leaves.append(request.row)
        self._free_rows.append(request.row)
        self._blocks.release(request)
        request.row = None
