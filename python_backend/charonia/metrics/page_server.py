"""Serves the metrics page over HTTP.

Owns what a client may ask, what is answered beside the page, and for how long a page is waited for.
Must not know what is on the page. `sockets/server.py` bounds the connections.

    GET /metrics ──► a page that is begun after it came ──► answered, and closed
    another path, another method: 404      no page: 503      no HTTP: 400

One page is made at a time. Requests that come meanwhile share the next one.
"""

import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
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
"""Timeout for making the page, also for clients that wait for the next one."""
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
_TOO_SLOW = _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the metrics take too long\n")
_ENDING = _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the server of the metrics ends\n")


class PageServer:
    """Serves one page until `close`.

    Args:
        listener: closed by this.
        read: makes the page, in a thread, once at a time. It raises NoPageError if there is
            none, and the client is told why.
        log: takes a line for any other error.
    """

    def __init__(
        self, listener: socket.socket, read: Callable[[], bytes], log: Callable[[str], None]
    ) -> None:
        self._read = read
        self._log = log
        self._requests: WeakKeyDictionary[Channel, h11.Request] = WeakKeyDictionary()
        self._maker = ThreadPoolExecutor(1, "charonia-metrics-page")
        self._lock = threading.Lock()
        self._next: Future[_Answer] | None = None  # a page that is not begun yet
        # Nobody is told of clients that are silent or go away.
        self._server = Server(listener, self._has_asked, self._serve, log=lambda line: None)
        self._server.start()

    def close(self) -> None:
        """Stop listening, and close all connections.

        A page that is being made is waited for, no longer than its clients do.
        """
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    # ------------------------------------------------------------------ the threads of connections

    def _has_asked(self, channel: Channel) -> bool:
        """Receive a client's request; returns whether there is one."""
        try:
            request = _receive_request(channel.socket)
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            _send(channel.socket, _Answer(status, f"{error}\n".encode()), is_head=False)
            return False
        if request is None:
            return False
        self._requests[channel] = request
        return True

    def _serve(self, connection: Connection) -> None:
        request = self._requests[connection.channel]
        is_head = request.method == b"HEAD"
        _send(connection.channel.socket, self._answer(request), is_head=is_head)

    def _answer(self, request: h11.Request) -> _Answer:
        path = request.target.partition(b"?")[0]
        if path != PATH or request.method not in (b"GET", b"HEAD"):
            return _NOT_FOUND
        page = self._next_page()
        if page is None:
            return _ENDING
        try:
            return page.result(PAGE_S)
        except TimeoutError:
            return _TOO_SLOW
        except CancelledError:
            return _ENDING

    def _next_page(self) -> Future[_Answer] | None:
        """The page that is begun next; None at the end."""
        with self._lock:
            if self._next is None:
                try:
                    self._next = self._maker.submit(self._make_page)
                except RuntimeError as error:
                    self._log(f"error: a page of metrics could not be begun: {error}")
            return self._next

    # ------------------------------------------------------------------ the thread that makes pages

    def _make_page(self) -> _Answer:
        with self._lock:
            self._next = None  # later requests want a later page
        try:
            return _Answer(HTTPStatus.OK, self._read(), CONTENT_TYPE_PLAIN_0_0_4)
        except NoPageError as error:
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
        except Exception:
            self._log(f"error: the page of metrics could not be made: {traceback.format_exc()}")
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the page could not be made\n")


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
