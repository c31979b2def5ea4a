"""One step and its rows, from planning to application.

Owns what a plan says of it. Must not know why a row computes what it computes.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from charonia.control.state.request import Request
from charonia.protocol import BlockCopy, BlockLoad, BlockSave, NewRow, RowStep, StepPlan


@dataclass(frozen=True, slots=True)
class Draft:
    """What one row drafts in a step: see `protocol.RowStep`. `is_given`: it is the client's."""

    num_drafts: int = 0
    draft_ids: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    is_given: bool = False

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
        return replace(self, num_drafts=num_drafts, draft_ids=self.draft_ids[:num_drafts])

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
NO_BLOCKS: list[int] = []  # nobody appends to it


class Fetch(NamedTuple):
    """Blocks that a step loads for a request.

    Attributes:
        first: place of the first of them in the request's table.
        has_draft: of each, whether it has the draft model's KV.
    """

    request: Request
    first: int
    loads: list[BlockLoad]
    has_draft: list[bool]

    @property
    def block_ids(self) -> list[int]:
        """That nobody else holds until the step is applied."""
        return [load.block_id for load in self.loads]


@dataclass(slots=True)
class Step:
    """A step that is being planned, or in flight.

    Attributes:
        planned_at: the time given to `plan()`.
        budget: tokens that it may still take. prompt_budget: of these, such that are not the one
            token of a row that decodes.
        num_sampling: rows that will give a token.
        num_prompts, num_prompt_tokens: rows that compute more than a token of their own, and these.
        num_pairs: of one of these and a token that it looks at. num_before_rest: tokens of a prompt
            of which the step leaves a rest, up to that one; 0 where it leaves none.
        joins: rows that begin with it. copies: of blocks, for these.
        started: requests that begin with it, and had none of their tokens computed before.
        fetches: what it loads, for requests that wait. saves: blocks that it saves to tiers.
        discards: blocks that are set aside, of which no memory is left. num_blocks: that are in use
            then, with the null block; None is all.
        is_short: whether somebody lacks what requests in flight hold.
        requests, rows: who computes, and what the plan says of each.
        drafts: of some of them, by their places in these lists.
    """

    step_id: int
    planned_at: float
    budget: int
    prompt_budget: int
    num_sampling: int = 0
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_pairs: int = 0
    num_before_rest: int = 0
    joins: list[NewRow] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    discards: list[int] = field(default_factory=list)
    num_blocks: int | None = None
    is_short: bool = False
    requests: list[Request] = field(default_factory=list)
    rows: list[RowStep] = field(default_factory=list)
    drafts: dict[int, Draft] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """That it computes, without drafts."""
        return self.num_prompt_tokens + len(self.rows) - self.num_prompts

    @property
    def num_drafts(self) -> int:
        """That its rows verify."""
        return sum(draft.num_drafts for draft in self.drafts.values())

    @property
    def num_decode_drafts(self) -> int:
        """Of these, behind rows that compute no prompt."""
        return sum(
            draft.num_drafts
            for place, draft in self.drafts.items()
            if self.rows[place].num_tokens == 1
        )

    @property
    def is_empty(self) -> bool:
        """Whether the engine has nothing to do for it."""
        return not (self.rows or self.saves or self.fetches or self.discards)

    def as_plan(self, epoch: int, leaves: list[int]) -> StepPlan:
        """What the engine is told of it.

        Args:
            leaves: rows that were given back since the step before it.
        """
        return StepPlan(
            epoch=epoch,
            step_id=self.step_id,
            reset=self.step_id == 0,
            leaves=leaves,
            joins=self.joins,
            saves=self.saves,
            loads=[load for fetch in self.fetches for load in fetch.loads],
            discards=self.discards,
            num_blocks=self.num_blocks,
            copies=self.copies,
            rows=self.rows,
        )

    def samples(self, place: int) -> bool:
        """Whether the cursor of a request, which is in this step alone, reaches its last token."""
        request = self.requests[place]
        return request.num_computed + self.rows[place].num_tokens == len(request.token_ids)
