"""The requests that the engine service has accepted: their places at the gate, who hears of them.

Owns who gets the chunks of each, and the lines about it. Must not know how it is computed.
"""

from collections.abc import Callable, Collection
from functools import partial

from charonia.core.answers import AnswerCache, Computed
from charonia.core.gate.gate import Gate
from charonia.core.gate.queue_order import Entry
from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import Chunk
from charonia.core.recording.recorder import RecordedRequest
from charonia.core.request_events import RequestEvents
from charonia.core.request_log import FollowedRequest
from charonia.errors import CharoniaError

Sink = Callable[[Chunk], None]


class AcceptedRequests:
    """The accepted requests that have not ended, in the order of admission. For all threads.

    Args:
        gate: admitted them. answers: computes them.
        post: has a call made in the service's thread.
    """

    def __init__(
        self, gate: Gate, answers: AnswerCache, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self.gate = gate
        self.answers = answers
        self.post = post
        self._live: dict[Entry, AcceptedRequest] = {}

    def __len__(self) -> int:
        """Their number."""
        return len(self._live)

    def all(self) -> "list[AcceptedRequest]":
        """All of them."""
        return list(self._live.values())

    def of(self, entry: Entry) -> "AcceptedRequest | None":
        """The request with this entry of the gate; None if it has ended."""
        return self._live.get(entry)

    def arrivals(self, count: int) -> list[float]:
        """Arrivals of the first so many of them, without probes, in ascending order."""
        entries = [entry for entry in list(self._live) if entry.is_counted]
        return sorted(entry.arrived_at for entry in entries[:count])

    def add(self, accepted: "AcceptedRequest") -> None:
        """Add a request."""
        self._live[accepted.entry] = accepted

    def remove(self, accepted: "AcceptedRequest") -> None:
        """Remove a request that ends; it leaves the gate."""
        self.gate.leave(accepted.entry)
        self._live.pop(accepted.entry, None)


class AcceptedRequest(RequestEvents):
    """An accepted request, by which its client can cancel it.

    Args:
        key: of the request. accepted: it and the others. sink: takes its chunks.
        followed: writes log lines about it; None for a probe.
        recorded: writes its line of the record; None without a record.

    Attributes:
        entry: of the gate.
    """

    def __init__(
        self,
        key: str,
        entry: Entry,
        accepted: AcceptedRequests,
        sink: Sink,
        followed: FollowedRequest | None,
        recorded: RecordedRequest | None,
    ) -> None:
        self.entry = entry
        self._key = key
        self._all = accepted
        self._sink = sink
        self._followed = followed
        self._recorded = recorded
        self._computed: Computed | None = None

    # ------------------------------------------------------------------ from any thread

    def cancel(self) -> None:
        """Cancel it, unless it has ended."""
        self._all.post(self._cancel)

    def cancel_samples(self, indexes: Collection[int]) -> None:
        """Cancel samples of it; samples that have ended are ignored."""
        self._all.post(partial(self._cancel_samples, indexes))

    # ------------------------------------------------------------------ in the service's thread

    def compute(self, request: GenerationRequest, arrived_at: float, digest: bytes | None) -> None:
        """Have it computed; the arguments are those of `AnswerCache.add`."""
        computed = self._all.answers.add(request, self, arrived_at, digest)
        if self._all.of(self.entry) is self:  # else it had a cached answer, and has ended
            self._computed = computed

    def end(self, error: CharoniaError) -> None:
        """End it with an error, unless it has ended."""
        if self._computed is not None:
            self._all.answers.end(self._computed, error)

    def fail(self, error: CharoniaError) -> None:
        """Tell its client of an error, where what computed it is lost."""
        self.on_chunk(Chunk(self._key, error=error))

    def _cancel(self) -> None:
        if self._computed is not None:
            self._all.answers.cancel(self._computed)

    def _cancel_samples(self, indexes: Collection[int]) -> None:
        if self._computed is not None:
            self._all.answers.cancel_samples(self._computed, indexes)

    # ------------------------------------------------------------------ from what computes it

    def on_chunk(self, chunk: Chunk) -> None:
        """See `RequestEvents`."""
        if chunk.is_final:
            self._computed = None
            self._all.remove(self)
        if self._followed is not None:
            self._followed.note(chunk)
        if self._recorded is not None:
            self._recorded.note(chunk)
        self._sink(chunk)

    def on_started(self) -> None:
        """See `RequestEvents`."""
        self._all.gate.note_started(self.entry)
        if self._followed is not None:
            self._followed.note_started()

    def on_joined(self) -> None:
        """See `RequestEvents`."""
        self._all.gate.note_joined(self.entry)
