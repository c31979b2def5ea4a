"""Speculation: which rows of a step verify drafts, how many, and whose guesses they are.

Owns the drafts of a step, from what a request has room for to what became of them. Must not know
blocks, budgets of other work, or how a depth is chosen.

Drafts come from one of two places. A `Drafter` guesses here, from text alone, and the plan carries
the guesses. Or the engine has a draft model, and the plan only says how many to guess; that model
has a KV cache of its own over the same blocks, which lags behind the target's while nothing is
drafted, so that a row may have to catch up first, as far as the step's budget goes::

    known tokens   0 ............ num_draft_computed .......... last
                   └ the draft model's KV ┘└─ num_draft_tokens ──┘ then it guesses
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from charonia.control.depth import DepthPolicy
from charonia.control.drafter import Drafter
from charonia.control.request import Request
from charonia.control.step_cost import StepShape


@dataclass(frozen=True, slots=True)
class Draft:
    """What one row drafts in a step: see `protocol.RowStep`."""

    num_drafts: int = 0
    draft_ids: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0

    @property
    def is_by_engine(self) -> bool:
        """Whether the engine's draft model computes anything for it."""
        return self.num_draft_tokens > 0

    @property
    def num_passes(self) -> int:
        """Of the draft model: the first one catches up and guesses, the others guess one each."""
        return max(self.num_drafts, 1) if self.is_by_engine else 0

    def capped(self, num_drafts: int) -> "Draft":
        """The same with fewer drafts, where there is no room for all."""
        if num_drafts >= self.num_drafts:
            return self
        return Draft(num_drafts, self.draft_ids[:num_drafts], self.num_draft_tokens)

    def computed_after(self, num_tokens: int, num_computed: int, num_accepted: int) -> int:
        """Tokens whose draft KV is valid when the step is through.

        Args:
            num_tokens: known before the step. num_computed: whose draft KV was valid then.
        """
        if not self.num_drafts:
            return num_computed + self.num_draft_tokens
        # The last draft is guessed but never computed.
        return num_tokens + min(num_accepted, self.num_drafts - 1)


NO_DRAFT = Draft()


class Speculation:
    """Drafts for the rows of a step.

    Args:
        max_drafts: per row and step.
        policy: chooses how many.
        drafter: guesses here; None where the engine's draft model guesses.
        max_draft_len: tokens that the engine's draft model can look back on.
    """

    def __init__(
        self,
        *,
        max_drafts: int,
        policy: DepthPolicy,
        drafter: Drafter | None = None,
        max_draft_len: int = 0,
    ) -> None:
        self._max_drafts = max_drafts
        self._policy = policy
        self._drafter = drafter
        self._max_draft_len = max_draft_len

    def draft(
        self, requests: Sequence[Request], rooms: Sequence[int], num_tokens: int, budget: int
    ) -> list[Draft]:
        """Choose the drafts of rows that are about to sample.

        Args:
            rooms: how many drafts each request may have at most.
            num_tokens: that the step computes without drafts, of all rows.
            budget: tokens that drafts may add to the step, with those that the draft model
                has to catch up on; earlier requests are served first.
        """
        most = [
            min(room, self._max_drafts, self._reach(request))
            for request, room in zip(requests, rooms, strict=True)
        ]
        depths = self._policy.choose(requests, most, num_tokens)
        drafts = []
        for request, depth in zip(requests, depths, strict=True):
            draft = self._draft_one(request, depth, budget)
            drafts.append(draft)
            budget -= draft.num_drafts + draft.num_draft_tokens
        return drafts

    def observe(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Take note of how a row's drafts fared."""
        self._policy.observe_drafts(request, draft.num_drafts, num_accepted)

    def observe_step(
        self, num_tokens: int, drafts: Sequence[Draft], seconds: float, draft_seconds: float
    ) -> None:
        """Take note of how long a step took.

        Args:
            num_tokens: that the target computed, drafts included.
            seconds: from its planning to its end. draft_seconds: the draft model's part.
        """
        by_engine = [draft for draft in drafts if draft.is_by_engine]
        shape = StepShape(
            num_tokens=num_tokens,
            num_passes=max((draft.num_passes for draft in by_engine), default=0),
            num_draft_tokens=sum(
                draft.num_draft_tokens + draft.num_passes - 1 for draft in by_engine
            ),
        )
        self._policy.observe_step(shape, seconds, draft_seconds)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._policy.forget(request)
        if self._drafter is not None:
            self._drafter.forget(request)

    def _reach(self, request: Request) -> int:
        """How many tokens can be guessed: the draft model may have less context than the target."""
        if self._drafter is not None:
            return self._max_drafts
        return max(0, self._max_draft_len - len(request.token_ids))

    def _draft_one(self, request: Request, depth: int, budget: int) -> Draft:
        if depth < 1 or budget < 1:
            return NO_DRAFT
        if self._drafter is not None:
            draft_ids = self._drafter.propose(request, min(depth, budget))
            return Draft(len(draft_ids), draft_ids)
        behind = len(request.token_ids) - request.num_draft_computed
        return Draft(max(0, min(depth, budget - behind)), [], min(behind, budget))
