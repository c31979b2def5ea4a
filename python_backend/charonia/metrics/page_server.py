"""Serves the metrics page over HTTP.

Owns the connections: how many, for how long, and what is answered beside the page. Must not know
what is on the page.

    GET /metrics ──► a page that is begun after it came ──► answered, and closed
    another path, another method: 404      no page: 503      no HTTP: 400

One page is made at a time. Requests that come meanwhile share the next one.
"""

import asyncio
import contextlib
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import h11
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

PATH = b"/metrics"
MAX_CONNECTIONS = 64
"""At a time. A further one replaces the oldest that has not sent its request."""
REQUEST_S = 5.0
"""Timeout for a client's request."""
PAGE_S = 8.0
"""Timeout for making the page, also for clients that wait for the next one."""
TAKE_S = 5.0
"""Timeout for a client to take its answer."""
CLOSE_S = 5.0
_RECEIVE_BYTES = 4096


class NoPageError(Exception):
    """There is no page at this moment; the text says why."""


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


_NOT_FOUND = _Answer(HTTPStatus.NOT_FOUND, b"there is nothing but GET /metrics\n")
_TOO_SLOW = _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the metrics take too long\n")


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
        self._listener = listener
        self._read = read
        self._log = log
        self._silent: dict[asyncio.WriteTransport, None] = {}  # have not sent their request, by age
        self._num_asking = 0
        self._reading = asyncio.Lock()
        self._next: asyncio.Task[_Answer] | None = None  # a page that is not begun yet
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-metrics-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and stop listening."""
        with contextlib.suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(CLOSE_S)
        self._listener.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._host, sock=self._listener)
        await self._stopped.wait()
        server.close()  # the runner ends the remaining ones

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        transport = writer.transport
        try:
            if self._make_room():
                self._silent[transport] = None
                await self._converse(reader, writer)
        except (OSError, TimeoutError, h11.ProtocolError):
            pass  # it has gone, or is too slow
        finally:
            self._silent.pop(transport, None)
            transport.abort()

    def _make_room(self) -> bool:
        """Make room for one more connection; returns whether there is."""
        if len(self._silent) + self._num_asking < MAX_CONNECTIONS:
            return True
        if not self._silent:
            return False
        oldest = next(iter(self._silent))
        del self._silent[oldest]
        oldest.abort()
        return True

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await _receive_request(connection, reader)
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            answer = _Answer(status, f"{error}\n".encode())
            await _send(connection, writer, answer, is_head=False)
            return
        if request is None or writer.transport not in self._silent:
            return  # it has gone, or had to make room
        del self._silent[writer.transport]
        self._num_asking += 1
        try:
            answer = await self._answer(request)
            await _send(connection, writer, answer, is_head=request.method == b"HEAD")
        finally:
            self._num_asking -= 1

    async def _answer(self, request: h11.Request) -> _Answer:
        path = request.target.partition(b"?")[0]
        if path != PATH or request.method not in (b"GET", b"HEAD"):
            return _NOT_FOUND
        if self._next is None:
            self._next = asyncio.create_task(self._make_page())
        try:
            async with asyncio.timeout(PAGE_S):
                return await asyncio.shield(self._next)  # others may still want it
        except TimeoutError:
            return _TOO_SLOW

    async def _make_page(self) -> _Answer:
        """Make a page, once no other is being made."""
        async with self._reading:
            self._next = None  # later requests want a later page
            try:
                page = await asyncio.to_thread(self._read)
            except NoPageError as error:
                return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
            except Exception:
                self._log(f"error: the page of metrics could not be made: {traceback.format_exc()}")
                return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the page could not be made\n")
            return _Answer(HTTPStatus.OK, page, CONTENT_TYPE_PLAIN_0_0_4)


async def _receive_request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> h11.Request | None:
    """Receive a client's request; None if it has gone.

    Raises:
        h11.RemoteProtocolError: it is not HTTP.
    """
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(_RECEIVE_BYTES))
    return event if isinstance(event, h11.Request) else None


async def _send(
    connection: h11.Connection, writer: asyncio.StreamWriter, answer: _Answer, *, is_head: bool
) -> None:
    """Send an answer, and wait until it is taken."""
    headers = [
        ("Content-Type", answer.content_type),
        ("Content-Length", str(len(answer.body))),
        ("Connection", "close"),
    ]
    status = answer.status
    head = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
    writer.write(connection.send(head) or b"")
    if not is_head:
        writer.write(answer.body)
    async with asyncio.timeout(TAKE_S):
        await writer.drain()
        writer.close()
        await writer.wait_closed()
