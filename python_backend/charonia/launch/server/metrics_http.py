"""Serves the page of metrics over HTTP, to whoever can reach its port.

Owns the connections: how many, for how long, and what is answered but the page. Must not know what
is on the page.

    GET /metrics ──► a page that is begun after it came ──► answered, and closed
    another path, another method: 404      no page: 503      no HTTP: 400

One page is made at a time. Whoever comes meanwhile gets the next one, and shares it with all others
who do.
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

from charonia.errors import LaunchError

PATH = b"/metrics"
MAX_CONNECTIONS = 64
"""At a time; one more takes the place of the oldest that has not said yet what it wants."""
REQUEST_S = 5.0
"""In which a client says what it wants."""
PAGE_S = 8.0
"""In which the page is there, also for those who wait for the next one."""
TAKE_S = 5.0
"""In which a client takes its answer."""
CLOSE_S = 5.0
_RECEIVE_BYTES = 4096


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
        listener: this closes it.
        read: gives the page, in a thread, once at a time. It raises LaunchError where there is
            none, and whoever asked is told why.
        log: takes a line of what else goes wrong.
    """

    def __init__(
        self, listener: socket.socket, read: Callable[[], bytes], log: Callable[[str], None]
    ) -> None:
        self._listener = listener
        self._read = read
        self._log = log
        self._silent: dict[
            asyncio.WriteTransport, None
        ] = {}  # have not said what they want, by age
        self._num_asking = 0
        self._reading = asyncio.Lock()
        self._next: asyncio.Task[_Answer] | None = None  # a page that is not begun yet
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-metrics-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody, and stop listening."""
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
        server.close()  # the runner ends those who are still here

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
        """Whether one more may come."""
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
            return  # it has gone, or had to give way
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
                return await asyncio.shield(self._next)  # who goes away leaves it to the others
        except TimeoutError:
            return _TOO_SLOW

    async def _make_page(self) -> _Answer:
        """A page that is begun when none is being made any more."""
        async with self._reading:
            self._next = None  # whoever comes from now on wants a later one
            try:
                page = await asyncio.to_thread(self._read)
            except LaunchError as error:
                return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
            except Exception:
                self._log(f"the page of metrics could not be made: {traceback.format_exc()}")
                return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the page could not be made\n")
            return _Answer(HTTPStatus.OK, page, CONTENT_TYPE_PLAIN_0_0_4)


async def _receive_request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> h11.Request | None:
    """What a client wants; None of one that has gone.

    Raises:
        h11.RemoteProtocolError: it is no HTTP.
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
