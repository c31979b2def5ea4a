"""Predicts the wait of a new request for its first step, from the rate at which others start.

Owns the measurement. Must not know requests, only their prompts' tokens. By Little's law (1961, "A
Proof for the Queuing Formula: L = lambda W") the wait is the length of the queue, divided by the
rate at which it is served.
"""

from dataclasses import dataclass
from math import exp, inf

_MEMORY_S = 60.0
"""Seconds with a queue after which an observation's weight has fallen to 1/e."""
_MIN_SECONDS = 1.0
_MIN_STARTS = 4


@dataclass(slots=True)
class _Line:
    """The waiting requests of one priority.

    Attributes:
        since: since when the line has not been empty.
    """

    since: float
    num_tokens: int = 0


class QueueWait:
    """One queue, in which smaller priorities come first.

    Only time with a queue counts, because nothing can start without one. The rate is at least one
    mean request per memory span, so in a stall the prediction grows up to about a minute per
    waiting request. It is never less than the time since the last start. (The wait of the first
    request would be another bound, but some requests wait long by design while others start.)
    """

    def __init__(self) -> None:
        self._num_waiting = 0
        self._lines: dict[int, _Line] = {}  # by priority; none is empty
        self._started_at = -inf  # the last start
        self._since = 0.0
        self._seconds = 0.0  # with a queue, decayed
        self._tokens = 0.0  # that started, decayed
        self._all_seconds = 0.0
        self._all_tokens = 0
        self._num_starts = 0

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._num_waiting

    def note_arrival(self, num_tokens: int, priority: int, now: float) -> None:
        """A request with this many tokens waits from now on."""
        self._pass_time(now)
        self._num_waiting += 1
        self._lines.setdefault(priority, _Line(now)).num_tokens += num_tokens

    def note_start(self, num_tokens: int, priority: int, now: float) -> None:
        """A waiting request has started."""
        self.note_leaving(num_tokens, priority, now)
        self._tokens += num_tokens
        self._all_tokens += num_tokens
        self._num_starts += 1
        self._started_at = now

    def note_leaving(self, num_tokens: int, priority: int, now: float) -> None:
        """A waiting request leaves the queue without a start."""
        self._pass_time(now)
        self._num_waiting -= 1
        line = self._lines[priority]
        line.num_tokens -= num_tokens
        if not line.num_tokens:
            del self._lines[priority]

    def seconds(self, priority: int | None, now: float) -> float | None:
        """Predicted wait of a new request; None while there is too little data.

        Args:
            priority: of the new request; None is behind all others.
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
