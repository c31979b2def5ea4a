"""Both ends show that they know the secret; neither says it, and nothing else is taken before."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from charonia.parallel import handshake
from charonia.parallel.handshake import MAX_BYTES, admit_rank, find_engine
from charonia.sockets.channel import Channel
from support.waiting import WAIT_S

SECRET = "open sesame"


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The rank's, and the engine's."""
    near, far = socket.socketpair()
    both = Channel(near), Channel(far, max_bytes=MAX_BYTES)
    yield both
    for one in both:
        one.close()


@pytest.mark.parametrize(
    ("of_rank", "of_engine"), [(SECRET, SECRET), ("ü" * 99, "ü" * 99), ("", "")]
)
def test_ends_with_the_same_secret_find_each_other(
    ends: tuple[Channel, Channel], of_rank: str, of_engine: str
) -> None:
    with ThreadPoolExecutor(1) as threads:
        admitted = threads.submit(admit_rank, ends[1], of_engine)
        assert find_engine(ends[0], of_rank)
        assert admitted.result(WAIT_S)


def test_a_rank_with_another_secret_knows_it_first_and_says_nothing_more(
    ends: tuple[Channel, Channel],
) -> None:
    rank, engine = ends
    with ThreadPoolExecutor(1) as threads:
        admitted = threads.submit(admit_rank, engine, SECRET)
        assert not find_engine(rank, "open barley")
        rank.close()
        assert not admitted.result(WAIT_S)


@pytest.mark.parametrize("proof", [b"", b"x" * 32, b"x" * 64])
def test_who_only_guesses_the_proof_is_not_let_in(
    ends: tuple[Channel, Channel], proof: bytes
) -> None:
    rank, engine = ends
    with ThreadPoolExecutor(1) as threads:
        admitted = threads.submit(admit_rank, engine, SECRET)
        rank.send(b"n" * 32)
        assert len(rank.receive(WAIT_S) or b"") == 64
        rank.send(proof)
        assert not admitted.result(WAIT_S)


def test_the_engines_own_proof_sent_back_lets_nobody_in(ends: tuple[Channel, Channel]) -> None:
    rank, engine = ends
    with ThreadPoolExecutor(1) as threads:
        admitted = threads.submit(admit_rank, engine, SECRET)
        rank.send(b"n" * 32)
        rank.send((rank.receive(WAIT_S) or b"")[32:])
        assert not admitted.result(WAIT_S)


def test_what_was_said_once_is_worth_nothing_a_second_time(
    ends: tuple[Channel, Channel],
) -> None:
    rank, engine = ends
    nonce = b"n" * 32
    with ThreadPoolExecutor(1) as threads:
        for attempt in range(2):
            admitted = threads.submit(admit_rank, engine, SECRET)
            rank.send(nonce)
            other_nonce = (rank.receive(WAIT_S) or b"")[:32]
            if attempt == 0:
                proof = handshake._proof(SECRET, b"rank", nonce + other_nonce)
            rank.send(proof)
            assert admitted.result(WAIT_S) == (attempt == 0)


@pytest.mark.parametrize("words", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n", b"n" * 64])
def test_who_says_something_else_is_not_answered(
    ends: tuple[Channel, Channel], words: bytes
) -> None:
    rank, engine = ends
    rank.send(words)
    assert not admit_rank(engine, SECRET)
    assert rank.is_quiet()


def test_who_says_nothing_is_not_waited_for(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.05)
    for meet, end in ((admit_rank, ends[1]), (find_engine, ends[0])):
        with pytest.raises(TimeoutError):
            meet(end, SECRET)
