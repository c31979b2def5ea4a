"""Requests that are handed on through a socket: each is answered, and the ends see each other's."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.errors import UnavailableError
from charonia.serving.messages import relay_server
from charonia.serving.messages.relay import (
    REQUESTS_SOCKET,
    Cancellation,
    Delivery,
    RelayedAnswer,
    RelayedRequest,
    decode_answer,
    encode,
)
from charonia.serving.messages.relay_server import RelayServer
from charonia.serving.requests.raw_request import RawRequest
from charonia.sockets import connection
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import connect
from support.sockets import SchedulerEnd
from support.waiting import WAIT_S, eventually

PLAIN = RelayedRequest("k", RawRequest({"input_ids": np.array([1], dtype=np.int32)}, {}))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SchedulerEnd]:
    made = SchedulerEnd(tmp_path)
    yield made
    made.relay.close()


@pytest.fixture
def channel(server: SchedulerEnd) -> Iterator[Channel]:
    made = connect(server.path)
    yield made
    made.close()


def received(channel: Channel) -> RelayedAnswer:
    data = channel.receive(WAIT_S)
    assert data is not None
    return decode_answer(data)


def test_a_request_arrives_as_it_was_sent(
    server: SchedulerEnd, channel: Channel, strings: Any
) -> None:
    tensors = {
        "text_input": strings("ü", b"\xff\x00"),
        "input_ids": np.array([[1], [-2]], dtype=np.int32),
        "empty": np.zeros(0, dtype=np.int32),
        "stream": np.array([True]),
    }
    raw = RawRequest(tensors, {"top_p": 0.5, "seed": 2**62}, "7", 9, frozenset({"output_ids"}))
    channel.send(encode(RelayedRequest("k", raw)))
    key, arrived, _ = server.next()
    assert key == "k"
    assert arrived.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        assert arrived.tensors[name].dtype == array.dtype
        assert arrived.tensors[name].tolist() == array.tolist()
    assert (arrived.parameters, arrived.request_id, arrived.timeout_us, arrived.output_names) == (
        raw.parameters,
        raw.request_id,
        raw.timeout_us,
        raw.output_names,
    )


def test_each_connection_gets_the_answers_to_its_own_requests(
    server: SchedulerEnd, channel: Channel
) -> None:
    other = connect(server.path)
    channel.send(encode(PLAIN))
    _, _, first = server.next()
    other.send(encode(PLAIN))
    _, _, second = server.next()
    second.fail(UnavailableError("down"))
    first.send({"text_output": ["x"], "output_ids": [1]}, is_final=True)
    assert received(channel) == RelayedAnswer("k", {"text_output": ["x"], "output_ids": [1]})
    assert received(other) == RelayedAnswer("k", error="down", kind="unavailable")
    other.close()


def test_a_cancellation_names_its_request(server: SchedulerEnd, channel: Channel) -> None:
    channel.send(encode(Cancellation("k")))
    assert server.cancelled.get(timeout=WAIT_S) == "k"


def test_deliveries_name_their_request_and_end_with_their_connection(
    server: SchedulerEnd, channel: Channel
) -> None:
    channel.send(encode(Delivery("k", 3)))
    assert server.delivered.get(timeout=WAIT_S) == ("k", 3)
    channel.hang_up()  # by a process that lives
    assert server.lost.get(timeout=WAIT_S) is False


REPORTER = """
import sys, time
from pathlib import Path
from charonia.serving.messages.relay import Delivery, Disconnect, encode
from charonia.sockets.local import connect
channel = connect(Path(sys.argv[1]))
channel.send(encode(Delivery("k", 3)))
if "parts" in sys.argv:
    channel.send(encode(Disconnect()))
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("word", ["dies", "parts"])
def test_what_a_process_had_in_hand_is_lost_when_it_dies_without_a_word(
    server: SchedulerEnd, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_server, "_DEATH_S", WAIT_S)
    command = [sys.executable, "-c", REPORTER, str(server.path), word]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        assert server.lost.get(timeout=WAIT_S) is (word == "dies")
    assert server.delivered.get_nowait() == ("k", 3)


def test_a_process_that_ended_before_it_was_looked_at_has_lost_what_it_had(
    server: SchedulerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_server, "start_time", lambda pid: None)
    late = connect(server.path)
    late.send(encode(Delivery("k", 1)))
    late.close()
    assert server.lost.get(timeout=WAIT_S) is True


def test_the_end_of_a_connection_without_deliveries_says_nothing_of_any(
    server: SchedulerEnd, channel: Channel
) -> None:
    channel.send(encode(PLAIN))
    server.next()
    channel.hang_up()
    assert server.cancelled.get(timeout=WAIT_S) == "k"
    assert server.lost.empty()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000 + b"\xc0",
        encode(RelayedAnswer("k")),
        encode(PLAIN).replace(b"<i4", b"|O8"),
        encode(PLAIN).replace(b"<i4", b"<i8"),
    ],
)
def test_what_cannot_be_read_ends_its_connection_and_nothing_else(
    server: SchedulerEnd, channel: Channel, data: bytes
) -> None:
    broken = connect(server.path)
    broken.send(data)
    assert broken.receive(WAIT_S) is None
    broken.close()
    assert "a message could not be taken, hanging up" in server.log[0]
    channel.send(encode(PLAIN))
    assert server.next()[0] == "k"


def test_the_end_of_a_connection_cancels_what_came_through_it_and_is_not_answered(
    server: SchedulerEnd, channel: Channel
) -> None:
    other = connect(server.path)
    for key, end in {"mine": channel, "answered": other, "other's": other}.items():
        end.send(encode(RelayedRequest(key, PLAIN.raw)))
        _, _, responder = server.next()
        if key == "answered":
            responder.fail(UnavailableError("down"))
    assert received(other).key == "answered"
    other.close()
    assert server.cancelled.get(timeout=WAIT_S) == "other's"
    time.sleep(0.1)
    assert server.cancelled.empty()


def test_an_answer_that_is_too_long_is_an_error_of_its_request_alone(
    server: SchedulerEnd, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        channel.send(encode(PLAIN))
    (_, _, long), (_, _, short) = server.next(), server.next()
    monkeypatch.setattr(Connection, "post", bounded(Connection.post, 1000))
    long.send({"text_output": ["x" * 2000]}, is_final=True)
    short.send({"text_output": ["x"]}, is_final=True)
    answer = received(channel)
    assert (answer.error, answer.kind) == (
        "the answer is too long to be handed on in one piece",
        UnavailableError.kind,
    )
    assert received(channel).outputs == {"text_output": ["x"]}


def bounded(post: Callable[..., None], max_bytes: int) -> Callable[..., None]:
    def bounded_post(self: Connection, message: bytes, **options: bool) -> None:
        self.channel.max_bytes = max_bytes
        post(self, message, **options)

    return bounded_post


def test_answers_that_nobody_takes_are_bounded(
    server: SchedulerEnd, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING", 2)
    for _ in range(4):
        channel.send(encode(PLAIN))
    for responder in [server.next()[2] for _ in range(4)]:
        responder.send({"text_output": ["x" * 5_000_000]}, is_final=True)
    eventually(lambda: responder.is_cancelled())


def test_an_end_that_takes_nothing_holds_up_neither_answers_nor_the_end_of_the_server(
    server: SchedulerEnd, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOSE_TIMEOUT_S", 0.1)
    channel.send(encode(PLAIN))
    _, _, responder = server.next()
    started = time.monotonic()
    for _ in range(3):
        responder.send({"text_output": ["x" * 5_000_000]}, is_final=True)
    server.relay.close()
    assert time.monotonic() - started < WAIT_S


def test_closing_sends_the_answers_that_there_are_and_hangs_up(
    server: SchedulerEnd, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOSE_TIMEOUT_S", WAIT_S)
    channel.send(encode(PLAIN))
    _, _, responder = server.next()
    responder.send({"text_output": ["x" * 5_000_000]}, is_final=True)
    closing = threading.Thread(target=server.relay.close)
    closing.start()
    assert len(received(channel).outputs["text_output"][0]) == 5_000_000
    assert channel.receive(WAIT_S) is None
    closing.join(WAIT_S)
    assert not closing.is_alive()
    with pytest.raises(OSError, match="refused"):
        connect(server.path)


def test_closing_what_was_never_started_waits_for_nothing(
    server: SchedulerEnd, tmp_path: Path
) -> None:
    made = RelayServer(tmp_path / REQUESTS_SOCKET, server, server, log=lambda line: None)
    early = connect(tmp_path / REQUESTS_SOCKET)
    made.close()
    assert early.receive(WAIT_S) is None
    early.close()
