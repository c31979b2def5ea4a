"""Framing: whole messages, however they come, and none that is longer than its limit."""

import contextlib
import fcntl
import resource
import socket
import threading
import time
from typing import Any

import pytest

from charonia.sockets.channel import FD_SETSIZE, Channel
from support.waiting import WAIT_S, Clock


class Watched:
    """A socket that counts how it is read.

    Attributes:
        is_late: what comes is there for who waits, and not for who only looks.
    """

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self.is_late = False
        self.num_looks = 0
        self.num_waits = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_DONTWAIT:
            self.num_looks += 1
            if self.is_late:
                raise BlockingIOError
        else:
            self.num_waits += 1
        return self._inner.recv(size, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_an_end_looks_before_it_sleeps_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.sockets.channel.time", Clock(step=0.005))
    near, far = socket.socketpair()
    watched = Watched(near)
    channel = Channel(watched)  # type: ignore[arg-type]
    far.sendall(b"\x02\x00\x00\x00ab\x01\x00")
    assert channel.receive(WAIT_S, spin=0.02) == b"ab"
    assert (watched.num_looks, watched.num_waits) == (1, 0)
    far.sendall(b"\x00\x00c")
    watched.is_late = True
    assert channel.receive(WAIT_S, spin=0.02) == b"c"
    assert watched.num_looks > 2
    assert watched.num_waits == 1
    watched.is_late = False
    far.close()
    assert channel.receive(WAIT_S, spin=0.02) is None
    channel.close()


def test_a_brief_wait_ends_with_a_message_or_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without poll(), which counts in whole milliseconds."""
    near, far = socket.socketpair()
    channel = Channel(near)
    monkeypatch.delattr("select.poll")
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(0.0005)
    assert time.monotonic() - started >= 0.0005
    far.sendall(b"\x01\x00\x00\x00a")
    assert channel.receive(0.005) == b"a"
    far.close()
    assert channel.receive(0.005) is None
    channel.close()


def test_a_brief_wait_is_one_also_where_select_takes_no_such_descriptor() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit <= FD_SETSIZE:
        pytest.skip(f"a process may have {limit} descriptors here")
    near, far = socket.socketpair()
    descriptor = fcntl.fcntl(near, fcntl.F_DUPFD, FD_SETSIZE)
    near.close()
    channel = Channel(socket.socket(fileno=descriptor))
    with pytest.raises(TimeoutError):
        channel.receive(0.001)
    far.sendall(b"\x01\x00\x00\x00a")
    assert channel.receive(0.005) == b"a"
    far.close()
    channel.close()


def test_a_message_that_is_too_long_is_neither_sent_nor_taken() -> None:
    near, far = socket.socketpair()
    channel = Channel(near, max_bytes=5)
    channel.send(b"12345")
    with pytest.raises(OSError, match="6 bytes is too long"):
        channel.send(b"123456")
    far.sendall(b"\x06\x00\x00\x00")
    assert channel.receive(WAIT_S) is None
    channel.close()
    far.close()


def test_a_message_that_comes_in_pieces_is_whole_in_the_end() -> None:
    near, far = socket.socketpair()
    channel = Channel(near)
    far.sendall(b"\x05\x00\x00\x00he")
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    far.sendall(b"llo\x02\x00\x00\x00ho")
    assert channel.receive(WAIT_S) == b"hello"
    assert channel.receive(WAIT_S) == b"ho"
    far.sendall(b"\x05\x00\x00\x00cut")
    far.close()
    assert channel.receive(WAIT_S) is None
    channel.close()


def test_an_end_that_takes_nothing_is_given_up() -> None:
    near, far = socket.socketpair()
    channel = Channel(near)
    with pytest.raises(TimeoutError):
        channel.send(b"x" * 10_000_000, 0.05)
    channel.close()
    far.close()


def test_after_a_part_of_a_message_the_connection_ends_and_after_none_it_goes_on() -> None:
    near, far = socket.socketpair()
    channel, other = Channel(near), Channel(far)
    num_sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:  # leaves no room, not even for a part
            num_sent += near.send(b"\0\0\0\0", socket.MSG_DONTWAIT)
    with pytest.raises(TimeoutError):
        channel.send(b"none", 0.05)
    assert [other.receive(WAIT_S) for _ in range(num_sent // 4)] == [b""] * (num_sent // 4)
    channel.send(b"whole", WAIT_S)
    assert other.receive(WAIT_S) == b"whole"
    with pytest.raises(TimeoutError):
        channel.send(b"x" * 10_000_000, 0.05)
    with pytest.raises(BrokenPipeError):
        channel.send(b"after it", 0.05)
    assert other.receive(WAIT_S) is None
    channel.close()
    other.close()


def test_what_is_posted_waits_for_nobody_and_goes_on_while_something_is_received() -> None:
    near, far = socket.socketpair()
    channel, other = Channel(near), Channel(far)
    messages = [bytes([n]) * 3_000_000 for n in range(3)]
    for message in messages:
        channel.post(message)
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    received: list[bytes | None] = []

    def take_all() -> None:
        received.extend(other.receive(WAIT_S) for _ in messages)
        other.send(b"done")

    taking = threading.Thread(target=take_all)
    taking.start()
    assert channel.receive(WAIT_S) == b"done"
    taking.join()
    assert received == messages
    channel.close()
    other.close()


def test_what_is_posted_to_one_that_has_gone_hides_none_of_its_last_words() -> None:
    near, far = socket.socketpair()
    channel, other = Channel(near, max_bytes=10**7), Channel(far)
    channel.post(b"x" * 10**7)  # of which some is left when it goes
    other.send(b"farewell")
    other.close()
    channel.post(b"late")
    assert channel.receive(WAIT_S) == b"farewell"
    assert channel.receive(WAIT_S) is None
    with pytest.raises(OSError, match="is too long"):
        channel.post(b"x" * (10**7 + 1))
    channel.close()
    assert channel.receive(WAIT_S) is None
