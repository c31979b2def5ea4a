"""One step and its rows, from planning to application.

Owns what a plan says of a row. Must not know why a row computes what it computes.
"""

from dataclasses import dataclass, field, replace

from charonia.control.request import Request
from charonia.protocol import RowStep


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


@dataclass(slots=True)
class Scheduled:
    """What a request computes in the step that is planned or in flight."""

    request: Request
    num_tokens: int
    new_block_ids: list[int] = field(default_factory=list)
    draft: Draft = NO_DRAFT

    @property
    def samples(self) -> bool:
        """Whether the cursor reaches the last known token."""
        return self.request.num_computed + self.num_tokens == len(self.request.token_ids)

    def row_step(self) -> RowStep:
        """What the plan says of it."""
        assert self.request.row is not None
        draft = self.draft
        return RowStep(
            self.request.row,
            self.num_tokens,
            self.new_block_ids,
            draft.num_drafts,
            draft.draft_ids,
            draft.num_draft_tokens,
        )


@dataclass(slots=True)
class Step:
    """A step that is being planned, or in flight.

    Attributes:
        planned_at: the time given to `plan()`.
    """

    step_id: int
    planned_at: float
    rows: list[Scheduled] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the target computes, drafts included."""
        return sum(row.num_tokens + row.draft.num_drafts for row in self.rows)
