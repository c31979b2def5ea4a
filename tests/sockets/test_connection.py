"""One end of a connection: sent now or soon, bounded, and an end that waits for nobody."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from charonia.sockets import connection
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from support.sockets import refuse_threads
from support.waiting import WAIT_S

Pair = tuple[Connection, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """One end under test, with messages of at most a million bytes, and the other."""
    near, far = socket.socketpair()
    one, other = Connection(Channel(near, max_bytes=10**6)), Channel(far)
    yield one, other
    one.hang_up()
    one.close()
    other.close()


def test_what_is_posted_comes_in_order_and_waits_for_nobody(pair: Pair) -> None:
    one, other = pair
    messages = [bytes([n]) * 100_000 for n in range(50)]
    for message in messages:
        one.post(message)
    assert [other.receive(WAIT_S) for _ in messages] == messages


def test_a_message_that_is_too_long_fails_where_it_is_sent_and_nothing_else_does(
    pair: Pair,
) -> None:
    one, other = pair
    for send in (one.post, one.send):
        with pytest.raises(OSError, match="1000001 bytes is too long") as raised:
            send(b"x" * (10**6 + 1))
        assert raised.value.errno == errno.EMSGSIZE
    one.post(b"a")
    assert other.receive(WAIT_S) == b"a"


@pytest.mark.parametrize(
    ("name", "value", "size"), [("MAX_WAITING", 5, 10**6), ("MAX_WAITING_BYTES", 5 * 10**6, 10**6)]
)
def test_what_waits_for_an_end_that_takes_nothing_is_bounded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str, value: int, size: int
) -> None:
    monkeypatch.setattr(connection, name, value)
    one, other = pair
    for _ in range(5):
        one.post(b"x" * size)
    with pytest.raises(OSError, match="5 messages wait") as raised:
        one.post(b"x" * size)
    assert raised.value.errno == errno.ENOBUFS
    for _ in range(5):
        assert len(other.receive(WAIT_S) or b"") == size
    one.post(b"room again")
    assert other.receive(WAIT_S) == b"room again"


def test_a_message_as_long_as_any_may_be_fits_into_an_empty_outbox(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING_BYTES", 10)
    one, other = pair
    one.post(b"x" * 10**6)
    assert len(other.receive(WAIT_S) or b"") == 10**6


def test_closing_sends_what_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CLOSE_TIMEOUT_S", WAIT_S)
    one, other = pair
    for _ in range(20):
        one.post(b"x" * 10**6)
    closing = threading.Thread(target=one.close)
    closing.start()
    assert [len(other.receive(WAIT_S) or b"") for _ in range(20)] == [10**6] * 20
    assert other.receive(WAIT_S) is None
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_closing_waits_for_no_end_that_takes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOSE_TIMEOUT_S", 0.1)
    one, _ = pair
    for _ in range(20):
        one.post(b"x" * 10**6)
    started = time.monotonic()
    one.close()
    assert time.monotonic() - started < WAIT_S
    one.post(b"after the end")
    assert not one._outbox


def test_an_end_that_is_followed_hands_on_everything_and_then_its_end(pair: Pair) -> None:
    one, other = pair
    taken: SimpleQueue[bytes | None] = SimpleQueue()
    one.follow(taken.put, lambda: taken.put(None), log=print)
    other.send(b"a")
    other.send(b"b")
    other.close()
    assert [taken.get(timeout=WAIT_S) for _ in range(3)] == [b"a", b"b", None]
    assert one.has_ended


def test_what_cannot_be_taken_ends_the_connection(pair: Pair) -> None:
    one, other = pair
    log: list[str] = []
    ended = threading.Event()

    def take(message: bytes) -> None:
        raise KeyError("a bug")

    one.follow(take, ended.set, log=log.append)
    other.send(b"a")
    assert ended.wait(WAIT_S)
    assert other.receive(WAIT_S) is None
    assert "KeyError" in log[0]


def test_what_needs_a_thread_that_cannot_be_started_fails_and_nothing_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    with monkeypatch.context() as patch:
        for name, call in (
            ("charonia-writer", lambda: one.post(b"lost")),
            ("charonia-reader", lambda: one.follow(print, print, log=print)),
        ):
            refuse_threads(patch, name)
            with pytest.raises(OSError, match="can't start new thread") as raised:
                call()
            assert raised.value.errno == errno.EAGAIN
    one.post(b"a")
    assert other.receive(WAIT_S) == b"a"
    one.close()
