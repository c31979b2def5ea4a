"""Serves the metrics page over HTTP.

Owns what a client may ask, what is answered beside the page, and for how long a page is waited for.
Must not know what is on the page. `sockets/server.py` bounds the connections.

    GET /metrics ──► a page that is begun after it came ──► answered, and closed
    another path, another method: 404      no page: 503      no HTTP: 400

One page is made at a time. Requests that come meanwhile share the next one.
"""

import math
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from weakref import WeakKeyDictionary

import h11
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.server import Server

PATH = b"/metrics"
REQUEST_S = 5.0
"""Timeout for a client's request."""
PAGE_S = 8.0
"""How long a client waits while a page is made for others."""
TAKE_S = 5.0
"""Timeout for a client to take its answer."""
_RECEIVE_BYTES = 4096


class NoPageError(Exception):
    """No page is available at this moment; the text says why."""


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


_NOT_FOUND = _Answer(HTTPStatus.NOT_FOUND, b"there is nothing but GET /metrics\n")
_UNMADE = _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the page could not be made\n")
_TOO_SLOW = _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the metrics take too long\n")


class PageServer:
    """Serves one page until `close`.

    Args:
        listener: closed by this.
        read: makes pages, one at a time. A client waits for its own as long as that takes. Raises
            NoPageError if there is no page; the client is told why.
        log: takes a line for any other error.
    """

    def __init__(
        self, listener: socket.socket, read: Callable[[], bytes], log: Callable[[str], None]
    ) -> None:
        self._read = read
        self._log = log
        self._requests: WeakKeyDictionary[Channel, h11.Request] = WeakKeyDictionary()
        self._changed = threading.Condition()
        self._is_making = False
        self._latest, self._latest_at = _TOO_SLOW, -math.inf  # an answer, and when it was begun
        # Nobody is told of clients that are silent or go away.
        self._server = Server(listener, self._has_asked, self._serve, log=lambda line: None)
        self._server.start()

    def close(self) -> None:
        """Stop listening, hang up on clients that have not asked, and answer the others.

        A page that takes more than seconds is not waited for.
        """
        self._server.close()

    def _has_asked(self, channel: Channel) -> bool:
        """Receive a client's request; returns whether there is one."""
        try:
            request = _receive_request(channel.socket)
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            _send(channel.socket, _Answer(status, f"{error}\n".encode()), is_head=False)
            return False
        if request is not None:
            self._requests[channel] = request
        return request is not None

    def _serve(self, connection: Connection) -> None:
        request = self._requests[connection.channel]
        is_head = request.method == b"HEAD"
        is_page = request.target.partition(b"?")[0] == PATH and (
            is_head or request.method == b"GET"
        )
        answer = self._page_of_now() if is_page else _NOT_FOUND
        _send(connection.channel.socket, answer, is_head=is_head)

    def _page_of_now(self) -> _Answer:
        """Return a page that is begun after this call. Calls that wait share the next one."""
        called_at = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self._latest_at >= called_at or not self._is_making, PAGE_S
            )
            if self._latest_at >= called_at:
                return self._latest
            if self._is_making:
                return _TOO_SLOW
            self._is_making = True
            begun_at = time.monotonic()
        page = _UNMADE
        try:
            page = self._make_page()
        finally:
            with self._changed:
                self._latest, self._latest_at, self._is_making = page, begun_at, False
                self._changed.notify_all()
        return page

    def _make_page(self) -> _Answer:
        try:
            return _Answer(HTTPStatus.OK, self._read(), CONTENT_TYPE_PLAIN_0_0_4)
        except NoPageError as error:
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
        except Exception:
            self._log(f"error: the page of metrics could not be made: {traceback.format_exc()}")
            return _UNMADE


def _receive_request(connection: socket.socket) -> h11.Request | None:
    """Receive a client's request; None if it has gone.

    Raises:
        h11.RemoteProtocolError: it is not HTTP. OSError: it has gone, or is too slow.
    """
    http = h11.Connection(h11.SERVER)
    deadline = time.monotonic() + REQUEST_S
    while (event := http.next_event()) is h11.NEED_DATA:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        http.receive_data(connection.recv(_RECEIVE_BYTES))
    return event if isinstance(event, h11.Request) else None


def _send(connection: socket.socket, answer: _Answer, *, is_head: bool) -> None:
    """Send an answer, and wait until it is taken. Raises OSError: it is not."""
    headers = [
        ("Content-Type", answer.content_type),
        ("Content-Length", str(len(answer.body))),
        ("Connection", "close"),
    ]
    status = answer.status
    head = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
    connection.settimeout(TAKE_S)
    encoded = h11.Connection(h11.SERVER).send(head) or b""
    connection.sendall(encoded if is_head else encoded + answer.body)
