"""Sockets between models: whole messages, and ends that see each other's end."""

import os
import resource
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.connection import Channel
from charonia.serving.channel import Answer, ChannelServer, connect, peer_pid

START = Callable[..., ChannelServer]
NAME = "steps.socket"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[START]:
    servers: list[ChannelServer] = []

    def make(
        answer: Callable[[bytes], bytes | None] = bytes.upper, directory: Path = tmp_path
    ) -> ChannelServer:
        def begin(message: bytes) -> Answer | None:
            reply = answer(message)
            return None if reply is None else lambda: reply

        servers.append(ChannelServer(directory / NAME, begin))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.mark.parametrize("message", [b"", b"step", b"x" * 3_000_000])
def test_a_message_is_answered_whole(tmp_path: Path, start: START, message: bytes) -> None:
    start()
    channel = connect(tmp_path / NAME)
    for _ in range(3):
        channel.send(message)
        assert channel.receive(10) == message.upper()
    channel.close()


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_server_that_closes_says_farewell_at_once_and_answers_what_has_come(
    tmp_path: Path, is_pipelined: bool
) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer(message: bytes) -> bytes:
        is_asked.set()
        assert may_answer.wait(10)
        return message.upper()

    server = ChannelServer(
        tmp_path / NAME,
        lambda message: lambda: answer(message),
        is_pipelined=is_pipelined,
        farewell=b"bye",
    )
    channel, idle = connect(tmp_path / NAME), connect(tmp_path / NAME)
    channel.send(b"step")
    assert is_asked.wait(10)
    closing = threading.Thread(target=server.close)
    closing.start()
    assert [idle.receive(10), channel.receive(10)] == [b"bye", b"bye"]
    may_answer.set()
    assert [channel.receive(10), channel.receive(10)] == [b"STEP", None]
    closing.join()
    for one in (channel, idle):
        one.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("fails_in", ["begin", "end"])
def test_an_exception_ends_the_connection_and_nobody_waits_for_an_answer(
    tmp_path: Path, is_pipelined: bool, fails_in: str
) -> None:
    def fail() -> bytes:
        raise KeyError("a bug")

    def begin(message: bytes) -> Answer:
        if fails_in == "begin":
            fail()
        return fail

    server = ChannelServer(tmp_path / NAME, begin, is_pipelined=is_pipelined)
    channel = connect(tmp_path / NAME)
    channel.send(b"step")
    assert channel.receive(10) is None
    channel.close()
    server.close()
    assert not server._connections


def test_an_idle_end_sees_that_the_other_has_gone_and_loses_no_message(
    tmp_path: Path, start: START
) -> None:
    server = start()
    channel = connect(tmp_path / NAME)
    assert channel.is_quiet()
    channel.send(b"step")
    assert select.select([channel._connection], [], [], 10)[0]
    assert not channel.is_quiet()
    assert channel.receive(10) == b"STEP"
    assert channel.is_quiet()
    server.close()
    assert not channel.is_quiet()
    assert channel.receive(10) is None
    channel.close()


def test_messages_begin_before_earlier_ones_are_answered_in_their_order(tmp_path: Path) -> None:
    begun: list[bytes] = []
    both_begun = threading.Event()

    def begin(message: bytes) -> Answer:
        begun.append(message)
        if len(begun) == 2:
            both_begun.set()

        def end() -> bytes:
            assert both_begun.wait(10), "the second message does not begin"
            return message.upper()

        return end

    server = ChannelServer(tmp_path / NAME, begin, is_pipelined=True)
    channel = connect(tmp_path / NAME)
    channel.send(b"one")
    channel.send(b"two")
    assert [channel.receive(10), channel.receive(10)] == [b"ONE", b"TWO"]
    assert begun == [b"one", b"two"]
    channel.close()
    server.close()


class Watched:
    """A socket that counts how it is read."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self.num_looks = 0
        self.num_waits = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_DONTWAIT:
            self.num_looks += 1
        else:
            self.num_waits += 1
        return self._inner.recv(size, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_an_end_looks_before_it_sleeps_and_misses_nothing() -> None:
    near, far = socket.socketpair()
    watched = Watched(near)
    channel = Channel(watched)  # type: ignore[arg-type]
    far.sendall(b"\x02\x00\x00\x00ab\x01\x00")
    assert channel.receive(10, spin=0.02) == b"ab"
    assert (watched.num_looks, watched.num_waits) == (1, 0)
    later = threading.Timer(0.1, far.sendall, [b"\x00\x00c"])  # longer than it looks
    later.start()
    assert channel.receive(10, spin=0.02) == b"c"
    assert watched.num_looks > 2
    assert watched.num_waits == 1
    later.join()
    far.close()
    assert channel.receive(10, spin=0.02) is None
    channel.close()


def test_a_message_that_is_too_long_is_neither_sent_nor_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = socket.socketpair()
    channel = Channel(near)
    monkeypatch.setattr("charonia.connection.MAX_BYTES", 5)
    channel.send(b"12345")
    with pytest.raises(OSError, match="6 bytes is too long"):
        channel.send(b"123456")
    far.sendall(b"\x06\x00\x00\x00")
    assert channel.receive(10) is None
    channel.close()
    far.close()


def test_a_listener_goes_on_after_an_error(tmp_path: Path, start: START) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    start()
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 1, limit[1]))
    try:
        near.connect(str(tmp_path / NAME))  # which the server has no descriptor for
        time.sleep(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    channel = Channel(near)
    channel.send(b"a")
    assert channel.receive(10) == b"A"
    channel.close()


def test_a_reply_that_comes_late_is_received_by_a_later_call(tmp_path: Path, start: START) -> None:
    may_go_on = threading.Event()

    def answer(message: bytes) -> bytes:
        may_go_on.wait(10)
        return message

    start(answer)
    channel = connect(tmp_path / NAME)
    channel.send(b"step")
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    may_go_on.set()
    assert channel.receive(10) == b"step"
    channel.close()


def test_a_message_that_comes_in_pieces_is_whole_in_the_end() -> None:
    near, far = socket.socketpair()
    channel = Channel(near)
    far.sendall(b"\x05\x00\x00\x00he")
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    far.sendall(b"llo\x02\x00\x00\x00ho")
    assert channel.receive(10) == b"hello"
    assert channel.receive(10) == b"ho"
    far.sendall(b"\x05\x00\x00\x00cut")
    far.close()
    assert channel.receive(10) is None
    channel.close()


def test_an_end_that_takes_nothing_is_given_up() -> None:
    near, far = socket.socketpair()
    channel = Channel(near)
    with pytest.raises(TimeoutError):
        channel.send(b"x" * 10_000_000, 0.05)
    channel.close()
    far.close()


def test_connections_do_not_wait_for_each_other(tmp_path: Path, start: START) -> None:
    may_go_on = threading.Event()

    def answer(message: bytes) -> bytes:
        if message == b"slow":
            may_go_on.wait(10)
        return message

    start(answer)
    first, second = connect(tmp_path / NAME), connect(tmp_path / NAME)
    first.send(b"slow")
    second.send(b"quick")
    assert second.receive(10) == b"quick"
    may_go_on.set()
    assert first.receive(10) == b"slow"
    first.close()
    second.close()


def test_what_is_not_answered_ends_the_connection_and_nothing_else(
    tmp_path: Path, start: START
) -> None:
    start(lambda message: message if message == b"secret" else None)
    stranger = connect(tmp_path / NAME)
    stranger.send(b"guess")
    assert stranger.receive(10) is None
    stranger.close()
    channel = connect(tmp_path / NAME)
    channel.send(b"secret")
    assert channel.receive(10) == b"secret"
    channel.close()


def test_closing_ends_the_wait_of_the_other_end(tmp_path: Path, start: START) -> None:
    server = start()
    channel = connect(tmp_path / NAME)
    channel.send(b"a")
    assert channel.receive(10) == b"A"
    started = time.monotonic()
    server.close()
    assert channel.receive(10) is None
    assert time.monotonic() - started < 5
    channel.close()
    with pytest.raises(OSError, match="refused"):
        connect(tmp_path / NAME)


def test_the_socket_is_its_owners_alone_and_replaces_an_old_one(
    tmp_path: Path, start: START
) -> None:
    (tmp_path / NAME).write_bytes(b"of a killed engine")
    start()
    mode = (tmp_path / NAME).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    channel = connect(tmp_path / NAME)
    channel.close()


def test_a_process_of_another_user_is_not_served(
    tmp_path: Path, start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr("charonia.serving.channel._ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    stranger = connect(tmp_path / NAME)
    assert stranger.receive(10) is None
    stranger.close()
    monkeypatch.undo()
    channel = connect(tmp_path / NAME)
    assert peer_pid(channel) == os.getpid()
    channel.send(b"a")
    assert channel.receive(10) == b"A"
    channel.close()


def test_the_path_may_be_longer_than_a_sockets_own(tmp_path: Path, start: START) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    start(directory=deep)
    channel = connect(deep / NAME)
    channel.send(b"a")
    assert channel.receive(10) == b"A"
    channel.close()


def test_there_is_no_engine_to_connect_to(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / NAME)
