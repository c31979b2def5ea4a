"""What speaks to the scheduler's socket does without Triton, and hears each answer to its end."""

import ast
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import get_args

import numpy as np
import pytest

from charonia.errors import InvalidRequestError, QueueFullError, UnavailableError
from charonia.serving.messages import relay
from charonia.serving.messages.relay import RelayedAnswer
from charonia.serving.messages.relay_client import SchedulerClient
from charonia.serving.requests.raw_request import RawRequest
from charonia.sockets import connection
from charonia.sockets.channel import Channel
from charonia.sockets.local import connect, listen
from support.sockets import SchedulerEnd, refuse_threads
from support.syntax import parse
from support.waiting import WAIT_S

RAW = RawRequest({"input_ids": np.array([1, 2], dtype=np.int32)}, {})


class Owner:
    """Keeps what a client tells it."""

    def __init__(self) -> None:
        self.answers: SimpleQueue[RelayedAnswer] = SimpleQueue()
        self.ends: SimpleQueue[None] = SimpleQueue()

    def on_answer(self, answer: RelayedAnswer) -> None:
        self.answers.put(answer)

    def on_end(self) -> None:
        self.ends.put(None)

    def next(self) -> RelayedAnswer:
        return self.answers.get(timeout=WAIT_S)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerEnd]:
    made = SchedulerEnd(tmp_path)
    yield made
    made.relay.close()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def client(scheduler: SchedulerEnd, owner: Owner) -> Iterator[SchedulerClient]:
    made = SchedulerClient(connect(scheduler.path), owner, log=print)
    yield made
    made.close()


def test_answers_come_by_the_key_of_their_request(
    scheduler: SchedulerEnd, client: SchedulerClient, owner: Owner
) -> None:
    keys = [client.send(RAW) for _ in range(2)]
    taken = [scheduler.next() for _ in keys]
    assert [key for key, _, _ in taken] == keys
    assert [raw.tensors["input_ids"].tolist() for _, raw, _ in taken] == [[1, 2]] * 2
    taken[1][2].send({"text_output": ["a"]}, is_final=False)
    taken[0][2].fail(QueueFullError("full"))
    taken[1][2].send({"text_output": ["b"]}, is_final=True)
    first, refusal, last = owner.next(), owner.next(), owner.next()
    assert first == RelayedAnswer(keys[1], {"text_output": ["a"]}, is_final=False)
    assert (refusal.key, type(refusal.failure), refusal.is_final) == (keys[0], QueueFullError, True)
    assert last == RelayedAnswer(keys[1], {"text_output": ["b"]})


def test_the_scheduler_is_told_of_cancellations_acknowledgements_and_the_servers_end(
    scheduler: SchedulerEnd, client: SchedulerClient
) -> None:
    key = client.send(RAW)
    client.acknowledge(key, 3)
    client.cancel(key)
    client.note_server_stopping()
    assert scheduler.acknowledged.get(timeout=WAIT_S) == (key, 3)
    assert scheduler.cancelled.get(timeout=WAIT_S) == key
    assert scheduler.is_stopping.wait(WAIT_S)


@pytest.mark.parametrize("who", ["client", "scheduler"])
def test_the_end_of_the_connection_is_told_once_whoever_ends_it(
    scheduler: SchedulerEnd, client: SchedulerClient, owner: Owner, who: str
) -> None:
    key = client.send(RAW)
    scheduler.next()
    if who == "client":
        client.close()
    else:
        scheduler.relay.close()
    owner.ends.get(timeout=WAIT_S)
    assert scheduler.cancelled.get(timeout=WAIT_S) == key
    client.cancel(key)  # which nobody hears
    client.close()
    assert owner.ends.empty()


def test_a_request_that_is_too_long_is_refused_and_others_are_sent(
    scheduler: SchedulerEnd, owner: Owner
) -> None:
    channel = connect(scheduler.path, max_bytes=1000)
    client = SchedulerClient(channel, owner, log=print)
    long = RawRequest({"input_ids": np.zeros(1000, dtype=np.int32)}, {})
    with pytest.raises(InvalidRequestError, match="cannot be handed on"):
        client.send(long)
    assert client.send(RAW) == scheduler.next()[0]
    client.close()


def test_what_a_stopped_scheduler_does_not_take_is_bounded_and_then_refused(
    tmp_path: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING", 2)
    with contextlib.closing(listen(tmp_path / "requests.socket")):
        client = SchedulerClient(connect(tmp_path / "requests.socket"), owner, log=print)
        long = RawRequest({"input_ids": np.zeros(2**21, dtype=np.int32)}, {})
        for _ in range(2):
            client.send(long)
        with pytest.raises(UnavailableError, match="the scheduler takes nothing"):
            client.send(RAW)
        assert owner.ends.empty()
        client.note_server_stopping()  # no word of that: the end of the connection says it
        owner.ends.get(timeout=WAIT_S)


def test_what_is_said_of_requests_is_kept_for_a_scheduler_that_takes_nothing_for_a_while(
    tmp_path: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream whose acknowledgement is lost would wait for it for ever."""
    monkeypatch.setattr(connection, "MAX_WAITING", 2)
    with contextlib.closing(listen(tmp_path / "requests.socket")) as listener:
        client = SchedulerClient(connect(tmp_path / "requests.socket"), owner, log=print)
        long = RawRequest({"input_ids": np.zeros(2**21, dtype=np.int32)}, {})
        first, second = (client.send(long) for _ in range(2))
        client.acknowledge(first, 3)
        client.cancel(second)
        scheduler = Channel(listener.accept()[0])
        received = [scheduler.receive(WAIT_S) for _ in range(4)]
        said = [relay.decode_message(data) for data in received[2:] if data is not None]
        assert said == [relay.Acknowledgement(first, 3), relay.Cancellation(second)]
        scheduler.close()
        client.close()


def test_without_a_thread_for_the_answers_there_is_no_client(
    scheduler: SchedulerEnd, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "charonia-reader")
    channel = connect(scheduler.path)
    with pytest.raises(UnavailableError, match="no answer could be taken"):
        SchedulerClient(channel, owner, log=print)
    assert owner.ends.empty()
    assert channel.fileno() == -1


LOADED = """
import json, sys
import charonia.serving.messages.relay_client
print(json.dumps({name: module.__file__ for name, module in sys.modules.items()
                  if name.split(".")[0] == "charonia"}))
"""


def names_in(source: str) -> set[str]:
    """All names, attributes and arguments."""
    return {
        getattr(node, field)
        for node in ast.walk(parse(source))
        for field in ("id", "attr", "arg")
        if isinstance(getattr(node, field, None), str)
    }


def test_nothing_that_the_client_loads_knows_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=True
    )
    modules: dict[str, str] = json.loads(done.stdout)
    assert "charonia.serving.messages.relay" in modules
    knowing = {
        name
        for name, file in modules.items()
        if "pb_utils" in names_in(Path(file).read_text(encoding="utf-8"))
    }
    assert knowing == set()


def test_a_module_that_knows_triton_would_be_noticed() -> None:
    assert "pb_utils" in names_in("def make(pb_utils):\n    pass")
    assert "pb_utils" in names_in("class A:\n    def run(self):\n        self.pb_utils.Tensor()")


def test_the_tags_of_messages_do_not_follow_the_names_of_classes() -> None:
    """A postprocessor of an older version may still be there when the scheduler is reloaded."""
    tags = {one.__name__: one.__struct_config__.tag for one in get_args(relay.Message)}
    assert tags == {
        "RelayedRequest": "RelayedRequest",
        "Cancellation": "Cancellation",
        "Acknowledgement": "Acknowledgement",
        "Delivery": "Delivery",
        "Disconnect": "Parting",
        "ServerStopping": "ServerStopping",
    }
