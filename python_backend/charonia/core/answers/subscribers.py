"""The live subscribers of shared computations; `core.request_registry` has all other requests.

Owns what is counted of them before they end. Must not know why one ends, nor who gets which chunk.
"""

from collections.abc import Callable

from charonia.core.answers.shared_computation import Subscriber
from charonia.core.gate.attainment import Attainment
from charonia.core.live_entries import LiveEntries
from charonia.core.output.outputs import Chunk
from charonia.errors import CharoniaError
from charonia.events import event
from charonia.metrics.metrics import Metrics


class Subscribers(LiveEntries[Subscriber]):
    """All subscribers.

    Args:
        clock: monotonic, in seconds. log: takes one line.
    """

    def __init__(
        self,
        metrics: Metrics,
        attainment: Attainment,
        *,
        clock: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        super().__init__(attainment)
        self._metrics = metrics
        self._clock = clock
        self._log = log

    def note_first_token(self, subscriber: Subscriber) -> None:
        """Note that a subscriber's first token is there now."""
        subscriber.first_at = self._clock()
        waited_s = subscriber.first_at - subscriber.arrived_at
        self._metrics.observe_request("charonia_time_to_first_token_seconds", waited_s)

    def note_cancelled(self, subscriber: Subscriber) -> None:
        """Count and log a cancelled request, with the tokens that it had received."""
        self._metrics.count("charonia_cancellations_total")
        fields, num_tokens = subscriber.request.log_fields, subscriber.num_tokens
        self._log(event("request_cancelled", **fields, tokens=num_tokens))

    def end(self, subscriber: Subscriber, last: Chunk, now: float) -> None:
        """Remove and count a request with its last chunk; it may have had a cached answer."""
        reason = subscriber.reason if last.error is None else last.error.kind
        self._end(subscriber, reason, now)

    def _end(self, entry: Subscriber, reason: str, now: float) -> None:
        """See `LiveEntries`."""
        super()._end(entry, reason, now)
        entry.leave()

    def abandon(self, error: CharoniaError) -> None:
        """Remove all, and count them as ended with an error."""
        now = self._clock()
        for subscriber in list(self):
            self._end(subscriber, error.kind, now)
