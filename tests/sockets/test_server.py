"""Servers of sockets: who is served, within which bounds, and ends that see each other's end."""

import os
import resource
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from charonia.events import RareLog
from charonia.sockets import connection, server
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import connect, is_same_user, listen, peer_pid
from charonia.sockets.server import Server
from support.sockets import refuse_threads
from support.waiting import WAIT_S

START = Callable[..., Server]
NAME = "steps.socket"
MAX_BYTES = 2**22


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def start(tmp_path: Path, log: list[str]) -> Iterator[START]:
    servers: list[Server] = []

    def make(
        answer: Callable[[bytes], bytes] = bytes.upper,
        directory: Path = tmp_path,
        admit: Callable[[Channel], bool] = is_same_user,
    ) -> Server:
        def serve(connection: Connection) -> None:
            for message in connection.messages():
                connection.send(answer(message))

        servers.append(
            Server(listen(directory / NAME), admit, serve, log=log.append, max_bytes=MAX_BYTES)
        )
        servers[-1].start()
        return servers[-1]

    yield make
    for one in servers:
        one.close()


@pytest.mark.parametrize("message", [b"", b"step", b"x" * 3_000_000])
def test_a_message_is_answered_whole(tmp_path: Path, start: START, message: bytes) -> None:
    start()
    channel = connect(tmp_path / NAME)
    for _ in range(3):
        channel.send(message)
        assert channel.receive(WAIT_S) == message.upper()
    channel.close()


def test_an_idle_end_sees_that_the_other_has_gone_and_loses_no_message(
    tmp_path: Path, start: START
) -> None:
    server = start()
    channel = connect(tmp_path / NAME)
    assert channel.is_quiet()
    channel.send(b"step")
    assert select.select([channel], [], [], WAIT_S)[0]
    assert not channel.is_quiet()
    assert channel.receive(WAIT_S) == b"STEP"
    assert channel.is_quiet()
    server.close()
    assert not channel.is_quiet()
    assert channel.receive(WAIT_S) is None
    channel.close()


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
    assert channel.receive(WAIT_S) == b"A"
    channel.close()


def test_a_reply_that_comes_late_is_received_by_a_later_call(tmp_path: Path, start: START) -> None:
    may_go_on = threading.Event()

    def answer(message: bytes) -> bytes:
        may_go_on.wait(WAIT_S)
        return message

    start(answer)
    channel = connect(tmp_path / NAME)
    channel.send(b"step")
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    may_go_on.set()
    assert channel.receive(WAIT_S) == b"step"
    channel.close()


def test_connections_do_not_wait_for_each_other(tmp_path: Path, start: START) -> None:
    may_go_on = threading.Event()

    def answer(message: bytes) -> bytes:
        if message == b"slow":
            may_go_on.wait(WAIT_S)
        return message

    start(answer)
    first, second = connect(tmp_path / NAME), connect(tmp_path / NAME)
    first.send(b"slow")
    second.send(b"quick")
    assert second.receive(WAIT_S) == b"quick"
    may_go_on.set()
    assert first.receive(WAIT_S) == b"slow"
    first.close()
    second.close()


def test_closing_ends_the_wait_of_the_other_end(tmp_path: Path, start: START) -> None:
    server = start()
    channel = connect(tmp_path / NAME)
    channel.send(b"a")
    assert channel.receive(WAIT_S) == b"A"
    started = time.monotonic()
    server.close(timeout=2 * WAIT_S)
    assert channel.receive(WAIT_S) is None
    assert time.monotonic() - started < WAIT_S
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
    monkeypatch.setattr("charonia.sockets.local._ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    stranger = connect(tmp_path / NAME)
    assert stranger.receive(WAIT_S) is None
    stranger.close()
    monkeypatch.undo()
    channel = connect(tmp_path / NAME)
    assert peer_pid(channel) == os.getpid()
    channel.send(b"a")
    assert channel.receive(WAIT_S) == b"A"
    channel.close()


def test_the_path_may_be_longer_than_a_sockets_own(tmp_path: Path, start: START) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    start(directory=deep)
    channel = connect(deep / NAME)
    channel.send(b"a")
    assert channel.receive(WAIT_S) == b"A"
    channel.close()


def test_there_is_no_engine_to_connect_to(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / NAME)


def test_who_says_nothing_is_hung_up_on(
    tmp_path: Path, start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_spoken = threading.Event()

    def admit(channel: Channel) -> bool:
        """The time that they have counts from here on."""
        return have_spoken.wait(WAIT_S)

    monkeypatch.setattr(connection, "FIRST_MESSAGE_S", 0.1)
    start(admit=admit)
    silent, halting = connect(tmp_path / NAME), connect(tmp_path / NAME)
    talking = connect(tmp_path / NAME)
    halting.socket.sendall(b"\x05\x00\x00\x00he")
    talking.send(b"a")
    have_spoken.set()
    for one in (silent, halting):
        assert one.receive(WAIT_S) is None
        one.close()
    assert talking.receive(WAIT_S) == b"A"
    time.sleep(0.3)  # who has said something may be silent
    talking.send(b"b")
    assert talking.receive(WAIT_S) == b"B"
    talking.close()


def test_a_message_that_is_announced_too_long_ends_its_connection_before_it_is_kept(
    tmp_path: Path, start: START
) -> None:
    start()
    channel = connect(tmp_path / NAME)
    channel.socket.sendall((MAX_BYTES + 1).to_bytes(4, "little"))
    assert channel.receive(WAIT_S) is None
    channel.close()


def test_who_has_not_shown_who_it_is_makes_room_for_others(
    tmp_path: Path, start: START, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """As the ranks' meeting does it; silent strangers keep nobody out."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    start(admit=lambda channel: channel.receive(WAIT_S) == b"sesame")
    strangers = [connect(tmp_path / NAME) for _ in range(5)]
    for one in strangers[:2]:
        assert one.receive(WAIT_S) is None
    friend = connect(tmp_path / NAME)
    friend.send(b"sesame")
    friend.send(b"a")
    assert friend.receive(WAIT_S) == b"A"
    for one in (*strangers, friend):
        one.close()
    assert len(log) == 1, "as many lines as strangers"
    assert "has said nothing" in log[0]


def test_too_many_that_are_served_keep_further_ones_out(
    tmp_path: Path, start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    start()
    served = [connect(tmp_path / NAME) for _ in range(2)]
    for one in served:
        one.send(b"a")
        assert one.receive(WAIT_S) == b"A"
    late = connect(tmp_path / NAME)
    assert late.receive(WAIT_S) is None
    late.close()
    for one in served:
        one.send(b"b")
        assert one.receive(WAIT_S) == b"B"
        one.close()


def test_an_end_that_raises_is_logged_and_ends_alone(
    tmp_path: Path, start: START, log: list[str]
) -> None:
    def answer(message: bytes) -> bytes:
        if message == b"bad":
            raise KeyError("a bug")
        return message

    start(answer)
    bad, good = connect(tmp_path / NAME), connect(tmp_path / NAME)
    bad.send(b"bad")
    assert bad.receive(WAIT_S) is None
    good.send(b"good")
    assert good.receive(WAIT_S) == b"good"
    assert "KeyError" in log[0]
    bad.close()
    good.close()


def test_what_strangers_cause_to_be_logged_is_little() -> None:
    lines: list[str] = []
    now = [0.0]
    log = RareLog(lines.append, clock=lambda: now[0])
    for _ in range(100):
        log("x" * 10_000)
    now[0] = RareLog.EVERY_S
    log("y")
    assert [len(line) for line in lines] == [RareLog.MAX_CHARACTERS, len(lines[1])]
    assert lines[1] == "y (99 more such lines were left out)"


def test_a_connection_for_which_there_is_no_thread_ends_at_once_and_keeps_no_room(
    tmp_path: Path, start: START, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    with monkeypatch.context() as patch:
        refuse_threads(patch, "charonia-connection")
        refused = connect(tmp_path / NAME)
        assert refused.receive(WAIT_S) is None
    refused.close()
    channel = connect(tmp_path / NAME)
    channel.send(b"a")
    assert channel.receive(WAIT_S) == b"A"
    assert len(server._served) == 1
    assert not server._strangers
    assert log == ["refused: no thread can be started for a connection"]
    channel.close()
