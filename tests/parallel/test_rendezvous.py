"""Where ranks join: who is counted, who is sent away, and at which addresses they are waited for.

Ranks are the connections of this process; none of them has a model.
"""

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from charonia.config import EngineArgs
from charonia.errors import ConfigError, RankLostError
from charonia.parallel.addresses import own_address
from charonia.parallel.handshake import SECRET_VARIABLE
from charonia.parallel.messages import Join, Message, Refusal
from charonia.parallel.peer import Peer
from charonia.parallel.rendezvous import Rendezvous
from charonia.version import VERSION
from support.rank_end import introduced
from support.ranked_engine import free_address
from support.waiting import WAIT_S, eventually

SECRET = "open sesame"
Joined = list[tuple[Join, Peer]]


class Arrivals(SimpleQueue[tuple[Join, Peer] | None]):
    """A queue that counts what came; each rank is met in a thread of its own."""

    num = 0

    def put(
        self, item: tuple[Join, Peer], block: bool = True, timeout: float | None = None
    ) -> None:
        super().put(item)
        self.num += 1


class OpenRendezvous:
    """A rendezvous that takes ranks in, and waits for one of this machine and one of another.

    Attributes:
        log: its lines. joined: who came in the end, once `wait` was called.
    """

    joined: Future[Joined]

    def __init__(self, args: EngineArgs) -> None:
        self.log: list[str] = []
        self._rendezvous = Rendezvous(args, self.log.append)
        self._rendezvous._arrived = self._arrivals = Arrivals()
        self.address = (self._rendezvous.address, self._rendezvous.port)
        self._pids = itertools.count(1)
        self._peers: list[Peer] = []

    def wait(self, threads: ThreadPoolExecutor) -> None:
        """Begin to wait, in a thread of its own."""
        self.joined = threads.submit(self._rendezvous.wait, lambda: None)

    def join(self, local_index: int | None = None, version: str = VERSION) -> Peer:
        """Connect and say so; the n-th has process id n."""
        peer = Peer(introduced(self.address, SECRET), WAIT_S)
        self._peers.append(peer)
        host = "elsewhere" if local_index is None else "here"
        num = self._arrivals.num
        peer.send(Join(version, next(self._pids), host, local_index))
        eventually(lambda: self._arrivals.num > num, "it arrives")
        return peer

    def pids(self) -> list[int]:
        """Who has come in the end."""
        joined = self.joined.result(WAIT_S)
        for _, peer in joined:
            peer.close()
        return [join.pid for join, _ in joined]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._rendezvous.close()


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineArgs]:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)

    def make(host: str = "127.0.0.1", **values: object) -> EngineArgs:
        defaults = {
            "model": "m",
            "tensor_parallel_size": 3,
            "num_local_ranks": 2,
            "rendezvous": free_address(host),
            "rank_timeout_s": WAIT_S,
        }
        return EngineArgs.from_dict(defaults | values)

    return make


@pytest.fixture
def rendezvous(args: Callable[..., EngineArgs]) -> Iterator[OpenRendezvous]:
    with ThreadPoolExecutor(1) as threads:
        one = OpenRendezvous(args(rendezvous_timeout_s=WAIT_S))
        one.wait(threads)
        yield one
        one.close()


def answer(peer: Peer) -> Message | None:
    return peer.receive(WAIT_S)


def test_ranks_of_this_machine_come_first(rendezvous: OpenRendezvous) -> None:
    rendezvous.join()
    rendezvous.join(local_index=1)
    assert rendezvous.pids() == [2, 1]


def test_one_rank_too_many_is_sent_away(rendezvous: OpenRendezvous) -> None:
    rendezvous.join()
    reason = "this engine has all the ranks that it waits for"
    assert answer(rendezvous.join()) == Refusal("ConfigError", reason)
    assert not rendezvous.joined.done()
    rendezvous.join(local_index=1)
    assert rendezvous.pids() == [3, 1]


@pytest.mark.parametrize("index", [0, 2])
def test_a_local_rank_that_was_not_started_is_sent_away(
    rendezvous: OpenRendezvous, index: int
) -> None:
    assert isinstance(answer(rendezvous.join(local_index=index)), Refusal)


def test_a_local_rank_counts_once(rendezvous: OpenRendezvous) -> None:
    rendezvous.join(local_index=1)
    assert isinstance(answer(rendezvous.join(local_index=1)), Refusal)


def test_a_rank_that_was_started_again_meanwhile_counts_once(rendezvous: OpenRendezvous) -> None:
    rendezvous.join().close()
    rendezvous.join()
    eventually(lambda: any("has gone again" in line for line in rendezvous.log), "it is missed")
    rendezvous.join(local_index=1)
    assert rendezvous.pids() == [3, 2]


def test_who_says_nothing_keeps_nobody_waiting(rendezvous: OpenRendezvous) -> None:
    with contextlib.ExitStack() as strangers:
        for number in range(100):
            one = strangers.enter_context(socket.create_connection(rendezvous.address))
            if number % 3 == 0:
                one.sendall(b"\x20\x00\x00\x00half of a nonce")
        rendezvous.join(local_index=1)
        rendezvous.join()
        assert rendezvous.pids() == [1, 2]


def test_a_rank_of_another_version_is_sent_away_and_both_are_named(
    rendezvous: OpenRendezvous,
) -> None:
    refusal = answer(rendezvous.join(version="0.0.7"))
    assert refusal == Refusal(
        "ConfigError", f"it is of version 0.0.7, and this engine of {VERSION}"
    )
    assert any("version 0.0.7" in line and VERSION in line for line in rendezvous.log)
    rendezvous.join()
    rendezvous.join(local_index=1)
    assert rendezvous.pids() == [3, 2]


def test_who_waits_in_vain_is_told_whom_it_refused(args: Callable[..., EngineArgs]) -> None:
    with ThreadPoolExecutor(1) as threads:
        rendezvous = OpenRendezvous(args(rendezvous_timeout_s=1.0))
        rank = rendezvous.join(version="0.0.7")  # whose way here is no part of that time
        rendezvous.wait(threads)
        assert isinstance(answer(rank), Refusal)
        with pytest.raises(RankLostError, match=r"only 0 of 2 other ranks .* version 0\.0\.7"):
            rendezvous.pids()
        rendezvous.close()


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("0.0.0.0", "'0.0.0.0' is not an address of this machine"),
        ("192.0.2.1", "'192.0.2.1' is not an address of this machine"),
        ("x" * 70, "cannot be resolved"),
    ],
)
def test_an_address_that_is_not_of_this_machine_is_named_at_once(
    args: Callable[..., EngineArgs], host: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"rendezvous = .*{problem}"):
        Rendezvous(args(host), print)


def test_a_rendezvous_may_be_a_name() -> None:
    assert own_address("localhost") in ("127.0.0.1", "::1")
    assert own_address("127.0.0.1") == "127.0.0.1"
