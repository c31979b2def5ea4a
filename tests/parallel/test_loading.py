"""Ranks that cannot be what they are to be, and groups that cannot be formed, are told of in words.

The engine is real, or the rank is; the other side is this process, which says what it wants.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from charonia.config import EngineArgs
from charonia.errors import CharoniaError, CheckpointError, ConfigError, RankLostError
from charonia.parallel import groups, worker_group
from charonia.parallel.groups import Groups, Membership
from charonia.parallel.handshake import SECRET_VARIABLE
from charonia.parallel.messages import Join, Message, Prepared, Ready, Refusal, Setup, encode
from charonia.parallel.peer import Peer
from charonia.parallel.rendezvous import Rendezvous
from charonia.parallel.table import Table
from charonia.parallel.topology import Topology
from charonia.version import VERSION
from support.long import long
from support.rank_end import introduced
from support.ranked_engine import descriptors, free_address, rank_args, ranked_engine
from support.waiting import WAIT_S, eventually

Checkpoint = Callable[..., Path]
SECRET = "open sesame"


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Arguments of an engine whose second rank comes by itself."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    return {"num_local_ranks": 1, "rendezvous": free_address()}


@contextmanager
def rank_that_says(args: EngineArgs, data: bytes) -> Iterator[None]:
    """A rank that joins, is told what to be, says one thing and ends at once."""

    def be() -> None:
        assert args.rendezvous is not None
        port = int(args.rendezvous.rpartition(":")[2])
        while True:
            try:
                connection = introduced(("127.0.0.1", port), SECRET)
                break
            except OSError:
                if is_over.wait(0.05):
                    return
        peer = Peer(connection, WAIT_S)
        peer.send(Join(VERSION, os.getpid(), "elsewhere", None))
        assert isinstance(peer.receive(WAIT_S), Setup)
        peer.send_encoded(data)
        peer.close()

    is_over = threading.Event()
    thread = threading.Thread(target=be)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (Refusal("CheckpointError", "no such tensor"), CheckpointError, "rank 1: no such tensor"),
        (Refusal("ConfigError", "no GPU"), ConfigError, "rank 1: no GPU"),
        (Refusal("MemoryError", "none left"), RankLostError, "rank 1: MemoryError: none left"),
        (Prepared("cuda", False, {}), ConfigError, "rank 1 computes on device 'cuda'"),
        (
            Prepared("cpu", False, {"target": {"the weights": "other"}}),
            CheckpointError,
            "rank 1 has another checkpoint of the target model .* and the weights differ",
        ),
        (Ready(1, 64), RankLostError, "rank 1 has sent Ready"),
        (b"\xc1", RankLostError, "the watcher: DecodeError"),
    ],
    ids=str,
)
def test_what_a_rank_said_before_it_ended_is_what_the_engine_says(
    checkpoint: Checkpoint,
    remote: dict[str, object],
    said: Message | bytes,
    kind: type[CharoniaError],
    words: str,
) -> None:
    args = rank_args(checkpoint(), **remote)
    data = said if isinstance(said, bytes) else encode(said)
    with rank_that_says(args, data), pytest.raises(kind, match=words), ranked_engine(args):
        pass
    assert not dist.is_initialized()


@contextmanager
def rank_of(args: EngineArgs, num_local: int = 1) -> Iterator[Peer]:
    """A rank that has joined, and which must end with an error.

    Args:
        num_local: how many ranks of its machine it is told of.
    """
    rendezvous = Rendezvous(args, print)
    address = f"{rendezvous.address}:{rendezvous.port}"
    command = [sys.executable, "-m", "charonia.parallel.worker", "--join", address]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([*command, "--parent", str(os.getpid())], env=env) as process:
        [(_, peer)] = rendezvous.wait(lambda: None)
        peer.send(Setup(1, args, 0, num_local))
        try:
            yield peer
            assert process.wait(WAIT_S) == 1
        finally:
            process.kill()
            peer.close()
            rendezvous.close()


def next_of(peer: Peer) -> Message:
    while (message := peer.receive(WAIT_S)) is None:
        pass
    return message


def test_a_rank_says_what_keeps_it_from_being_what_it_is_to_be(remote: dict[str, object]) -> None:
    with rank_of(rank_args(Path("no/such/place"), **remote)) as peer:
        refusal = next_of(peer)
        assert isinstance(refusal, Refusal)
        assert refusal.kind == "CheckpointError"


def test_a_rank_says_also_what_nobody_has_thought_of(
    checkpoint: Checkpoint, remote: dict[str, object]
) -> None:
    with rank_of(rank_args(checkpoint(), cpu_threads=None, **remote), num_local=0) as peer:
        refusal = next_of(peer)
        assert isinstance(refusal, Refusal)
        assert refusal.kind == "ZeroDivisionError"
        assert refusal.text


def test_what_nobody_has_thought_of_is_in_the_ranks_log_as_a_whole(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(worker_group, "Setup", lambda *values: Setup(*values[:3], 0))
    with (
        pytest.raises(RankLostError, match=r"^rank 1: ZeroDivisionError: "),
        ranked_engine(rank_args(checkpoint(), cpu_threads=None)),
    ):
        pass
    log = capfd.readouterr().err
    assert "Traceback" in log
    assert "in be_rank" in log


@long
def test_a_second_engine_through_torch_distributed_in_one_process_is_refused_at_once(
    checkpoint: Checkpoint,
) -> None:
    args = rank_args(checkpoint(), cpu_kernels="torch")
    with ranked_engine(args) as engine:
        with (
            pytest.raises(ConfigError, match="is in use in this process already"),
            ranked_engine(args),
        ):
            pass
        assert engine.lost.empty()
        engine.step([5] * 20)


def form_alone() -> None:
    """Try to form groups with a rank that never comes."""
    me = Membership(0, [None, None], "127.0.0.1", Table())
    with pytest.raises(RankLostError, match="groups cannot be formed"):
        Groups(Topology(2, 1, 0), me, None, torch.device("cpu"))


def test_groups_that_cannot_be_formed_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_FORMING_TIMEOUT", timedelta(seconds=1))
    before = descriptors()
    form_alone()
    assert not dist.is_initialized()
    eventually(lambda: set(descriptors()) <= set(before), "everything is closed")


def test_groups_that_cannot_be_formed_do_not_keep_the_next_ones_from_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(groups, "_FORMING_TIMEOUT", timedelta(seconds=1))
        form_alone()
    with ranked_engine(rank_args(checkpoint(), cpu_kernels="torch")) as engine:
        engine.step([5] * 20)


def test_only_ranks_that_all_have_kernels_share_memory() -> None:
    """One that has none takes part in no memory, whatever the others have."""
    me = Membership(0, ["here", "here", None, "there"], "127.0.0.1", object())  # type: ignore[arg-type]
    assert me.can_share([0, 1])
    assert not me.can_share([0, 2])
    assert not me.can_share([2])
    assert not me.can_share([1, 3])
