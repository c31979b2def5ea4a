"""What the scheduler counts. Owns no more than the names."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start. Tokens count once per request for the prompt's source."""

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
