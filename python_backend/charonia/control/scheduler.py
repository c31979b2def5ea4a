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

A step in flight writes into its requests' blocks. So between its plan() and its apply() these
requests are neither planned again nor preempted, and nothing of theirs is freed. The engine
executes plans in order, so what others free may be used in the next plan, whatever is in flight.
"""

from collections import deque
from collections.abc import Iterable

from charonia.control.blocks import BlockHasher
from charonia.control.kv_cache import KVCache
from charonia.control.limits import Limits
from charonia.control.queues import WaitingQueue
from charonia.control.request import Request, Update
from charonia.control.scheduled import NO_DRAFT, Scheduled, Step
from charonia.control.speculation import Speculation
from charonia.control.stats import SchedulerStats
from charonia.protocol import FinishReason, NewRow, RowResult, StepPlan, StepResult

PROGRESS = 16
"""Tokens. Two deaths of the engine between which a request has generated so many have nothing to do
with each other: what a request does to an engine it does again at the same place."""


class Scheduler:
    """Continuous batching over a paged KV cache.

    Args:
        limits: capacity of the engine.
        hash_secret: key of the block hash, 1 to 64 random bytes.
        epoch: of the engine so far; the first plan opens the next one.
        stats: counts to go on from, those of a scheduler that this one replaces.
        speculation: drafts for rows that sample; None for none.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        hash_secret: bytes,
        epoch: int = 0,
        stats: SchedulerStats | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.stats = stats or SchedulerStats()
        self._speculation = speculation
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # by rank
        self._waiting = WaitingQueue()
        self._next_rank = 0
        self._hash_secret = hash_secret
        self._suspects: list[Request] = []  # by rank
        self._ended: list[Request] = []  # by finish(), not dropped yet
        self._epoch = epoch
        self._in_flight: deque[Step]  # in the order of their plans
        self._leaves: list[int]
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
        return len(self._requests) - len(self._ended)

    @property
    def requests(self) -> Iterable[Request]:
        """All live requests."""
        return self._requests.values()

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Take a request in.

        Raises:
            InvalidRequestError: its prompt is empty or too long.
        """
        self.limits.check_prompt(request.num_prompt)
        request.rank = self._next_rank
        self._next_rank += 1
        self._requests[request.key] = request
        self._waiting.push(request)

    def finish(self, key: str) -> Request | None:
        """End a request from outside: its text met a stop string, or its client is gone.

        Its blocks are free at once, or at the apply() of its step when it is in flight.

        Returns:
            The request, or None when no such request is live.
        """
        request = self._requests.get(key)
        if request is None or request.is_ended:
            return None
        request.is_ended = True
        self._ended.append(request)
        self._drop_ended()
        return request

    # ------------------------------------------------------------------ one step

    def plan(self, now: float) -> StepPlan | None:
        """Choose what the next step computes; None when there is nothing to do before an apply().

        At most `max_steps_in_flight` plans may be neither applied nor given up with `reset`. A
        request in one of them takes no part in the next: what will become of it is not known.
        """
        assert len(self._in_flight) < self.limits.max_steps_in_flight, "too many steps in flight"
        self._isolate_suspect()
        self.stats.draft_depth = 0.0
        step = Step(self._step_id, now)
        budget = self.limits.max_num_batched_tokens
        num_preempted = self.stats.preemptions
        joins: list[NewRow] = []
        index = 0
        max_rows = self._share(0)
        while index < len(self._running) and budget > 0 and len(step.rows) < max_rows:
            request = self._running[index]
            index += 1
            if not request.is_in_flight:
                budget -= self._plan_running(step, request, budget)
        if self.stats.preemptions == num_preempted:
            owed = sum(self._num_owed(running) for running in self._running)
            max_rows = self._share(min(len(self._waiting), len(self._free_rows)))
            while budget > 0 and len(step.rows) < max_rows:
                found = self._next_admissible(budget, owed)
                if found is None:
                    break
                admitted, hits = found
                joins.append(self._admit(admitted, hits, now))
                budget -= self._plan_running(step, admitted, budget)
                owed += self._num_owed(admitted)
            self._add_drafts(step, budget)
        if not step.rows:
            return None
        self._in_flight.append(step)
        self._step_id += 1
        leaves, self._leaves = self._leaves, []
        return StepPlan(
            epoch=self._epoch,
            step_id=step.step_id,
            reset=step.step_id == 0,
            leaves=leaves,
            joins=joins,
            rows=[scheduled.row_step() for scheduled in step.rows],
        )

    def apply(self, result: StepResult, now: float) -> list[Update]:
        """Commit what the oldest step in flight did, and end those of its requests that ended.

        Returns:
            One update per request that committed tokens or prompt log-probabilities.
        """
        step = self._in_flight.popleft()
        assert (result.epoch, result.step_id) == (self._epoch, step.step_id), "wrong result"
        by_row = {row_result.row: row_result for row_result in result.rows}
        self._observe_time(step, result, now)
        updates = []
        for scheduled in step.rows:
            request = scheduled.request
            assert request.row is not None
            request.is_in_flight = False
            row_result = by_row.get(request.row)
            if row_result is None or request.is_ended:
                self._commit(scheduled, num_accepted=0)
            else:
                updates.append(self._take(scheduled, row_result))
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
        for request in self._running:
            self._forget_kv(request)
            self._waiting.push(request)
        self._running = []
        for request in self._requests.values():
            request.block_keys = []  # the new engine's blocks may be of another size
            request.is_in_flight = False
        self._epoch = max(self._epoch, epoch)
        self._start_epoch(limits or self.limits)
        self._drop_ended()

    def blame(self) -> Request | None:
        """Note that the engine died with the steps in flight; call before `reset`.

        Requests in flight at two deaths in a row, between which they have not got on, become
        suspects, which run one at a time until each has generated a token more. One that kills the
        engine alone is guilty.

        Returns:
            The guilty request, which is ended, or None; one that was ended before is told nothing.
        """
        stuck = [request for request in self._requests.values() if _is_stuck(request)]
        for request in self._requests.values():
            request.num_restarts += 1
            num_known = len(request.token_ids) if request.is_in_flight else None
            request.num_known_at_death = num_known
        if self._suspects:  # it ran alone
            return self.finish(self._suspects[0].key)
        self._suspects = stuck
        return None

    # ------------------------------------------------------------------ parts of plan()

    def _start_epoch(self, limits: Limits) -> None:
        self.limits = limits
        self._epoch += 1
        self._step_id = 0
        self._in_flight = deque()
        self._leaves = []
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.kv = KVCache(limits.num_blocks)
        self._hasher = BlockHasher(self._hash_secret, limits.block_size)

    def _isolate_suspect(self) -> None:
        """While there are suspects, only the first of them may run.

        None of the others is in flight: suspicion comes with a new epoch.
        """
        if self._suspects:
            for request in [other for other in self._running if other is not self._suspects[0]]:
                self._preempt(request)

    def _share(self, num_joining: int) -> int:
        """Rows that a step takes at most, so that each step that may be in flight has as many.

        All rows count alike. What prompts compute is not shared out: a chunk fills the budget of
        its step, which keeps every stage busy for long, however few rows come with it.

        Args:
            num_joining: requests that may get a row beside those that have one.
        """
        return -(-(len(self._running) + num_joining) // self.limits.max_steps_in_flight)

    def _plan_running(self, step: Step, request: Request, budget: int) -> int:
        """Plan the next tokens of a request that has a row; return how many."""
        num_tokens = min(len(request.token_ids) - request.num_computed, budget)
        num_new = self._num_missing(request, request.num_computed + num_tokens)
        while num_new > self.kv.num_free:
            victim = self._running[-1]
            if victim.is_in_flight:
                return 0  # its blocks are to be had when its step is applied
            self._preempt(victim)
            if victim is request:
                return 0
        scheduled = Scheduled(request, num_tokens)
        request.is_in_flight = True
        step.rows.append(scheduled)
        self._grow(scheduled, num_new)
        return num_tokens

    def _grow(self, scheduled: Scheduled, num_blocks: int) -> None:
        new_block_ids = self.kv.allocate(num_blocks)
        scheduled.new_block_ids += new_block_ids
        scheduled.request.block_ids += new_block_ids

    def _num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request lacks to hold so many tokens."""
        return max(0, self.limits.blocks_for(num_tokens) - len(request.block_ids))

    def _num_owed(self, request: Request) -> int:
        """Blocks that a running request's known tokens need and that it does not have yet."""
        return self._num_missing(request, len(request.token_ids))

    def _add_drafts(self, step: Step, budget: int) -> None:
        """Have rows that decode verify drafts, with what the step leaves of budget and blocks."""
        if self._speculation is None:
            return
        num_tokens = step.num_tokens
        drafted = self._speculation.draft(step.rows, self.limits, num_tokens, budget)
        for scheduled, draft in drafted:
            request = scheduled.request
            # A draft that is rejected leaves its block with the row.
            spare = 0 if self._waiting else max(0, self.kv.num_free - self.limits.watermark)
            num_held = (len(request.block_ids) + spare) * self.limits.block_size
            scheduled.draft = draft.capped(num_held - len(request.token_ids))
            num_known = len(request.token_ids) + scheduled.draft.num_drafts
            self._grow(scheduled, self._num_missing(request, num_known))
        num_drafts = step.num_tokens - num_tokens
        self.stats.draft_depth = num_drafts / max(1, len(drafted))

    def _next_admissible(self, budget: int, owed: int) -> tuple[Request, list[int]] | None:
        """The next request in order and its hits, if there is a row and its whole prompt fits.

        Args:
            owed: blocks that the running requests' known tokens still need.
        """
        request = self._suspects[0] if self._suspects else self._waiting.first()
        if request is None or request.row is not None or not self._free_rows:
            return None
        hits = self._find_hits(request)
        num_left = len(request.token_ids) - len(hits) * self.limits.block_size
        if num_left > budget and not self.limits.enable_chunked_prefill:
            return None
        spare = self.kv.num_free - self.kv.count_free(hits) - owed
        if self._running:
            spare -= self.limits.watermark
        return (request, hits) if self.limits.blocks_for(num_left) <= spare else None

    def _find_hits(self, request: Request) -> list[int]:
        """Cached blocks of its prefix; the last known token is always computed, for its logits."""
        if not (self.limits.enable_prefix_caching and request.takes_hits):
            return []
        self._extend_keys(request)
        max_hits = (len(request.token_ids) - 1) // self.limits.block_size
        return self.kv.find(request.block_keys[:max_hits])

    def _admit(self, request: Request, hits: list[int], now: float) -> NewRow:
        self.kv.acquire(hits)
        self._waiting.remove(request)
        self._running.append(request)
        self._running.sort(key=lambda running: running.rank)
        request.row = self._free_rows.pop()
        request.block_ids = hits
        request.num_published = len(hits)
        request.num_computed = len(hits) * self.limits.block_size
        num_with_draft_kv = self.kv.count_with_draft_kv(hits)
        request.num_draft_computed = num_with_draft_kv * self.limits.block_size
        self._count_admission(request, now)
        return NewRow(
            row=request.row,
            token_ids=list(request.token_ids),
            num_prompt=request.num_prompt,
            num_computed=request.num_computed,
            block_ids=list(hits),
            sampling=request.sampling,
            num_draft_computed=request.num_draft_computed,
        )

    def _count_admission(self, request: Request, now: float) -> None:
        is_first = request.started_at is None
        if is_first:
            request.started_at = now
            request.num_cached = request.num_computed
        if request.is_probe:
            return
        if is_first:
            self.stats.prompt_tokens_cached += request.num_computed
            self.stats.prompt_tokens_computed += request.num_prompt - request.num_computed
        if self.limits.enable_prefix_caching and request.takes_hits:
            self.stats.prefix_queried_tokens += len(request.token_ids)
            self.stats.prefix_hit_tokens += request.num_computed

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request that is in no step."""
        self.stats.preemptions += 1
        request.num_preemptions += 1
        self._release(request)
        self._waiting.push(request)

    # ------------------------------------------------------------------ parts of apply()

    def _observe_time(self, step: Step, result: StepResult, now: float) -> None:
        """Take note of how long a step took: its whole cycle, if there is one step at a time.

        The cycle of one of several includes waiting behind those ahead, which no choice of its
        drafts changes. What the engine says is then the same for each, and of the same measure as
        the draft model's part.
        """
        if self._speculation is None:
            return
        draft_seconds = result.draft_seconds
        is_alone = self.limits.max_steps_in_flight == 1
        seconds = now - step.planned_at if is_alone else result.seconds
        self._speculation.observe_step(step.rows, seconds, draft_seconds)
        if all(one.draft is NO_DRAFT for one in step.rows):
            return
        drafting = [one for one in step.rows if one.draft.is_by_engine]
        verifying = [one for one in step.rows if one.draft.num_drafts]
        for counts in [self.stats.drafts, *(one.request.drafts for one in drafting)]:
            counts.draft_seconds += draft_seconds
        if verifying:
            for counts in [self.stats.drafts, *(one.request.drafts for one in verifying)]:
                counts.verify_seconds += result.seconds - draft_seconds

    def _take(self, scheduled: Scheduled, row_result: RowResult) -> Update:
        """Take what a row committed; the request may end with it."""
        request = scheduled.request
        prompt_offset = request.num_computed
        num_tokens = len(request.token_ids)
        reason = self._append(request, row_result.token_ids)
        token_ids = request.token_ids[num_tokens:]
        # What follows a token that ended the request counts for nothing.
        num_accepted = max(0, len(token_ids) - 1)
        if num_drafts := scheduled.draft.num_drafts:
            assert self._speculation is not None
            right = len(row_result.token_ids) - 1
            if not scheduled.draft.is_given:
                self._speculation.observe_drafts(request, num_drafts, right)
            for counts in (request.drafts, self.stats.drafts):
                counts.observe(num_drafts, num_accepted)
        self._commit(scheduled, num_accepted)
        if token_ids and request in self._suspects:
            self._suspects.remove(request)
            request.num_known_at_death = None
        if reason is not None:
            self._drop(request)
        return Update(
            request=request,
            token_ids=token_ids,
            logprobs=row_result.logprobs and row_result.logprobs[: len(token_ids)],
            prompt_logprobs=row_result.prompt_logprobs,
            prompt_offset=prompt_offset,
            finish_reason=reason,
        )

    def _append(self, request: Request, run: list[int]) -> FinishReason | None:
        """Append a run of tokens, up to the first one that ends the request."""
        for token_id in run:
            request.token_ids.append(token_id)
            if request.expected_ids and request.expected_ids.popleft() != token_id:
                request.expected_ids.clear()
            reason = self._finish_reason(request, token_id)
            if reason is not None:
                return reason
        return None

    def _commit(self, scheduled: Scheduled, num_accepted: int) -> None:
        """Move the cursors over what was computed, and publish the blocks that they cover."""
        request, block_size = scheduled.request, self.limits.block_size
        num_known = request.num_computed + scheduled.num_tokens
        request.num_computed = num_known + num_accepted
        if scheduled.draft.is_by_engine:
            before = request.num_draft_computed
            after = scheduled.draft.computed_after(num_known, before, num_accepted)
            request.num_draft_computed = after
            block_ids = request.block_ids[before // block_size : after // block_size]
            self.kv.note_draft_kv(block_ids)
        if not self.limits.enable_prefix_caching:
            return
        self._extend_keys(request)
        for index in range(request.num_published, request.num_computed // block_size):
            self.kv.publish(request.block_ids[index], request.block_keys[index])
            request.num_published += 1

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        if token_id in request.stop_ids and request.num_generated >= request.min_tokens:
            return "stop"
        is_full = len(request.token_ids) >= self.limits.max_model_len
        return "length" if is_full or request.num_generated >= request.max_tokens else None

    # ------------------------------------------------------------------ shared

    def _extend_keys(self, request: Request) -> None:
        self._hasher.extend(request.block_keys, request.token_ids, request.cache_scope)

    def _drop_ended(self) -> None:
        """Forget what was ended from outside, but for what a step in flight computes."""
        ended, self._ended = self._ended, []
        for request in ended:
            if request.is_in_flight:
                self._ended.append(request)
            else:
                self._drop(request)

    def _drop(self, request: Request) -> None:
        """Forget a request for good."""
        request.is_ended = True
        if self._speculation is not None:
            self._speculation.forget(request)
        del self._requests[request.key]
        if request in self._suspects:
            self._suspects.remove(request)
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Take the row and the blocks of a running request. Blocks keep their content."""
        assert request.row is not None
        assert not request.is_in_flight, "a step in flight writes into these blocks"
        self._leaves.append(request.row)
        self._free_rows.append(request.row)
        self._running.remove(request)
        self.kv.release(request.block_ids)
        self._forget_kv(request)

    def _forget_kv(self, request: Request) -> None:
        request.row = None
        request.block_ids = []
        request.num_published = 0
        request.num_computed = 0
        request.num_draft_computed = 0


def _is_stuck(request: Request) -> bool:
    """Whether the engine died of it, maybe, at the same place as the last time."""
    before = request.num_known_at_death
    if before is None or not request.is_in_flight or request.is_ended:
        return False
    return len(request.token_ids) - before < PROGRESS
