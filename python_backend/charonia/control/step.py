"""One step and its rows, from planning to application.

Owns what a plan says of each row. Must not know why a row computes what it computes.
"""

from dataclasses import dataclass, field, replace

from charonia.control.request import Request
from charonia.protocol import NewRow, RowStep


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


@dataclass(slots=True)
class Step:
    """A step that is being planned, or in flight.

    Attributes:
        planned_at: the time given to `plan()`.
        budget: tokens that it may still take. prompt_budget: of these, such that are not the one
            token of a row that decodes.
        num_sampling: rows that will give a token.
        num_prompts, num_prompt_tokens: rows that compute more than a token of their own, and these.
        joins: rows that begin with it.
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
    joins: list[NewRow] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    rows: list[RowStep] = field(default_factory=list)
    drafts: dict[int, Draft] = field(default_factory=dict)

    def samples(self, place: int) -> bool:
        """Whether the cursor of a request, which is in this step alone, reaches its last token."""
        request = self.requests[place]
        return request.num_computed + self.rows[place].num_tokens == len(request.token_ids)
