"""The session of one live request: its unsent chunks, and whether they may be sent.

Owns the chunks of one request between the engine and its client. Must not know other sessions, nor
threads: the caller holds the lock.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Protocol

from charonia.core.output.outputs import Chunk
from charonia.errors import CharoniaError, RequestCancelledError
from charonia.events import request_fields
from charonia.serving.conventions.schema import OutputOptions
from charonia.serving.requests.responders import Responder
from charonia.tracing.request_trace import RequestTrace


class Reports(Enum):
    """State of the reports on a session's responses, from the model that passes them on."""

    NONE = "nobody says anything of them"
    EXPECTED = "the first report is counted on, for a time"
    COMING = "there are reports"
    LOST = "what was under way never arrives"


class ChunkSource(Protocol):
    """The maker of one request's chunks."""

    def cancel(self) -> None:
        """Cancel the request; its last chunk says so. One that has ended is ignored."""
        ...

    def cancel_samples(self, indexes: Collection[int]) -> None:
        """Cancel samples of the request, likewise."""
        ...


class Session:
    """One live request.

    Attributes:
        name: request id and tenant. num_bytes: of the request, as received.
        samples: state of each sample, as its client knows it.
        source: makes its chunks; None before it is known, and after the last one.
        has_end: whether its last chunk has come, or is awaited no more.
        trace: gets its responses; None if it is not traced. trace_id: of its W3C trace context.
        chunks: unsent ones. is_queued: whether the ready queue or a sender thread has the session.
        is_cancelled: whether it was cancelled. is_abandoned: whether its client has disconnected.
        cancelled_samples: indexes of the cancelled samples.
        reports: state of the reports. report_due_at: when the wait for the first report times out,
            by the monotonic clock; None without such a wait.
        send_end_at: when the wait of its end times out, likewise.
        num_sent: responses so far. num_delivered: reported ones.
    """

    def __init__(
        self,
        key: str,
        options: OutputOptions,
        echo: Callable[[], str],
        responder: Responder,
        name: tuple[str, str],
        num_bytes: int,
        num_samples: int,
        stream_interval: int,
        trace: RequestTrace | None = None,
        trace_id: str | None = None,
    ) -> None:
        self.key = key
        self.options = options
        self.echo = echo
        self.responder = responder
        self.name = name
        self.num_bytes = num_bytes
        self.trace = trace
        self.trace_id = trace_id
        self.source: ChunkSource | None = None
        self.has_end = False
        self.samples = [Chunk(key, index=index) for index in range(num_samples)]
        self.chunks: list[Chunk] = []
        self._stream_interval = stream_interval
        self._num_awaited = [1] * num_samples  # tokens of each sample until a response is due
        self._is_due = False
        self.is_queued = False
        self.is_cancelled = False
        self.is_abandoned = False
        self.cancelled_samples: frozenset[int] = frozenset()
        self.reports = Reports.NONE
        self.report_due_at: float | None = None
        self.send_end_at: float | None = None
        self.num_sent = 0
        self.num_delivered = 0
        self.lock = threading.Lock()

    @property
    def log_fields(self) -> dict[str, str | None]:
        """The fields of lines that concern it."""
        request_id, tenant = self.name
        return request_fields(
            key=self.key, request_id=request_id, tenant=tenant, trace_id=self.trace_id
        )

    @property
    def chunk_key(self) -> str:
        """The key of the response that is being sent: its own, its number, and the tenant."""
        return f"{self.key}.{self.num_sent}.{self.name[1]}"

    @property
    def num_under_way(self) -> int:
        """Responses that were sent but not reported."""
        return self.num_sent - self.num_delivered

    @property
    def is_named(self) -> bool:
        """True if its responses carry its key, so that another model can report them."""
        is_streaming = self.options.has_key and self.options.is_streaming
        return is_streaming and not self.responder.is_acknowledged

    def note_delivered(self, number: int) -> None:
        """Note a report of responses up to this one, from 1. The caller holds the lock."""
        self.num_delivered = max(min(number, self.num_sent), self.num_delivered)

    def take(self, chunk: Chunk) -> None:
        """Add an unsent chunk; chunks after the last one are dropped. The caller holds the lock."""
        if self.has_end:
            return
        if chunk.is_final:
            self.let_go()
        self.chunks.append(chunk)
        self._num_awaited[chunk.index] -= len(chunk.token_ids)
        if chunk.ends_sample or self._num_awaited[chunk.index] <= 0:
            self._is_due = True

    def let_go(self) -> None:
        """Expect no more chunks. The caller holds the lock."""
        self.source, self.has_end = None, True

    def give_out(self) -> list[Chunk]:
        """Remove and return all chunks for the next response. The caller holds the lock."""
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            if chunk.token_ids:
                self._num_awaited[chunk.index] = self._stream_interval
        self._is_due = False
        self.num_sent += 1
        return chunks

    def may_send(self, max_under_way: int) -> bool:
        """Return whether the chunks may be sent now. The caller holds the lock."""
        if not self.chunks:
            return False
        if self.chunks[-1].is_final:
            return not self.waits_with_end()
        if (
            self.chunks[-1].error is not None
        ):  # each sample has a chunk with it; the last one is final
            return False
        return self.options.is_streaming and self._is_due and not self.is_full(max_under_way)

    def is_full(self, max_under_way: int) -> bool:
        """Return whether a report must come before the next response."""
        if self.reports is Reports.NONE:
            return False
        return self.reports is Reports.LOST or self.num_under_way >= max_under_way

    def merged(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """One chunk for each sample, with the state of those that have none here."""
        merged = []
        for index, sample in enumerate(self.samples):
            own = [chunk for chunk in chunks if chunk.index == index]
            merged.append(Chunk.merge([sample, *own]) if own else sample)
        self.samples = [chunk.emptied() for chunk in merged]
        return merged

    def keeps_output(self, error: CharoniaError) -> bool:
        """Return whether its client gets the output so far instead of this error."""
        is_cancelled = isinstance(error, RequestCancelledError)
        return self.options.keeps_cancelled and is_cancelled and not self.is_abandoned

    def waits_with_end(self) -> bool:
        """Return whether the last chunk must wait until Triton has handled the responses before it.

        An ensemble that gets an error while a step still passes on responses may keep the request
        live for ever. If responses are lost, Triton waits for each in turn and then ends the
        request by itself; another response would only prolong that.
        """
        if not self.chunks or not self.chunks[-1].is_final:
            return False
        has_error = self.chunks[-1].error is not None and self.reports is not Reports.NONE
        is_late = self.send_end_at is not None and self.send_end_at <= time.monotonic()
        is_early = has_error or self.reports is Reports.LOST
        return is_early and self.num_under_way > 0 and not is_late
