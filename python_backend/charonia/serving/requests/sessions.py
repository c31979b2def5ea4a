"""Live requests: turns the engine's chunks into responses, in the order of each request.

Owns the sender threads and their queue. Must not know how chunks are computed.

    engine's thread ──sink──► session.chunks ──► ready queue ──► sender threads ──► responder
                              (piles up while                    (one at a time
                               a send is under way)               per session)

A send is a blocking round trip. Chunks that gather during a send go out as one response. A stream's
responses may be held until `stream_interval` tokens of a sample have gathered; first tokens, ends
and errors are never held. A session that does not stream waits for its last chunk.

If another model passes responses on, a send does not show its progress: Triton takes any number of
responses and keeps them for that model. If the model reports what it has passed on, each session
has only a few responses under way, beside the last one, and other chunks gather here. Without this
limit a slow model would delay every request by its backlog. A process that is lost would be worse:
Triton 2.51.0 takes `LOST_RESPONSE_S` for each response to it, one after the other. The limit is
`MAX_UNDER_WAY`, or with many sessions a share of `SHARED_UNDER_WAY`, at least one. Responses are
numbered and a report names the last one, so a lost report is made good by the next.

The chunks of a request are bounded by `max_tokens`: one small chunk per token. The limit of the
queue bounds the number of requests and their bytes.
"""

import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from queue import Empty, SimpleQueue

from charonia.core.output.outputs import Chunk
from charonia.errors import (
    CharoniaError,
    InvalidRequestError,
    ShuttingDownError,
)
from charonia.events import exception_event
from charonia.serving.conventions.schema import OutputOptions
from charonia.serving.requests.live_sessions import LiveSessions
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.responders import CancellationPoller, Responder, fail
from charonia.serving.requests.responses import Answer, chunk_outputs
from charonia.serving.requests.session import ChunkSource, Reports, Session
from charonia.serving.requests.tensors import INTERNAL_ERROR
from charonia.serving.requests.traced import note_sent
from charonia.text.tokenizer import Tokenizer
from charonia.tracing.request_trace import RequestTrace

MAX_UNDER_WAY = 4
SHARED_UNDER_WAY = 8
CLOSE_WAIT_S = 1.0
MAX_ERROR_WAIT_S = 2.0
"""Longest wait of an error for reports, in seconds."""
FIRST_REPORT_S = 5.0
"""Longest wait of a session for its first report, in seconds. A process that was stopped counts as
lost by then."""
LOST_RESPONSE_S = 1.0
"""Time that Triton takes for a response to a lost process, in seconds."""
_LOOK_S = 0.25


class _Timer:
    """Keys of sessions, each with the time when to look at it again."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, str]] = []  # a heap
        self._lock = threading.Lock()

    def add(self, at: float, key: str) -> None:
        with self._lock:
            heapq.heappush(self._waiting, (at, key))

    def take(self) -> str | None:
        """Remove and return a key whose time has come, or None."""
        with self._lock:
            if self._waiting and self._waiting[0][0] <= time.monotonic():
                return heapq.heappop(self._waiting)[1]
        return None


class Sessions:
    """All live requests of the scheduler's process.

    Args:
        queue_limit: limits of all of them.
        log: takes one line, from any thread.
        stream_interval: tokens of a sample that are gathered for each response after its first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_threads: int,
        queue_limit: QueueLimit,
        *,
        log: Callable[[str], None],
        stream_interval: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        self._queue_limit = queue_limit
        self._stream_interval = stream_interval
        self._log = log
        self._live = LiveSessions()
        self._has_reporter = False
        self._lost_until = 0.0  # Triton handles lost responses until then, by the monotonic clock
        self._is_closing = False
        self._ready: SimpleQueue[Session | None] = SimpleQueue()
        self._timer = _Timer()
        self._poller = CancellationPoller(self._abandon, log=log)
        self._threads = [
            threading.Thread(target=self._run, name=f"charonia-sender-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def open(
        self,
        key: str,
        options: OutputOptions,
        echo: Callable[[], str],
        responder: Responder,
        *,
        request_id: str = "",
        tenant: str = "",
        num_bytes: int = 0,
        num_samples: int = 1,
        trace: RequestTrace | None = None,
        trace_id: str | None = None,
    ) -> Session:
        """Open a session. `attach` says who makes its chunks, and `take` takes them.

        Args:
            num_samples: samples that the client gets.
            echo: returns the prompt's text, if it is prepended.
            trace: gets its responses, and ends with the last one.
            request_id, tenant, trace_id: its names in the log.

        Raises:
            InvalidRequestError: there is a live request with this key.
            QueueFullError: there are too many requests, or too many bytes.
        """
        self._queue_limit.take(num_bytes)
        name = request_id, tenant
        session = Session(
            key,
            options,
            echo,
            responder,
            name,
            num_bytes,
            num_samples,
            self._stream_interval,
            trace,
            trace_id,
        )
        if not self._live.add(session):
            self._queue_limit.give_back(num_bytes)
            raise InvalidRequestError("request_key belongs to a live request")
        if responder.is_acknowledged:
            session.reports = Reports.COMING
        elif session.is_named and self._has_reporter:
            session.reports = Reports.EXPECTED
        if responder.is_polled:
            self._poller.add(session, responder)
        return session

    def attach(self, session: Session, source: ChunkSource) -> None:
        """Note who makes the chunks of a session now, and pass on what was cancelled before."""
        with session.lock:
            session.source = None if session.has_end else source
            is_cancelled, samples = session.is_cancelled, session.cancelled_samples
        if is_cancelled:
            source.cancel()
        elif samples:
            source.cancel_samples(samples)

    def take(self, session: Session, chunk: Chunk) -> None:
        """Take a chunk. Never blocks."""
        with session.lock:
            session.take(chunk)
            self._queue(session)

    @property
    def num_live(self) -> int:
        """Number of requests whose last response is not sent."""
        return len(self._live)

    @property
    def has_polled(self) -> bool:
        """True if there are live requests that came from Triton and not through a proxy."""
        return self._poller.has_responders

    def drop(self, session: Session) -> None:
        """Remove a session whose request failed right after `open`; nothing is sent."""
        self._end(session)

    def find(self, request_id: str, tenant: str) -> list[Session]:
        """The live sessions of requests with this id and tenant."""
        name = (request_id, tenant)
        return [one for one in self._live.all() if one.name == name]

    def cancel(self, session: Session) -> None:
        """Cancel a request for its client; one that has ended is ignored."""
        with session.lock:
            is_news, session.is_cancelled = not session.is_cancelled, True
            source = session.source
        if is_news and source is not None:
            source.cancel()

    def cancel_samples(self, session: Session, indexes: Collection[int]) -> None:
        """Cancel samples of a request for its client; samples that it lacks are ignored."""
        with session.lock:
            own = frozenset(indexes).intersection(range(len(session.samples)))
            news = own - session.cancelled_samples
            session.cancelled_samples |= own
            source = session.source
        if news and source is not None:
            source.cancel_samples(news)

    def client_left(self, key: str) -> None:
        """Cancel a request whose client has disconnected; one that is not live is ignored."""
        session = self._live.get(key)
        if session is not None:
            self._abandon(session)

    def acknowledge(self, key: str, number: int) -> None:
        """Note that a proxy has passed on this many responses of a request."""
        session = self._live.get(key)
        if session is not None:
            with session.lock:
                session.note_delivered(number)
                self._queue(session)

    def report(self, key: str, number: int) -> None:
        """Note that responses of a request up to this one, counted from 1, were passed on."""
        self._has_reporter = not self._is_closing
        session = self._live.get(key)
        if session is not None:
            with session.lock:
                session.note_delivered(number)
                if not self._is_closing:
                    if session.reports is not Reports.COMING:  # so nothing of it was lost
                        session.send_end_at = None
                    session.reports, session.report_due_at = Reports.COMING, None
                self._queue(session)

    def stop_reports(self, is_lost: bool = False) -> None:
        """Stop waiting for reports, at least until the next one.

        Args:
            is_lost: responses under way are lost. Triton ends such requests with an error in its
                own time, so nothing more is sent for them before that. The other requests wait for
                their first report again, from a new process.
        """
        self._has_reporter = is_lost
        live = [one for one in self._live.all() if one.is_named and one.reports is not Reports.NONE]
        if is_lost:
            num_lost = sum(one.num_under_way for one in live if one.reports is not Reports.LOST)
            # Last responses that were under way are not counted: their sessions have ended.
            self._lost_until = max(self._lost_until, time.monotonic()) + num_lost * LOST_RESPONSE_S
        for session in live:
            with session.lock:
                if session.reports not in (
                    Reports.LOST,
                    Reports.NONE,
                ):  # `close` may have changed it
                    self._stop_reports_of(session, is_lost)
                self._queue(session)

    def _stop_reports_of(self, session: Session, is_lost: bool) -> None:
        """Stop the reports of one session. The caller holds its lock."""
        session.report_due_at = None
        if not is_lost:
            session.reports = Reports.NONE
        elif session.num_under_way == 0:
            session.reports = Reports.EXPECTED
        else:
            session.reports, session.send_end_at = Reports.LOST, self._lost_until
            self._timer.add(session.send_end_at, session.key)

    def close(self) -> None:
        """End the live requests with an error, and stop the threads."""
        for session in self._live.all():
            self.take(session, Chunk(session.key, error=ShuttingDownError()))
        self._wait_over(CLOSE_WAIT_S)
        self._is_closing = True
        for session in self._live.all():  # none waits for reports any more
            with session.lock:
                session.reports = Reports.NONE
                self._queue(session)
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()
        # Send sessions that threads have queued behind their end marks.
        self._ready.put(None)
        self._run()
        self._poller.close()

    def _wait_over(self, timeout: float) -> None:
        """Wait until all sessions have ended, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (len(self._live) or self._poller.has_late_ends) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _abandon(self, session: Session) -> None:
        session.is_abandoned = True
        self.cancel(session)

    def _queue(self, session: Session) -> None:
        """Queue a session for the sender threads if it may send. The caller holds its lock."""
        if session.is_queued or session not in self._live:
            return
        max_under_way = self._max_under_way(session)
        if session.may_send(max_under_way):
            session.is_queued = True
            self._ready.put(session)
        elif session.waits_with_end():
            if session.send_end_at is None:
                session.send_end_at = time.monotonic() + MAX_ERROR_WAIT_S
                self._timer.add(session.send_end_at, session.key)
        elif session.is_full(max_under_way) and session.reports is Reports.EXPECTED:
            self._await_report(session)

    def _await_report(self, session: Session) -> None:
        if session.report_due_at is None:
            # A new process may have to wait until Triton has handled the lost responses.
            session.report_due_at = max(time.monotonic(), self._lost_until) + FIRST_REPORT_S
            self._timer.add(session.report_due_at, session.key)

    def _max_under_way(self, session: Session) -> int:
        """Most responses of one session that may wait for a report."""
        if session.responder.is_acknowledged:  # they wait in a socket, not in Triton
            return MAX_UNDER_WAY
        share = SHARED_UNDER_WAY // max(self._live.num_named, 1)
        return max(1, min(share, MAX_UNDER_WAY))

    def _run(self) -> None:
        while (session := self._next()) is not None:
            with session.lock:
                if not session.may_send(self._max_under_way(session)):  # no longer
                    session.is_queued = False
                    self._queue(session)
                    continue
                chunks = session.give_out()
            began_at, has_failed = time.monotonic(), False
            try:
                self._send(session, chunks)
            except Exception:
                self._log(exception_event("response_not_sent", **session.log_fields))
                self._give_up(session)
                has_failed = True
            if session.trace is not None:
                self._trace(session, session.trace, chunks, began_at, has_failed=has_failed)
            with session.lock:
                session.is_queued = False
                self._queue(session)

    def _trace(
        self,
        session: Session,
        trace: RequestTrace,
        chunks: list[Chunk],
        began_at: float,
        *,
        has_failed: bool,
    ) -> None:
        """Note a response in the request's trace. Nothing that goes wrong here stops responses."""
        is_last = session not in self._live
        now = time.monotonic()
        try:
            note_sent(trace, chunks, began_at, now, is_last=is_last, has_failed=has_failed)
        except Exception:
            self._log(exception_event("request_not_traced", **session.log_fields))

    def _next(self) -> Session | None:
        """Wait for a session that may send; handle sessions whose wait is over."""
        while True:
            while (key := self._timer.take()) is not None:
                self._look_again(key)
            with contextlib.suppress(Empty):
                return self._ready.get(timeout=_LOOK_S)

    def _look_again(self, key: str) -> None:
        session = self._live.get(key)
        if session is None:
            return
        with session.lock:
            now = time.monotonic()
            if session.reports is Reports.LOST and (session.send_end_at or 0.0) <= now:
                session.reports = Reports.EXPECTED
            elif session.report_due_at is not None and session.report_due_at <= now:
                session.reports, session.report_due_at = Reports.NONE, None
            self._queue(session)

    def _send(self, session: Session, chunks: list[Chunk]) -> None:
        last = chunks[-1]
        if last.error is None:
            self._send_outputs(session, chunks, is_final=last.is_final)
        elif session.keeps_output(last.error):
            self._send_outputs(session, chunks, is_final=True)
        else:
            is_mid_stream = session.num_sent > 1
            chunks = [chunk for chunk in chunks if chunk.error is None]
            if session.options.is_streaming and chunks:
                self._send_outputs(session, chunks, is_final=False)
                is_mid_stream = True
                if self._put_back(session, last):
                    return
            self._end(session)
            is_postponed = session.is_abandoned or is_mid_stream
            if (
                is_postponed and not session.responder.is_acknowledged
            ):  # a proxy postpones by itself
                self._poller.end_later(
                    partial(fail, session.responder, last.error, self._log, session.log_fields)
                )
            else:
                session.responder.fail(last.error)

    def _put_back(self, session: Session, error: Chunk) -> bool:
        """Put an error back if it must wait; return whether it must."""
        with session.lock:
            session.chunks = [error]
            if not session.waits_with_end():
                session.chunks = []
            return bool(session.chunks)

    def _send_outputs(self, session: Session, chunks: list[Chunk], *, is_final: bool) -> None:
        echo = session.echo() if session.options.has_echo else ""
        answer = Answer(session.merged(chunks), echo, self._tokenizer)
        outputs = chunk_outputs(answer, session.options, session.chunk_key)
        if is_final:
            self._end(session)
        session.responder.send(outputs, is_final=is_final)

    def _end(self, session: Session) -> None:
        if self._live.remove(session):
            with session.lock:
                session.let_go()
            self._poller.remove(session)
            self._queue_limit.give_back(session.num_bytes)

    def _give_up(self, session: Session) -> None:
        """Cancel a request whose response could not be made or sent; send an internal error."""
        self.cancel(session)
        self._end(session)
        fail(session.responder, CharoniaError(INTERNAL_ERROR), self._log, session.log_fields)
