"""Client connections: uvicorn's, with bounds that uvicorn lacks.

Owns how much of an answer this process buffers, how long a request's head may be, and
how a connection is aborted. Must not know what is sent.
"""

from asyncio import TimerHandle, Transport
from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 30.0
"""Timeout for a request's head, from the connection or the last answer on."""
MAX_HEAD_BYTES = 2**16
WRITE_BUFFER_BYTES = 2**14
"""What exceeds this waits in the kernel, whose buffers the operator bounds."""
_ABORT = "charonia.abort"


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, with httptools.

    A pipelined request is not accepted. The connection ends with the current answer, and the client
    may send the request again on another connection. Uvicorn would stop reading, and would then not
    notice that the client has left.
    """

    _num_head_bytes = 0
    _is_ignoring = False
    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            super().data_received(data)

    @property
    def _is_answering(self) -> bool:
        """Whether a request has been received completely, and its answer is not complete."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._is_answering:  # both came at once
            self._is_ignoring = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self._num_head_bytes = 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)
        cast(Scope, self.scope)["extensions"] = {_ABORT: self.transport.abort}

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._stop_timer()
        if not self._is_ignoring:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if not self._is_ignoring:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self._is_ignoring:
            super().on_message_complete()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _count(self, num_bytes: int) -> None:
        """Count bytes of the head. Raises if there are too many: httptools ends the connection."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"the head has more than {MAX_HEAD_BYTES} bytes")


def abort(scope: Scope) -> None:
    """Abort the connection of a request, and drop what waits to be sent."""
    scope["extensions"][_ABORT]()
