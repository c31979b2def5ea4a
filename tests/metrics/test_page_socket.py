"""The socket by which the scheduler is asked for its metrics, and what becomes of bad answers."""

import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from charonia.metrics import page_socket
from charonia.metrics.page_socket import (
    METRICS_SOCKET,
    Sample,
    ask_schedulers,
    serve_metrics,
)
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import connect, is_same_user, listen
from charonia.sockets.server import Server
from support.waiting import WAIT_S, eventually

METRICS = [
    Sample("charonia_step_seconds", "_bucket", {"le": "0.5"}, 1.0),
    Sample("charonia_step_seconds", "_sum", {}, 7.25),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / METRICS_SOCKET


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Path, Callable[[], list[Sample]]], None]]:
    servers = []

    def serve(path: Path, read: Callable[[], list[Sample]]) -> None:
        servers.append(serve_metrics(path, read, log=pytest.fail))

    yield serve
    for server in servers:
        server.close()


def test_a_scheduler_answers_with_its_samples_each_time_anew(path: Path, serve) -> None:
    num_asked = 0

    def read() -> list[Sample]:
        nonlocal num_asked
        num_asked += 1
        return [Sample("n", "", {}, float(num_asked))]

    serve(path, read)
    for number in (1, 2):
        assert ask_schedulers([path], WAIT_S) == [[Sample("n", "", {}, float(number))]]


def test_the_socket_is_its_owners_alone(path: Path, serve) -> None:
    serve(path, lambda: METRICS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_who_asks_for_something_else_is_hung_up_on(path: Path, serve) -> None:
    serve(path, lambda: METRICS)
    channel = connect(path)
    channel.send(b"charonia: step down")
    assert channel.receive(WAIT_S) is None
    channel.close()
    assert ask_schedulers([path], WAIT_S) == [METRICS]


def test_one_that_hangs_costs_the_time_once_and_keeps_no_other_answer_back(
    tmp_path: Path, serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def hang() -> list[Sample]:
        may_go_on.wait(WAIT_S)
        return METRICS

    paths = [tmp_path / f"{number}.socket" for number in range(3)]
    serve(paths[0], hang)
    serve(paths[1], hang)
    serve(paths[2], lambda: METRICS)
    ask = page_socket._ask

    def ask_and_see(path: Path, stack: ExitStack) -> Channel | None:
        """The one that does not hang is slow at most; its answer is there in time."""
        channel = ask(path, stack)
        if path == paths[2]:
            eventually(lambda: channel is None or not channel.is_quiet())
        return channel

    monkeypatch.setattr(page_socket, "_ask", ask_and_see)
    started = time.monotonic()
    answers = ask_schedulers(paths, 0.2)
    seconds = time.monotonic() - started
    may_go_on.set()
    assert answers == [None, None, METRICS]
    assert 0.2 <= seconds < WAIT_S / 2


def test_nobody_there_is_no_answer(tmp_path: Path) -> None:
    listen(tmp_path / "left.socket").close()
    (tmp_path / "file.socket").touch()
    names = ("left.socket", "file.socket", "none.socket", "no/directory.socket")
    assert ask_schedulers([tmp_path / name for name in names], WAIT_S) == [None] * len(names)


def test_one_that_takes_no_connection_any_more_holds_nobody(path: Path) -> None:
    with listen(path):  # as of a stopped process: nobody accepts
        for _ in range(200):
            assert ask_schedulers([path], 0.001) == [None]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 100,
        msgspec.msgpack.encode({"charonia_step_seconds": 5}),
        msgspec.msgpack.encode([("charonia_step_seconds", "_sum", {}, "5")]),
        msgspec.msgpack.encode([("charonia_step_seconds", "_sum", {})]),
        b"\x91" * 10**5,
        b"x" * 2**21,
    ],
)
def test_nonsense_is_no_answer(path: Path, answer: bytes) -> None:
    def serve(connection: Connection) -> None:
        for _ in connection.messages():
            connection.send(answer)

    server = Server(listen(path), is_same_user, serve, log=lambda line: None)
    server.start()
    assert ask_schedulers([path], WAIT_S) == [None]
    server.close()
