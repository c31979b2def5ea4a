"""The socket between scheduler and engine: whole messages, and ends that see each other's end."""

import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charonia.serving.channel import SOCKET_NAME, Channel, ChannelServer, connect

START = Callable[..., ChannelServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[START]:
    servers: list[ChannelServer] = []

    def make(
        answer: Callable[[bytes], bytes | None] = bytes.upper, directory: Path = tmp_path
    ) -> ChannelServer:
        servers.append(ChannelServer(directory, answer))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.mark.parametrize("message", [b"", b"step", b"x" * 3_000_000])
def test_a_message_is_answered_whole(tmp_path: Path, start: START, message: bytes) -> None:
    start()
    channel = connect(tmp_path)
    for _ in range(3):
        channel.send(message)
        assert channel.receive(10) == message.upper()
    channel.close()


def test_a_reply_that_comes_late_is_received_by_a_later_call(tmp_path: Path, start: START) -> None:
    may_go_on = threading.Event()

    def answer(message: bytes) -> bytes:
        may_go_on.wait(10)
        return message

    start(answer)
    channel = connect(tmp_path)
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


def test_the_next_connection_is_served_when_the_first_has_gone(
    tmp_path: Path, start: START
) -> None:
    start()
    first = connect(tmp_path)
    first.send(b"a")
    assert first.receive(10) == b"A"
    second = connect(tmp_path)
    second.send(b"b")
    with pytest.raises(TimeoutError):
        second.receive(0.05)
    first.close()
    assert second.receive(10) == b"B"
    second.close()


def test_what_is_not_answered_ends_the_connection_and_nothing_else(
    tmp_path: Path, start: START
) -> None:
    start(lambda message: message if message == b"secret" else None)
    stranger = connect(tmp_path)
    stranger.send(b"guess")
    assert stranger.receive(10) is None
    stranger.close()
    channel = connect(tmp_path)
    channel.send(b"secret")
    assert channel.receive(10) == b"secret"
    channel.close()


def test_closing_ends_the_wait_of_the_other_end(tmp_path: Path, start: START) -> None:
    server = start()
    channel = connect(tmp_path)
    channel.send(b"a")
    assert channel.receive(10) == b"A"
    started = time.monotonic()
    server.close()
    assert channel.receive(10) is None
    assert time.monotonic() - started < 5
    channel.close()
    with pytest.raises(OSError, match="refused"):
        connect(tmp_path)


def test_the_socket_is_its_owners_alone_and_replaces_an_old_one(
    tmp_path: Path, start: START
) -> None:
    (tmp_path / SOCKET_NAME).write_bytes(b"of a killed engine")
    start()
    mode = (tmp_path / SOCKET_NAME).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    channel = connect(tmp_path)
    channel.close()


def test_the_path_may_be_longer_than_a_sockets_own(tmp_path: Path, start: START) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    start(directory=deep)
    channel = connect(deep)
    channel.send(b"a")
    assert channel.receive(10) == b"A"
    channel.close()


def test_there_is_no_engine_to_connect_to(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(tmp_path)
