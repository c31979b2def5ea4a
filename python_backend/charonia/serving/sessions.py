"""Live requests: from the engine's chunks to responses, each request's in order.

Owns the sender threads and what waits for them. Must not know how chunks come about.

    engine's thread ──sink──► session.chunks ──► ready queue ──► sender threads ──► outlet
                              (piles up while                    (one at a time
                               a send is under way)               per session)

A send is a blocking round trip, so whatever piled up for a request while one was under way goes
out as one response. A session that does not stream waits for its last chunk.

Where another model hands responses on, a send says nothing of that: Triton takes any number and
keeps them for that model. If it reports what it has handed on, a session has no more than
`MAX_UNDER_WAY` responses on that way, but for the last one, and the rest piles up here. Otherwise a
model that is slower than the engine would delay every request by all that it has not done yet.
"""

import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from charonia.engine.outputs import Chunk
from charonia.errors import CharoniaError, InvalidRequestError, ShuttingDownError
from charonia.serving.outlets import CancellationPoller, Outlet
from charonia.serving.schema import OutputOptions, chunk_outputs
from charonia.serving.tensors import INTERNAL_ERROR
from charonia.text.tokenizer import Tokenizer

MAX_UNDER_WAY = 4


class Session:
    """One live request.

    Attributes:
        chunks: waiting to be sent; is_queued: the ready queue or a sender thread has the session.
        is_abandoned: its client has gone.
        is_reported: somebody says when a response has been handed on.
        num_under_way: responses that were sent and not reported.
    """

    def __init__(self, key: str, options: OutputOptions, prompt_text: str, outlet: Outlet) -> None:
        self.key = key
        self.options = options
        self.prompt_text = prompt_text
        self.outlet = outlet
        self.chunks: list[Chunk] = []
        self.is_queued = False
        self.is_abandoned = False
        self.is_reported = False
        self.num_under_way = 0
        self.lock = threading.Lock()

    def may_send(self) -> bool:
        """Whether what waits may go out now. The caller holds the lock."""
        if not self.chunks:
            return False
        if self.chunks[-1].is_final:
            return True
        is_full = self.is_reported and self.num_under_way >= MAX_UNDER_WAY
        return self.options.is_streaming and not is_full


class Sessions:
    """All live requests of the scheduler's process.

    Args:
        cancel: called with the key of a request whose client has gone.
        log: takes one line, from any thread.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_threads: int,
        *,
        cancel: Callable[[str], None],
        log: Callable[[str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._cancel = cancel
        self._log = log
        self._sessions: dict[str, Session] = {}
        self._ready: SimpleQueue[Session | None] = SimpleQueue()
        self._poller = CancellationPoller(self.abandon)
        self._threads = [
            threading.Thread(target=self._run, name=f"charonia-sender-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def open(
        self, key: str, options: OutputOptions, prompt_text: str, outlet: Outlet
    ) -> Callable[[Chunk], None]:
        """Take a request in; returns the sink for its chunks, which never blocks.

        Raises:
            InvalidRequestError: there is a live request with this key.
        """
        session = Session(key, options, prompt_text, outlet)
        if self._sessions.setdefault(key, session) is not session:
            raise InvalidRequestError("request_key belongs to a live request")
        if outlet.is_polled:
            self._poller.add(key, outlet)
        return lambda chunk: self._take(session, chunk)

    def drop(self, key: str) -> None:
        """Forget a request that got no further than `open`; nothing is sent."""
        self._poller.remove(key)
        self._sessions.pop(key, None)

    def abandon(self, key: str) -> None:
        """Cancel a request whose client has gone; nothing happens when it is not live."""
        session = self._sessions.get(key)
        if session is not None:
            session.is_abandoned = True
        self._cancel(key)

    def report(self, key: str | None) -> None:
        """A response of this request has been handed on; None: nobody reports any more."""
        if key is not None:
            session = self._sessions.get(key)
            if session is not None:
                with session.lock:
                    session.is_reported = True
                    session.num_under_way -= 1
                    self._queue(session)
            return
        for session in list(self._sessions.values()):
            with session.lock:
                session.is_reported = False
                session.num_under_way = 0
                self._queue(session)

    def close(self) -> None:
        """End what is still live with an error, and stop the threads."""
        for key, session in list(self._sessions.items()):
            self._take(session, Chunk(key, error=ShuttingDownError()))
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()
        # What a thread put back behind the marks that ended them.
        self._ready.put(None)
        self._run()
        self._poller.close()

    def _take(self, session: Session, chunk: Chunk) -> None:
        with session.lock:
            session.chunks.append(chunk)
            self._queue(session)

    def _queue(self, session: Session) -> None:
        """Have a sender thread take the session. The caller holds its lock."""
        if not session.is_queued and session.may_send():
            session.is_queued = True
            self._ready.put(session)

    def _run(self) -> None:
        while (session := self._ready.get()) is not None:
            with session.lock:
                chunks, session.chunks = session.chunks, []
                session.num_under_way += 1
            try:
                self._send(session, chunks)
            except Exception:
                self._log(f"a response could not be sent: {traceback.format_exc()}")
                self._give_up(session)
            with session.lock:
                session.is_queued = False
                self._queue(session)

    def _send(self, session: Session, chunks: list[Chunk]) -> None:
        last = chunks[-1]
        if last.error is None:
            self._send_outputs(session, chunks, is_final=last.is_final)
        else:
            if session.options.is_streaming and chunks[:-1]:
                self._send_outputs(session, chunks[:-1], is_final=False)
            self._end(session)
            if session.is_abandoned:
                self._poller.fail_later(session.outlet, last.error)
            else:
                session.outlet.fail(last.error)

    def _send_outputs(self, session: Session, chunks: list[Chunk], *, is_final: bool) -> None:
        outputs: dict[str, list[Any]] = chunk_outputs(
            Chunk.merge(chunks), session.options, session.prompt_text, self._tokenizer
        )
        if is_final:
            self._end(session)
        session.outlet.send(outputs, is_final=is_final)

    def _end(self, session: Session) -> None:
        self._poller.remove(session.key)
        self._sessions.pop(session.key, None)

    def _give_up(self, session: Session) -> None:
        """Cancel a request whose response could not be made or sent, and tell the client."""
        self._cancel(session.key)
        self._end(session)
        try:
            session.outlet.fail(CharoniaError(INTERNAL_ERROR))
        except Exception:
            self._log(f"nor could the error: {traceback.format_exc()}")
