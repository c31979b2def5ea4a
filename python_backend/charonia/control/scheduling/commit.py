"""Commit: applies a step's results to its requests, some of which end with it.

Owns the path of a row's result into its request: tokens, cursors, drafts, its share of the step,
the end. Knows nothing about how a step is planned.
"""

from charonia.control.cache.block_tables import BlockTables
from charonia.control.drafts.speculation import Speculation
from charonia.control.policies import Service
from charonia.control.scheduling.live_requests import LiveRequests
from charonia.control.scheduling.poison_detector import PoisonDetector
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request, Update
from charonia.control.state.stats import SchedulerStats
from charonia.control.state.step import NO_DRAFT, Draft, Step
from charonia.protocol import RowResult, StepResult


class Commit:
    """Commits one epoch's steps, in the order of their plans.

    Args:
        poison_detector: told which requests made progress.
        service: told about generated tokens; None if the policy's order does not depend on them.
        speculation: told how many drafts were accepted. stats: counts drafts.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockTables,
        live: LiveRequests,
        poison_detector: PoisonDetector,
        service: Service | None,
        speculation: Speculation | None,
        stats: SchedulerStats,
    ) -> None:
        self._flops_per_token = limits.flops_per_token
        self._blocks = blocks
        self._live = live
        self._poison_detector = poison_detector
        self._service = service
        self._speculation = speculation
        self._stats = stats

    def commit(
        self, step: Step, result: StepResult, began_at: float, ended_at: float
    ) -> list[Update]:
        """Commit the results of a step's rows, and end the requests that are complete.

        Each request gets its share of the step, by its computed tokens; its observer is told.

        Args:
            began_at, ended_at: seconds.

        Returns:
            One update per request that committed tokens or prompt log-probabilities.
        """
        updates, drafts = [], step.drafts
        flops_per_token = self._flops_per_token
        seconds_per_token = result.seconds / max(1, step.num_tokens + step.num_drafts)
        suspect = self._poison_detector.first
        rows = zip(step.requests, step.rows, result.rows, strict=True)
        for place, (request, planned, row_result) in enumerate(rows):
            assert row_result.row == planned.row, "wrong row"
            draft = drafts.get(place, NO_DRAFT) if drafts else NO_DRAFT
            num_tokens = planned.num_tokens
            num_computed = num_tokens + draft.num_drafts
            request.engine_seconds += num_computed * seconds_per_token
            request.engine_flops += num_computed * flops_per_token
            if (observer := request.group.observer) is not None:
                observer.on_step(request, num_tokens, draft.num_drafts, began_at, ended_at)
            request.num_in_flight -= 1
            request.num_computing -= num_tokens
            if row_result.token_ids:
                request.num_sampling -= 1
            if not request.is_ended:
                if request is suspect and row_result.token_ids:
                    self._poison_detector.acquit(request)
                update = self._commit_row(request, num_tokens, draft, row_result)
                if update is not None:
                    updates.append(update)
            else:
                # Tokens sampled after its end are in no block that others can hit.
                num_tokens = min(num_tokens, len(request.token_ids) - request.num_computed)
                self._blocks.commit(request, num_tokens, draft, num_accepted=0)
        if self._service is not None:
            self._service.note_outputs(updates)
        if self._live.ended:
            self._live.drop_ended()
        return updates

    def _commit_row(
        self, request: Request, num_tokens: int, draft: Draft, row_result: RowResult
    ) -> Update | None:
        run, prompt_offset = row_result.token_ids, request.num_computed
        token_ids, reason = request.append(run)
        # Tokens behind the one that ended the request do not count.
        num_accepted = len(token_ids) - 1 if token_ids else 0
        if draft.num_drafts:
            assert self._speculation is not None
            counts = self._stats.drafts
            self._speculation.observe_run(request, draft, len(run), num_accepted, counts)
        self._blocks.commit(request, num_tokens, draft, num_accepted)
        if request is request.group.leader and request.num_computed >= request.num_prompt - 1:
            self._live.release_parked(request)
        if reason is not None:
            self._live.end(request, is_complete=True)
        elif not token_ids and row_result.prompt_logprobs is None:
            return None
        logprobs = row_result.logprobs
        if logprobs:
            logprobs = logprobs[: len(token_ids)]
        return Update(
            request, token_ids, logprobs, row_result.prompt_logprobs, prompt_offset, reason
        )
