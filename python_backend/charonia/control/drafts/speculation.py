"""Speculation: which rows of a step verify drafts, how many, and whose guesses they are.

Owns the drafts of a step, from what a request has room for to what became of them. Must not know
blocks, budgets of other work, or how a depth is chosen.

A client may give a guess at the first tokens of its answer; as long as it is right, it is what is
verified. All other drafts come from one of two places. A `Drafter` guesses here, from text alone,
and the plan carries the guesses. Or the engine has a draft model, and the plan only says how many
to guess; that model has a KV cache of its own over the same blocks, which lags behind the target's
while nothing is drafted, so that a row may have to catch up first, as far as the step's budget
goes::

    known tokens   0 ............ num_draft_computed .......... last
                   └ the draft model's KV ┘└─ num_draft_tokens ──┘ then it guesses
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
        max_drafts: per row and step.
        policy: chooses how many.
        drafter: guesses here; None where the engine's draft model guesses.
    """

    def __init__(
        self, *, max_drafts: int, policy: DepthPolicy, drafter: Drafter | None = None
    ) -> None:
        self._max_drafts = max_drafts
        self._policy = policy
        self._drafter = drafter

    def draft(self, step: Step, limits: Limits) -> list[tuple[int, Draft]]:
        """Choose the drafts of those rows that decode; each with its place in the step.

        The first token of a request comes without, so that no draft model's prompt delays it,
        unless its client gave a guess. Drafts, and what the draft model has to catch up on, stay
        within the step's budget; earlier rows are served first.
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
        """Whether nobody is to draft in the step that follows one without drafts.

        That step may then be planned before the tokens are known that drafts would follow.
        """
        if any(request.expected_ids for request in step.requests):
            return False
        if not any(request.speculates for request in step.requests):
            return True
        able = sum(request.speculates and request.num_generated > 0 for request in step.requests)
        return self._policy.rests(able, sum(row.num_tokens for row in step.rows))

    def note_rest(self) -> None:
        """A step was planned in which nobody was to draft."""
        self._policy.note_rest()

    def observe_run(
        self, request: Request, draft: Draft, num_run: int, num_accepted: int, counts: DraftCounts
    ) -> None:
        """Take note of how a row's drafts fared.

        Args:
            num_run: tokens that the row's step gave, of which all but the last were drafts.
            num_accepted: drafts that the request has taken.
            counts: of all requests.
        """
        if not draft.is_given:
            self._policy.observe_drafts(request, draft.num_drafts, num_run - 1)
        for each in (request.drafts, counts):
            each.observe(draft.num_drafts, num_accepted)

    def observe_step(
        self, step: Step, seconds: float, result: StepResult, counts: DraftCounts
    ) -> None:
        """Take note of how long a step took.

        Args:
            seconds: see `DepthPolicy`. counts: of all requests.
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

    def _given(self, step: Step, limits: Limits) -> list[tuple[int, Draft]]:
        """The drafts of rows whose clients gave a guess that was right so far."""
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
        """What drafts could do for a request: a run has one token more, and must not pass the end.

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
            return NO_DRAFT  # a little later there is budget for drafts as well
        return Draft(max(0, min(depth, budget - lag)), [], min(lag, budget))


def _num_left(request: Request, limits: Limits) -> int:
    """Tokens that it may still generate, >= 1."""
    num_room = limits.max_model_len - len(request.token_ids)
    return min(request.max_tokens - request.num_generated, num_room)


def _lag(request: Request) -> int:
    """Tokens that the engine's draft model has to compute before it can guess."""
    return len(request.token_ids) - request.num_draft_computed
