"""The scheduler's counters. Owns their names only."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Outcome of drafts, of one request or of all.

    Attributes:
        num_rounds: a row's steps that verified drafts; each commits one token beside those
            accepted.
        num_drafted, num_accepted: tokens; a draft behind a token that ended its request does not
            count as accepted.
        drafted_at, accepted_at: the same by position in a run of drafts.
        draft_seconds: time of the draft model, in steps in which it computed something for the row.
        verify_seconds: time of the rest of the engine, in steps that verified drafts of the row.
            Both are the time of the whole step, because all rows wait for it.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count one row's drafts in one step."""
        self.num_rounds += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        while len(self.drafted_at) < num_drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for place in range(num_drafted):
            self.drafted_at[place] += 1
        for place in range(num_accepted):
            self.accepted_at[place] += 1


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start.

    `prompt_tokens_computed` and `prompt_tokens_cached` count each request once, at its first
    admission. `blocks_saved` counts a block once per tier; `blocks_loaded` counts blocks from any
    tier.

    Three values are gauges: `draft_depth`, the drafts per decoding row in the last planned step;
    and `max_rows` and `max_step_tokens`, the limits of a step now.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    blocks_evicted: int = 0
    prefix_waits: int = 0
    blocks_saved: int = 0
    blocks_loaded: int = 0
    loads_failed: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    draft_depth: float = 0.0
    max_rows: int = 0
    max_step_tokens: int = 0
