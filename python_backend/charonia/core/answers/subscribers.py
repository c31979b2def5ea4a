"""The live subscribers of shared computations: their timeouts, ends and counts.

Owns the place where such a request ends and is counted; `core.request_registry` does that for all
other requests. Must not know why one ends, nor who gets which chunk.
"""

from collections.abc import Callable

from charonia.core.answers.shared_computation import Subscriber
from charonia.core.gate.attainment import Attainment, RequestEnd
from charonia.core.gate.deadlines import Deadlines
from charonia.core.output.outputs import Chunk
from charonia.errors import CharoniaError
from charonia.events import event
from charonia.metrics.metrics import Metrics


class Subscribers:
    """All subscribers, by the keys of their requests.

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
        self._metrics = metrics
        self._attainment = attainment
        self._clock = clock
        self._log = log
        self._by_key: dict[str, Subscriber] = {}
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        """Number of subscribers."""
        return len(self._by_key)

    def get(self, key: str) -> Subscriber | None:
        """The subscriber with this key, or None."""
        return self._by_key.get(key)

    def add(self, subscriber: Subscriber) -> None:
        """Add a subscriber. Its timeouts count from its arrival."""
        self._by_key[subscriber.key] = subscriber
        self._deadlines.add(subscriber.request, subscriber.arrived_at)

    def take_due(self, now: float) -> list[tuple[str, bool]]:
        """Keys whose timeouts are over, and whether it was the timeout until the first step."""
        return self._deadlines.take_due(now)

    def note_first_token(self, subscriber: Subscriber) -> None:
        """Note that a subscriber's first token is there now."""
        subscriber.first_at = self._clock()
        waited_s = subscriber.first_at - subscriber.arrived_at
        self._metrics.observe_request("charonia_time_to_first_token_seconds", waited_s)

    def note_cancelled(self, subscriber: Subscriber) -> None:
        """Count and log a cancelled request, with the tokens that it had received."""
        self._metrics.count("charonia_cancellations_total")
        request, num_tokens = subscriber.request, sum(subscriber.num_tokens)
        self._log(event("request_cancelled", **request.log_fields, tokens=num_tokens))

    def end(self, subscriber: Subscriber, last: Chunk, now: float) -> None:
        """Remove and count a request with its last chunk; it may have had a cached answer."""
        self._by_key.pop(subscriber.key, None)
        self._deadlines.remove(subscriber.key)
        reason = subscriber.reason if last.error is None else last.error.kind
        self._count_end(subscriber, reason, now)

    def abandon(self, error: CharoniaError) -> None:
        """Remove all, and count them as ended with an error."""
        subscribers, now = self._by_key.values(), self._clock()
        self._by_key, self._deadlines = {}, Deadlines()
        for subscriber in subscribers:
            self._count_end(subscriber, error.kind, now)

    def _count_end(self, subscriber: Subscriber, reason: str, now: float) -> None:
        request = subscriber.request
        self._attainment.note_end(
            RequestEnd(
                tenant=request.params.tenant,
                reason=reason,
                queue_s=subscriber.queue_s(now),
                total_s=now - subscriber.arrived_at,
                num_prompt=len(request.prompt_ids),
                num_tokens=sum(subscriber.num_tokens),
                n=request.params.n,
                first_token_s=subscriber.first_token_s,
                inter_token_s=subscriber.inter_token_s,
                has_deadline=request.params.deadline_ms is not None,
            )
        )
