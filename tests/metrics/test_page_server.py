"""The HTTP server of the metrics page: what is answered, and how much of anything is held."""

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from charonia.launch.server.processes import listen
from charonia.metrics import page_server
from charonia.metrics.page_server import NoPageError, PageServer
from charonia.sockets.server import MAX_CONNECTIONS
from support.e2e import HTTP, wait_for
from support.waiting import WAIT_S

Start = Callable[[Callable[[], bytes]], int]
PAGE = b"# HELP a Something.\n# TYPE a gauge\na 1\n"


@pytest.fixture
def start() -> Iterator[Start]:
    """Serves a page on a free port of 127.0.0.1 until the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(read: Callable[[], bytes]) -> int:
            listener = stack.enter_context(listen("127.0.0.1", 0, "metrics"))
            port: int = listener.getsockname()[1]
            stack.enter_context(contextlib.closing(PageServer(listener, read, print)))
            return port

        yield start


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/metrics"


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def answer_to(port: int, data: bytes) -> bytes:
    """All that comes back on a connection of its own."""
    received = b""
    with connect(port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        while more := connection.recv(4096):
            received += more
    return received


def test_the_page_is_in_prometheus_text_format_and_head_is_the_same_without_it(
    start: Start,
) -> None:
    port = start(lambda: PAGE)
    page, head = HTTP.get(url(port)), HTTP.head(url(port))
    assert (page.status_code, page.content) == (200, PAGE)
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert (head.status_code, head.content, head.headers) == (200, b"", page.headers)
    assert HTTP.get(url(port) + "?name=a").content == PAGE


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/metrics/x"), ("POST", "/metrics")]
)
def test_there_is_nothing_else(start: Start, method: str, path: str) -> None:
    port = start(lambda: PAGE)
    assert HTTP.request(method, f"http://127.0.0.1:{port}{path}").status_code == 404


def test_without_a_page_the_reason_is_the_answer(start: Start) -> None:
    def refuse() -> bytes:
        raise NoPageError("tritonserver does not run")

    reply = HTTP.get(url(start(refuse)))
    assert (reply.status_code, reply.text) == (503, "tritonserver does not run\n")
    assert reply.headers["content-type"].startswith("text/plain")

    def fail() -> bytes:
        raise AttributeError("a bug")

    port = start(fail)
    for _ in range(2):
        reply = HTTP.get(url(port))
        assert (reply.status_code, reply.text) == (503, "the page could not be made\n")


def test_a_log_that_cannot_be_written_holds_no_later_page() -> None:
    num_asked = 0

    def read() -> bytes:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise AttributeError("a bug")
        return PAGE

    def log(line: str) -> None:
        raise BrokenPipeError

    with listen("127.0.0.1", 0, "metrics") as listener:
        port = listener.getsockname()[1]
        with contextlib.closing(PageServer(listener, read, log)):
            with pytest.raises(httpx.TransportError):
                HTTP.get(url(port))
            assert HTTP.get(url(port)).content == PAGE


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 5000,
        b"GET\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 10**5,
        b"GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_nonsense_is_refused_and_harms_nobody(start: Start, data: bytes) -> None:
    port = start(lambda: PAGE)
    assert answer_to(port, data)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"")
    assert HTTP.get(url(port)).content == PAGE


def test_who_resets_or_goes_away_harms_nobody(start: Start) -> None:
    port = start(lambda: PAGE * 10**5)
    for data in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
        for _ in range(5):
            connection = connect(port)
            connection.sendall(data)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    assert HTTP.get(url(port)).content == PAGE * 10**5


def test_who_says_nothing_gives_way_and_is_hung_up_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = start(lambda: PAGE)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(2 * MAX_CONNECTIONS)]
        silent[-1].sendall(b"GET /metrics HTTP/1.1\r\n")
        assert HTTP.get(url(port)).content == PAGE
        assert silent[0].recv(1) == b"", "the first to come is the first to go"
    monkeypatch.setattr(page_server, "REQUEST_S", 0.2)
    with connect(port) as slow:
        slow.sendall(b"GET /")
        assert slow.recv(1) == b""


def test_who_does_not_take_the_answer_is_hung_up_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "TAKE_S", 0.2)
    process, may_go_on = psutil.Process(), threading.Event()

    def read() -> bytes:
        may_go_on.wait(60)
        return b"x" * 2**25

    port = start(read)
    before = process.num_fds()
    num_bytes = 0
    with connect(port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(process.num_fds, lambda num: num == before + 2)
        may_go_on.set()
        wait_for(process.num_fds, lambda num: num == before + 1)  # our end alone is left
        while data := connection.recv(2**16):
            num_bytes += len(data)
    assert num_bytes < 2**25


class SlowPage:
    """Pages that are held until they are let go, numbered from 1."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._let_go = threading.Semaphore(0)

    def read(self) -> bytes:
        self.num_begun += 1
        page = b"%d" % self.num_begun
        assert self._let_go.acquire(timeout=60)
        return page

    def let_go(self, num_pages: int = 1) -> None:
        self._let_go.release(num_pages)


class Clients:
    """Clients of a slow page, each of which waits for it when `ask` returns.

    Attributes:
        slow, server: the page, and its server.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.slow, self._stack, self._has_called = SlowPage(), stack, queue.SimpleQueue[None]()
        listener = stack.enter_context(listen("127.0.0.1", 0, "metrics"))
        self._port = listener.getsockname()[1]
        self.server = PageServer(listener, self.slow.read, print)
        stack.callback(self.server.close)
        stack.callback(self.slow.let_go, 100)
        has_called = self._has_called

        class Noting(threading.Condition):
            def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
                has_called.put(None)
                return super().wait_for(predicate, timeout)

        self.server._changed = Noting()

    def ask(self) -> socket.socket:
        client = self._stack.enter_context(connect(self._port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        self._has_called.get(timeout=60)
        return client


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    monkeypatch.setattr(page_server, "PAGE_S", WAIT_S)
    with contextlib.ExitStack() as stack:
        yield Clients(stack)


def received(client: socket.socket) -> bytes:
    """The page that a client gets."""
    answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    return answer.rpartition(b"\r\n")[2]


def test_who_comes_while_a_page_is_made_shares_the_next_one(clients: Clients) -> None:
    first = clients.ask()
    assert wait_for(lambda: clients.slow.num_begun, bool) == 1
    others = [clients.ask() for _ in range(5)]
    assert clients.slow.num_begun == 1
    clients.slow.let_go()
    assert received(first) == b"1"
    assert wait_for(lambda: clients.slow.num_begun, lambda num: num > 1) == 2
    late = clients.ask()
    clients.slow.let_go()
    assert wait_for(lambda: clients.slow.num_begun, lambda num: num > 2) == 3
    assert [received(other) for other in others] == [b"2"] * 5, "while the third is made"
    clients.slow.let_go()
    assert received(late) == b"3", "a page that was begun before it was asked for"


def test_whoever_waits_at_the_end_is_answered(clients: Clients) -> None:
    waiting = [clients.ask() for _ in range(6)]
    clients.slow.let_go(2)
    clients.server.close()
    assert sorted(received(client) for client in waiting) == [b"1", *[b"2"] * 5]


def test_who_waits_too_long_for_another_page_gets_none(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "PAGE_S", 0.1)
    slow = SlowPage()
    port = start(slow.read)
    with connect(port) as first:
        first.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert wait_for(lambda: slow.num_begun, bool) == 1
        reply = HTTP.get(url(port))
        assert (reply.status_code, reply.text) == (503, "the metrics take too long\n")
        slow.let_go()
        assert first.makefile("rb").read()[-1:] == b"1"


def test_the_end_hangs_up_on_everybody_and_frees_the_port() -> None:
    with listen("127.0.0.1", 0, "metrics") as listener:
        port = listener.getsockname()[1]
        server = PageServer(listener, lambda: PAGE, print)
        with connect(port) as silent:
            assert HTTP.get(url(port)).content == PAGE
            server.close()
            with contextlib.suppress(ConnectionError):
                assert silent.recv(1) == b""
        server.close()  # once more does no harm
    listen("127.0.0.1", port, "metrics").close()
