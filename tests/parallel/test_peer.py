"""One connection between the engine's process and a rank: messages, signs of life, its end."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from charonia.errors import RankLostError
from charonia.parallel.messages import Allocate, Lines, Message, Ready, Refusal, encode
from charonia.parallel.peer import Peer
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from support.waiting import WAIT_S, Clock

LONG = WAIT_S
SHORT = 0.3


Pair = tuple[Peer, Peer]


def peer_of(connection: socket.socket, timeout: float) -> Peer:
    return Peer(Connection(Channel(connection)), timeout)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which peers notice a silence."""
    clock = Clock()
    monkeypatch.setattr("charonia.parallel.peer.time", clock)
    return clock


@pytest.fixture
def connect() -> Iterator[Callable[[float], Pair]]:
    """Both sides of a connection, given their time limit."""
    peers = []

    def make(timeout: float) -> Pair:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here = peer_of(socket.create_connection(listener.getsockname()), timeout)
            there = peer_of(listener.accept()[0], timeout)
        peers.extend([here, there])
        return here, there

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def pair(connect: Callable[[float], Pair]) -> Pair:
    return connect(LONG)


def test_messages_come_in_order_and_beats_between_them_are_signs_of_life_alone(
    pair: Pair,
) -> None:
    here, there = pair
    here.send(Ready(7, 64))
    here.beat()
    here.send_encoded(encode(Allocate(5, 64)))
    assert [there.receive() for _ in range(3)] == [Ready(7, 64), None, Allocate(5, 64)]
    there.send(Ready(1, 64))
    assert here.receive(spin=LONG) == Ready(1, 64)


def test_a_connection_that_ends_is_a_lost_rank(pair: Pair) -> None:
    here, there = pair
    here.send(Ready(7, 64))
    here.close()
    assert there.receive() == Ready(7, 64)
    with pytest.raises(RankLostError, match="has ended"):
        there.receive()
    with pytest.raises(RankLostError, match="has ended"):
        send_for_ever(there)


def test_a_rank_is_silent_when_nothing_came_for_its_time_and_any_sign_ends_that(
    clock: Clock, pair: Pair
) -> None:
    here, there = pair
    clock.now += LONG - 1
    assert not here.is_silent
    clock.now += 2
    assert here.is_silent
    there.beat()
    assert here.receive() is None
    assert not here.is_silent


def test_who_does_not_read_for_long_is_not_lost(connect: Callable[[float], Pair]) -> None:
    """A rank that computes does not, and the kernel holds only some of what waits for it."""
    here, there = connect(SHORT)
    messages = [Refusal("", text * 2**22) for text in "abcd"]
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(lambda: [here.send(message) for message in messages])
        for _ in range(4):
            there.beat()
            time.sleep(SHORT)
        assert not sent.done()
        assert [there.receive() for _ in messages] == messages
        sent.result(LONG)


def test_to_hang_up_ends_the_sending_to_one_that_does_not_read(pair: Pair) -> None:
    here, _ = pair
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send_for_ever, here)
        time.sleep(SHORT)
        assert not sent.done()
        here.hang_up()
        with pytest.raises(RankLostError, match="has ended"):
            sent.result(LONG)


def taken(peer: Peer) -> list[Message]:
    """What comes within a while."""
    time.sleep(SHORT)
    return list(peer.take())


def test_what_has_come_is_taken_without_a_wait_for_more(pair: Pair) -> None:
    here, there = pair
    assert taken(there) == []
    here.beat()
    for number in range(3):
        here.send(Ready(number, 64))
    assert taken(there) == [Ready(0, 64), Ready(1, 64), Ready(2, 64)]
    here.close()
    with pytest.raises(RankLostError, match="has ended"):
        taken(there)


def test_a_rank_that_stops_amid_a_message_is_not_waited_for_and_falls_silent(
    clock: Clock, pair: Pair
) -> None:
    here, there = pair
    clock.now += LONG - 1
    message = encode(Refusal("", "x" * 2**20))
    here._socket.sendall(len(message).to_bytes(4, "little") + message[:1000])
    assert taken(there) == []
    clock.now += 2
    assert taken(there) == []
    assert there.is_silent
    here._socket.sendall(message[1000:])
    assert taken(there) == [Refusal("", "x" * 2**20)]
    assert not there.is_silent


def send_for_ever(peer: Peer) -> None:
    """The kernel takes some of it, whoever listens."""
    while True:
        peer.send_encoded(b"x" * 2**20)


def test_to_say_that_one_lives_does_not_limit_how_long_one_waits(
    connect: Callable[[float], Pair],
) -> None:
    """A rank looks for its next pass, says meanwhile that it lives, and has nothing to do then."""
    here, there = connect(SHORT)
    with ThreadPoolExecutor(1) as threads:
        message = threads.submit(here.receive, spin=4 * SHORT)
        for _ in range(10):
            here.beat()
            time.sleep(SHORT / 20)
        time.sleep(3 * SHORT)
        there.send(Lines("target", 1, 2))
        assert message.result(LONG) == Lines("target", 1, 2)


def test_many_threads_may_send(pair: Pair) -> None:
    here, there = pair
    numbers = range(200)
    with ThreadPoolExecutor(4) as threads:
        sent = threads.map(lambda n: here.send(Ready(n, 64)), numbers)
        received = {there.receive() for _ in numbers}
        list(sent)
    assert received == {Ready(n, 64) for n in numbers}


def test_a_process_says_that_it_lives_until_there_is_nobody_to_say_it_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(listener.getsockname()[1])],
            env={"PYTHONPATH": ":".join(sys.path)},
        )
        peer = peer_of(listener.accept()[0], LONG)
    assert peer.receive() is None
    assert peer.receive() is None
    assert process.poll() is None
    peer.close()
    assert process.wait(LONG) == 1


RANK = """
import socket, sys, threading
from charonia.parallel.peer import Peer
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
Peer(Connection(Channel(connection)), 60.0).beat_for_ever()
threading.Event().wait()
"""
