"""Answers through a connection: in the order of the messages, and all of them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from charonia.sockets.answering import Answer, Begin, answer_each, answer_overlapping
from charonia.sockets.local import connect, is_same_user, listen
from charonia.sockets.server import Server
from support.waiting import WAIT_S, eventually

NAME = "steps.socket"
WAYS = [answer_each, answer_overlapping]
Way = Callable[..., None]


def serve(tmp_path: Path, begin: Begin, way: Way, log: Callable[[str], None] = print) -> Server:
    server = Server(
        listen(tmp_path / NAME), is_same_user, lambda connection: way(connection, begin), log=log
    )
    server.start()
    return server


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_closes_gives_notice_at_once_and_answers_what_has_come(
    tmp_path: Path, way: Way
) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer(message: bytes) -> bytes:
        is_asked.set()
        assert may_answer.wait(WAIT_S)
        return message.upper()

    server = serve(tmp_path, lambda message: lambda: answer(message), way)
    channel, idle = connect(tmp_path / NAME), connect(tmp_path / NAME)
    channel.send(b"step")
    assert is_asked.wait(WAIT_S)
    eventually(lambda: len(server._served) == 2)
    closing = threading.Thread(target=server.close, args=[b"bye"])
    closing.start()
    assert [idle.receive(WAIT_S), channel.receive(WAIT_S)] == [b"bye", b"bye"]
    may_answer.set()
    assert [channel.receive(WAIT_S), channel.receive(WAIT_S)] == [b"STEP", None]
    closing.join()
    for one in (channel, idle):
        one.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fails_in", ["begin", "end"])
def test_an_exception_ends_the_connection_and_nobody_waits_for_an_answer(
    tmp_path: Path, way: Way, fails_in: str
) -> None:
    def fail() -> bytes:
        raise KeyError("a bug")

    def begin(message: bytes) -> Answer:
        if fails_in == "begin":
            fail()
        return fail

    server = serve(tmp_path, begin, way)
    channel = connect(tmp_path / NAME)
    channel.send(b"step")
    assert channel.receive(WAIT_S) is None
    channel.close()
    server.close()
    assert not server._served


def test_messages_begin_before_earlier_ones_are_answered_in_their_order(tmp_path: Path) -> None:
    begun: list[bytes] = []
    both_begun = threading.Event()

    def begin(message: bytes) -> Answer:
        begun.append(message)
        if len(begun) == 2:
            both_begun.set()

        def end() -> bytes:
            assert both_begun.wait(WAIT_S), "the second message does not begin"
            return message.upper()

        return end

    server = serve(tmp_path, begin, answer_overlapping)
    channel = connect(tmp_path / NAME)
    channel.send(b"one")
    channel.send(b"two")
    assert [channel.receive(WAIT_S), channel.receive(WAIT_S)] == [b"ONE", b"TWO"]
    assert begun == [b"one", b"two"]
    channel.close()
    server.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_answered_ends_the_connection_and_nothing_else(
    tmp_path: Path, way: Way
) -> None:
    server = serve(
        tmp_path, lambda message: (lambda: message) if message == b"known" else None, way
    )
    stranger = connect(tmp_path / NAME)
    stranger.send(b"guess")
    assert stranger.receive(WAIT_S) is None
    stranger.close()
    channel = connect(tmp_path / NAME)
    channel.send(b"known")
    assert channel.receive(WAIT_S) == b"known"
    channel.close()
    server.close()
