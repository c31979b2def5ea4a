"""Speculation: which rows of a step verify drafts, how many, and where the drafts come from.

Owns the drafts of a step, from a request's room for them to their results. Knows nothing about
blocks, the budgets of other work, or how a depth is chosen.

A client may predict the first tokens of its answer; as long as the prediction is right, its tokens
are the drafts. All other drafts come from one of two places. A `Drafter` makes them here, from text
alone, and the plan carries them. Or the engine has a draft model, and the plan only gives their
number. The draft model has its own KV cache over the same blocks. It lags behind the target's while
nothing is drafted, so a row may have to catch up first, within the step's budget::

    known tokens   0 ............ num_draft_computed .......... last
                   └ the draft model's KV ┘└─ num_draft_tokens ──┘ then it drafts
"""

from itertools import islice

from charonia.control.drafts.depth import Candidate, DepthPolicy
from charonia.control.drafts.drafter import Drafter
from charonia.control.estimators.step_cost import StepShape
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request
from charonia.control.state.stats import DraftCounts
from charonia.control.state.step import NO_DRAFT, Draft, Step
from charonia.protocol import StepResult


class Speculation:
    """Drafts for the rows of a step.

    Args:
        max_drafts: most drafts per row and step.
        policy: chooses how many.
        drafter: makes drafts here; None if the engine's draft model makes them.
    """

    def __init__(
        self, *, max_drafts: int, policy: DepthPolicy, drafter: Drafter | None = None
    ) -> None:
        self._max_drafts = max_drafts
        self._policy = policy
        self._drafter = drafter

    def draft(self, step: Step, limits: Limits) -> list[tuple[int, Draft]]:
        """Choose the drafts of decoding rows; each with its index in the step.

        The first token of a request has no drafts unless its client predicted it, so that no draft
        model's prefill delays it. Drafts, and the tokens that the draft model must catch up on,
        stay within the step's budget; earlier rows are served first.
        """
        drafts = self._given(step, limits)
        num_given = sum(draft.num_drafts for _, draft in drafts)
        budget = step.budget - num_given
        with_guess = {place for place, _ in drafts}
        able = [
            place
            for place, request in enumerate(step.requests)
            if request.speculates
            and request.num_generated
            and step.samples(place)
            and place not in with_guess
        ]
        if not able or budget < 1:
            return drafts
        if self._drafter is not None:
            self._drafter.begin_step()
        depths = self._policy.choose(
            len(able),
            sum(row.num_tokens for row in step.rows) + num_given,
            lambda: [self._candidate(step.requests[place], limits) for place in able],
        )
        for place, depth in zip(able, depths, strict=False):
            draft = self._draft_one(step.requests[place], depth, budget)
            drafts.append((place, draft))
            budget -= draft.num_drafts + draft.num_draft_tokens
        return drafts

    def rests_after(self, step: Step) -> bool:
        """Return whether the step after one without drafts will have no drafts either.

        Then it may be planned before the tokens are known that drafts would follow.
        """
        if any(request.expected_ids for request in step.requests):
            return False
        if not any(request.speculates for request in step.requests):
            return True
        able = sum(request.speculates and request.num_generated > 0 for request in step.requests)
        return self._policy.rests(able, sum(row.num_tokens for row in step.rows))

    def note_rest(self) -> None:
        """A step without drafts was planned ahead."""
        self._policy.note_rest()

    def observe_run(
        self, request: Request, draft: Draft, num_run: int, num_accepted: int, counts: DraftCounts
    ) -> None:
        """Learn from the results of a row's drafts.

        Args:
            num_run: tokens that the engine committed for the row: accepted drafts and one more.
            num_accepted: drafts that the request accepted, up to its end.
            counts: counts of all requests.
        """
        if not draft.is_given:
            self._policy.observe_drafts(request, draft.num_drafts, num_run - 1)
        for each in (request.drafts, counts):
            each.observe(draft.num_drafts, num_accepted)

    def observe_step(
        self, step: Step, seconds: float, result: StepResult, counts: DraftCounts
    ) -> None:
        """Learn from the time of a step.

        Args:
            seconds: see `DepthPolicy`. counts: counts of all requests.
        """
        num_tokens = sum(row.num_tokens for row in step.rows)
        num_passes = num_draft_tokens = 0
        drafting: list[DraftCounts] = []
        verifying: list[DraftCounts] = []
        for place, draft in step.drafts.items():
            num_tokens += draft.num_drafts
            if draft.is_by_engine:
                num_passes = max(num_passes, draft.num_passes)
                num_draft_tokens += draft.num_draft_tokens + draft.num_passes - 1
                drafting.append(step.requests[place].drafts)
            if draft.num_drafts:
                verifying.append(step.requests[place].drafts)
        shape = StepShape(num_tokens, num_passes, num_draft_tokens)
        self._policy.observe_step(shape, seconds, result.draft_seconds)
        for each in (counts, *drafting):
            each.draft_seconds += result.draft_seconds
        if verifying:
            for each in (counts, *verifying):
                each.verify_seconds += result.seconds - result.draft_seconds

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._policy.forget(request)
        if self._drafter is not None:
            self._drafter.forget(request)

    def note_other_engine(self) -> None:
        """Another engine follows; all tokens of live requests are in its vocabulary."""
        if self._drafter is not None:
            self._drafter.forget_ended()

    def _given(self, step: Step, limits: Limits) -> list[tuple[int, Draft]]:
        """The drafts of rows whose clients gave a prediction that was right so far."""
        drafts = []
        budget = step.budget
        for place, request in enumerate(step.requests):
            if request.expected_ids and step.samples(place):
                most = min(_num_left(request, limits) - 1, self._max_drafts, budget)
                if draft_ids := list(islice(request.expected_ids, most)):
                    drafts.append((place, Draft(len(draft_ids), draft_ids, is_given=True)))
                    budget -= len(draft_ids)
        return drafts

    def _candidate(self, request: Request, limits: Limits) -> Candidate:
        """A request's room for drafts. A run has one token more, and must not pass the end.

        The engine's draft model may have less context than the target.
        """
        num_left = _num_left(request, limits)
        room, lag = min(num_left - 1, self._max_drafts), 0
        if self._drafter is None:
            room = min(room, limits.max_draft_len - len(request.token_ids))
            lag = _lag(request)
        return Candidate(request, room if room > 0 else 0, lag, num_left)

    def _draft_one(self, request: Request, depth: int, budget: int) -> Draft:
        if depth < 1 or budget < 1:
            return NO_DRAFT
        if self._drafter is not None:
            draft_ids = self._drafter.propose(request, min(depth, budget))
            return Draft(len(draft_ids), draft_ids)
        lag = _lag(request)
        if budget <= lag <= self._max_drafts + 1:
            return NO_DRAFT  # a later step has budget for drafts as well
        return Draft(max(0, min(depth, budget - lag)), [], min(lag, budget))


def _num_left(request: Request, limits: Limits) -> int:
    """Tokens that a request may still generate, >= 1."""
    num_room = limits.max_model_len - len(request.token_ids)
    return min(request.max_tokens - request.num_generated, num_room)


def _lag(request: Request) -> int:
    """Tokens that the engine's draft model must compute before it can draft."""
    return len(request.token_ids) - request.num_draft_computed
