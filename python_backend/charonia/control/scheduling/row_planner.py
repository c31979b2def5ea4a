"""Work of each row in a step: its next tokens, the blocks they need, drafts behind them.

Owns the growth of running requests, and preemption when blocks run out. Knows nothing about
admission, or where drafts come from.
"""

from charonia.control.cache.block_tables import BlockTables
from charonia.control.estimators.prompt_time import num_pairs
from charonia.control.policies import Policy
from charonia.control.scheduling.live_requests import LiveRequests
from charonia.control.scheduling.step_budget import StepBudget
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request
from charonia.control.state.stats import SchedulerStats
from charonia.control.state.step import NO_BLOCKS, Draft, Step
from charonia.protocol import RowStep


class RowPlanner:
    """Plans the rows of one epoch's steps.

    Args:
        stats: gets the drafts per row.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        blocks: BlockTables,
        live: LiveRequests,
        budget: StepBudget,
        stats: SchedulerStats,
    ) -> None:
        self._limits = limits
        self._waiting = policy.waiting
        self._running = policy.running
        self._blocks = blocks
        self._kv = blocks.kv
        self._live = live
        self._budget = budget
        self._stats = stats
        self._one_token = [RowStep(row, 1) for row in range(limits.max_num_seqs)]

    def plan_running(self, step: Step) -> None:
        """Plan the running requests, as far as budget and blocks go."""
        max_rows = self._budget.share(len(self._running))
        order = self._running.in_order()
        is_short = step.prompt_budget < step.budget
        if step.joins and (is_short or not self._limits.enable_chunked_prefill):
            # This step has room for them. Without chunks, perhaps no other step has.
            joined = {join.row for join in step.joins}
            order.sort(key=lambda request: request.row not in joined)
        for request in order:  # plan_row() may remove requests from its end
            if step.budget <= 0 or len(step.rows) >= max_rows:
                return
            if request.num_in_flight and not (self._limits.overlaps and _goes_on(request)):
                continue
            if not self.plan_row(step, request, order):
                step.is_short = True
                return

    def plan_row(self, step: Step, request: Request, order: list[Request]) -> bool:
        """Plan the next tokens of a request that has a row.

        Args:
            order: the running requests in order; the last are preempted first, and removed.

        Returns:
            Whether the requests behind it may be planned, too.
        """
        begin = request.num_computed + request.num_computing
        num_left = num_tokens = len(request.token_ids) + request.num_sampling - begin
        if num_tokens > step.budget:
            num_tokens = step.budget
        if num_tokens > 1:
            if step.prompt_budget <= 0:
                return True
            num_tokens = min(num_tokens, step.prompt_budget)
        end = begin + num_tokens
        num_new = self._blocks.num_missing(request, end) if end > request.num_slots else 0
        while num_new and num_new > self._kv.num_free:
            victim = order[-1]
            # Blocks of a request in flight become free only when its step is applied.
            if victim.num_in_flight or step.keeps(victim):
                return not self._limits.overlaps
            self._live.preempt(order.pop())
            self._budget.note_preemption(len(self._running))
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
            step.num_pairs += num_pairs(num_tokens, begin)
            step.num_keys += end
            if num_tokens < num_left:
                step.num_before_rest = end
        step.requests.append(request)
        step.rows.append(row_step)
        step.budget -= num_tokens
        return True

    def add_drafts(self, step: Step, found: list[tuple[int, Draft]]) -> None:
        """Add drafts to rows that decode, with the budget and blocks that the step has left.

        Args:
            found: drafts within the budget, each with its index in the step.
        """
        for place, wanted in found:
            request, planned = step.requests[place], step.rows[place]
            # The row keeps the block of a rejected draft.
            spare = 0 if self._waiting else max(0, self._kv.num_free - self._kv.watermark)
            num_held = (len(request.block_ids) + spare) * self._limits.block_size
            draft = wanted.capped(num_held - len(request.token_ids))
            if not (draft.num_drafts or draft.is_by_engine):
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
        self._stats.draft_depth = step.num_drafts / max(1, len(found))


def _goes_on(request: Request) -> bool:
    """Return whether a request in flight needs another step, unless a token in flight ends it."""
    return len(request.token_ids) + request.num_sampling < request.max_known
