"""One step and its rows, from planning to application.

Owns the content of a plan. Knows nothing about why a row computes what it computes.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from charonia.control.state.request import Request
from charonia.protocol import BlockCopy, BlockLoad, BlockSave, NewRow, RowStep, StepPlan


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafts of one row in a step, see `protocol.RowStep`. `is_given`: they are the client's."""

    num_drafts: int = 0
    draft_ids: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    is_given: bool = False

    @property
    def is_by_engine(self) -> bool:
        """True if the engine's draft model computes anything for it."""
        return self.num_draft_tokens > 0

    @property
    def num_passes(self) -> int:
        """Passes of the draft model: the first catches up and drafts; others draft one token."""
        return max(self.num_drafts, 1) if self.is_by_engine else 0

    def capped(self, num_drafts: int) -> "Draft":
        """The same with at most `num_drafts` drafts."""
        if num_drafts >= self.num_drafts:
            return self
        return replace(self, num_drafts=num_drafts, draft_ids=self.draft_ids[:num_drafts])

    def computed_after(self, num_tokens: int, num_computed: int, num_accepted: int) -> int:
        """Tokens whose draft KV is valid after the step.

        Args:
            num_tokens: tokens known before the step.
            num_computed: tokens whose draft KV was valid then.
        """
        if not self.num_drafts:
            return num_computed + self.num_draft_tokens
        # The draft model never computes its last draft.
        return num_tokens + min(num_accepted, self.num_drafts - 1)


NO_DRAFT = Draft()
NO_BLOCKS: list[int] = []  # never appended to


class Fetch(NamedTuple):
    """Blocks that a step loads for a request.

    Attributes:
        first: index of the first of them in the request's block table.
        has_draft: for each block, whether it has the draft model's KV.
    """

    request: Request
    first: int
    loads: list[BlockLoad]
    has_draft: list[bool]

    @property
    def block_ids(self) -> list[int]:
        """The blocks to load into. Nothing else holds them until the step is applied."""
        return [load.block_id for load in self.loads]


@dataclass(slots=True)
class Step:
    """A step that is being planned, or in flight.

    Attributes:
        planned_at: the time given to `plan()`.
        budget: tokens that it may still take. prompt_budget: how many of these may be prompt
            tokens, i.e. go to rows with more than one token left to compute.
        num_sampling: rows that will sample a token.
        num_prompts, num_prompt_tokens: rows that have more than one token left to compute, and the
            tokens of these rows in this step.
        num_pairs: pairs of such a token and a token that it attends to. num_keys: the tokens that
            such a row attends to, summed over these rows.
        num_before_rest: computed tokens of a prompt that the step leaves unfinished; 0 if it leaves
            none.
        joins: rows that begin with it. copies: block copies for them.
        started: requests that begin with it for the first time.
        fetches: loads for waiting requests. saves: blocks that it saves to tiers.
        discards: blocks without memory, which are set aside. num_blocks: blocks in use after that,
            with the null block; None is all.
        is_short: whether a request lacks something that requests in flight hold.
        requests, rows: the requests that compute, and the plan's row for each.
        drafts: drafts of some of them, by index in these lists.
    """

    step_id: int
    planned_at: float
    budget: int
    prompt_budget: int
    num_sampling: int = 0
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_pairs: int = 0
    num_keys: int = 0
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
        """Tokens that it computes, without drafts."""
        return self.num_prompt_tokens + len(self.rows) - self.num_prompts

    @property
    def num_drafts(self) -> int:
        """Drafts that its rows verify."""
        if not self.drafts:
            return 0
        return sum(draft.num_drafts for draft in self.drafts.values())

    @property
    def num_decode_drafts(self) -> int:
        """Drafts of rows that compute no prompt."""
        if not self.drafts:
            return 0
        return sum(
            draft.num_drafts
            for place, draft in self.drafts.items()
            if self.rows[place].num_tokens == 1
        )

    @property
    def is_empty(self) -> bool:
        """True if the engine has nothing to do in it."""
        return not (self.rows or self.saves or self.fetches or self.discards)

    def keeps(self, request: Request) -> bool:
        """Return whether a running request must keep its row and blocks until the next step.

        It joins with this step, or another sample does and copies a block of it. A load into that
        block would be performed before the copy.
        """
        if any(join.row == request.row for join in self.joins):
            return True
        return any(copy.source in request.block_ids for copy in self.copies)

    def as_plan(self, epoch: int, leaves: list[int]) -> StepPlan:
        """The message to the engine.

        Args:
            leaves: rows that were freed since the step before it.
        """
        return StepPlan(
            epoch=epoch,
            step_id=self.step_id,
            reset=self.step_id == 0,
            leaves=leaves,
            joins=self.joins,
            saves=self.saves,
            loads=[load for fetch in self.fetches for load in fetch.loads] if self.fetches else [],
            discards=self.discards,
            num_blocks=self.num_blocks,
            copies=self.copies,
            rows=self.rows,
        )

    def samples(self, place: int) -> bool:
        """Return whether a request's cursor reaches its last token. It must be in no other step."""
        request = self.requests[place]
        return request.num_computed + self.rows[place].num_tokens == len(request.token_ids)
