"""Client connections: uvicorn's, with bounds that uvicorn lacks.

Owns how much of an answer this process buffers, how long a request's head may be, and
how a connection is aborted. Must not know what is sent.
"""

import socket
from asyncio import TimerHandle, Transport
from typing import TYPE_CHECKING, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

HEAD_S = 30.0
"""Timeout for a request's head, from the connection or the first byte on."""
IDLE_S = 75
"""Timeout for the next request on a connection. Proxies and load balancers keep theirs for up to a
minute. A request that they send while the connection is being closed here is lost."""
MAX_HEAD_BYTES = 2**16
WRITE_BUFFER_BYTES = 0
"""An answer's next part waits while this process still has more than this of the one before it."""
UNSENT_BYTES = 2**14
"""The kernel takes no more while it has so much that it has not sent yet. Without this bound it
takes megabytes, and a slow reader looks like one that reads nothing."""
_ABORT = "charonia.abort"
_OFFER = b"upgrade"


class _Parser(httptools.HttpRequestParser):
    """Httptools' parser.

    Attributes:
        rest: what came behind a head that offers another protocol. The parser is of no use then.
    """

    def __init__(self, protocol: "Connection") -> None:
        super().__init__(protocol)
        self.rest = b""
        # As in uvicorn: what follows a connection's last request is no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        """See httptools."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self.rest = data[offer.args[0] :]
            raise


class _OldCycle(RequestResponseCycle):
    """A request in HTTP/1.0 and its answer.

    An answer whose length is not known ends with the connection: such a client may not get chunks
    (RFC 9112, section 6.1). Uvicorn would send them.
    """

    _ends_with_connection = False

    async def send(self, message: "ASGISendEvent") -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            if b"content-length" not in names:
                self._ends_with_connection = True
                self.chunked_encoding = False
        elif self._ends_with_connection and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, with httptools. Use a subclass from `bounded`.

    A pipelined request is not accepted. The connection ends with the current answer, and the client
    may send the request again on another connection. Uvicorn would stop reading, and would then not
    notice that the client has left.

    An offer to speak another protocol (`upgrade`, RFC 9110, section 7.8) is ignored. Java's client
    offers HTTP/2 by default. Httptools ends such a request with its head, and uvicorn would drop
    the body. So a new parser gets the head again, without the offer.
    """

    stall_s = 60.0
    _num_head_bytes = 0
    _is_ignoring = False
    _head_again: bytes | None = None
    parser: _Parser
    _head_timer: TimerHandle | None = None
    _tail_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        super().connection_made(transport)
        self.parser = _Parser(self)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_head_timer()
        self._stop_tail_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            super().data_received(data)
            if self._head_again is not None:
                data, self._head_again = self._head_again + self.parser.rest, None
                self.parser = _Parser(self)
                super().data_received(data)
            if self._is_idle and self._head_timer is None:
                # Whatever came began no request, and uvicorn has stopped its own timer.
                self._start_head_timer()

    @property
    def _is_idle(self) -> bool:
        """True if there is no request to be read or answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        """True if a request has been received completely, and its answer is not complete."""
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
        self._stop_tail_timer()
        self._start_head_timer()
        cast(Scope, self.scope)["extensions"] = {_ABORT: self.transport.abort}

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._count(len(url))
        if not self._is_ignoring:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self._count(len(name) + len(value))
        if not self._is_ignoring:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._is_ignoring:
            return
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._head_again = self._head_without_offer()
            return
        self._stop_head_timer()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _OldCycle  # uvicorn has made it, and has not run it yet

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if not self._is_ignoring:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self._is_ignoring and self._head_again is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn. The client has to take what is still buffered, or the connection ends."""
        super().on_response_complete()
        self._watch_tail(None)

    def _head_without_offer(self) -> bytes:
        """Write the head of the current request without the header that makes the offer."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != _OFFER]
        return b"\r\n".join([*lines, b"", b""])

    def _watch_tail(self, num_before: int | None) -> None:
        """Abort the connection if nothing has been taken since there were `num_before` bytes."""
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes == num_before:
            self.transport.abort()
        elif num_bytes:
            self._tail_timer = self.loop.call_later(self.stall_s, self._watch_tail, num_bytes)

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_tail_timer(self) -> None:
        if self._tail_timer is not None:
            self._tail_timer.cancel()
            self._tail_timer = None

    def _count(self, num_bytes: int) -> None:
        """Count bytes of the head. Raises if there are too many: httptools ends the connection."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"the head has more than {MAX_HEAD_BYTES} bytes")


def bounded(stall_timeout_s: float) -> type[Connection]:
    """Return connections that end if a client takes nothing of the end of an answer for so long."""

    class Bounded(Connection):
        stall_s = stall_timeout_s

    return Bounded


def abort(scope: Scope) -> None:
    """Abort the connection of a request, and drop what waits to be sent."""
    scope["extensions"][_ABORT]()
