"""How long a request that comes now will wait for its first step, from how fast others began.

Owns the measurement. Must not know requests: their prompts' tokens stand for them. After Little
(1961, "A Proof for the Queuing Formula: L = lambda W"): what waits, divided by the rate at which it
leaves.
"""

from dataclasses import dataclass
from math import exp, inf

_MEMORY_S = 60.0
"""Seconds in which somebody waited after which what was seen counts for a third."""
_MIN_SECONDS = 1.0
_MIN_STARTS = 4


@dataclass(slots=True)
class _Line:
    """Those of one priority that wait.

    Attributes:
        since: from when on there were some without a break.
    """

    since: float
    num_tokens: int = 0


class QueueWait:
    """One queue, in which smaller priorities come first.

    Only the time counts in which somebody waits: else nobody could begin. Where nobody has begun
    for long, it is as if one had: so while all stands still what is predicted grows, up to a minute
    or so for each that waits. It is never less than the time for which nobody has begun. (The time
    for which the first one has waited would be another bound, but some wait for long by design,
    while others begin.)
    """

    def __init__(self) -> None:
        self._num_waiting = 0
        self._lines: dict[int, _Line] = {}  # by priority, those in which somebody waits
        self._started_at = -inf  # when one has begun last
        self._since = 0.0
        self._seconds = 0.0  # of late
        self._tokens = 0.0  # that began of late
        self._all_seconds = 0.0
        self._all_tokens = 0
        self._num_starts = 0

    def note_arrival(self, num_tokens: int, priority: int, now: float) -> None:
        """A request with so many tokens waits from now on."""
        self._pass_time(now)
        self._num_waiting += 1
        self._lines.setdefault(priority, _Line(now)).num_tokens += num_tokens

    def note_start(self, num_tokens: int, priority: int, now: float) -> None:
        """One of those who waited has had its first step."""
        self.note_leaving(num_tokens, priority, now)
        self._tokens += num_tokens
        self._all_tokens += num_tokens
        self._num_starts += 1
        self._started_at = now

    def note_leaving(self, num_tokens: int, priority: int, now: float) -> None:
        """One of them waits no longer, and did not begin."""
        self._pass_time(now)
        self._num_waiting -= 1
        line = self._lines[priority]
        line.num_tokens -= num_tokens
        if not line.num_tokens:
            del self._lines[priority]

    def seconds(self, priority: int | None, now: float) -> float | None:
        """That one would wait which comes now; None where that is not known yet.

        Args:
            priority: of that one; None is behind all others.
        """
        self._pass_time(now)
        ahead = [
            line for other, line in self._lines.items() if priority is None or other <= priority
        ]
        since = min((line.since for line in ahead), default=now)
        stalled_s = now - max(since, self._started_at)
        if self._all_seconds < _MIN_SECONDS or self._num_starts < _MIN_STARTS:
            return stalled_s if stalled_s >= _MIN_SECONDS else None
        num_tokens = sum(line.num_tokens for line in ahead)
        mean_tokens = self._all_tokens / self._num_starts
        return max(stalled_s, num_tokens * self._seconds / max(self._tokens, mean_tokens))

    def _pass_time(self, now: float) -> None:
        if self._num_waiting:
            passed = max(0.0, now - self._since)
            kept = exp(-passed / _MEMORY_S)
            self._seconds = self._seconds * kept + passed
            self._all_seconds += passed
            self._tokens *= kept
        self._since = now
