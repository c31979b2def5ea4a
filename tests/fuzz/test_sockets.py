"""Every decoder of bytes that come through a socket: a message, or the error that it documents.

Through a real server, too: whatever one connection says, it ends alone, and nothing is kept that is
longer than a message may be.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from charonia.config import EngineArgs
from charonia.errors import RankLostError
from charonia.metrics.page_socket import Sample, decode_samples
from charonia.parallel import messages as ranks
from charonia.parallel.groups import open_memory
from charonia.parallel.handshake import MAX_BYTES, admit_rank
from charonia.parallel.table import Get, Put, Table
from charonia.protocol import (
    EngineReply,
    EngineRequest,
    Hello,
    NewRow,
    RowSampling,
    RowStep,
    ShutdownNotice,
    StepFailure,
    StepPlan,
    decode_reply,
    decode_request,
    encode,
)
from charonia.serving.messages import relay
from charonia.serving.messages.reload import ReloadOrder, decode_order
from charonia.serving.requests.raw_request import RawRequest
from charonia.sockets.channel import Channel
from charonia.sockets.connection import Connection
from charonia.sockets.local import connect, is_same_user, listen
from charonia.sockets.server import Server
from support.fuzzing import little_memory

NESTED = b"\x91" * 100_000 + b"\xc0"
HUGE_LENGTHS = (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff")
PLAN = StepPlan(
    epoch=1,
    step_id=0,
    reset=True,
    joins=[NewRow(0, [1, 2], 2, 0, [7], RowSampling(seed=1, logit_bias={1: 0.5}))],
    rows=[RowStep(0, 2, [3])],
)
SAMPLE = Sample("charonia_step_seconds", "_bucket", {"le": "0.5"}, 3.0)
RAW = RawRequest({"input_ids": np.array([1, 2], dtype=np.int32)}, {"top_p": 0.5})
Decode = Callable[[bytes], object]
DECODERS: dict[str, tuple[Decode, list[bytes]]] = {
    "requests of the engine": (decode_request, [encode(Hello()), encode(PLAN)]),
    "replies of the engine": (decode_reply, [encode(ShutdownNotice()), encode(StepFailure("x"))]),
    "messages to the scheduler": (
        relay.decode_message,
        [
            relay.encode(relay.RelayedRequest("k", RAW)),
            relay.encode(relay.Delivery("k", 1)),
            relay.encode(relay.Disconnect()),
            relay.encode(relay.Cancellation("k")),
        ],
    ),
    "answers of the scheduler": (
        relay.decode_answer,
        [relay.encode(relay.RelayedAnswer("k", {"text_output": ["x"]}))],
    ),
    "orders to reload": (
        decode_order,
        [msgspec.msgpack.encode(ReloadOrder({"model": "m"}))],
    ),
    "metrics of the scheduler": (
        decode_samples,
        [msgspec.msgpack.encode([SAMPLE])],
    ),
    "messages of ranks": (
        ranks.decode,
        [
            ranks.encode(ranks.Join("1", 1, "h", None)),
            ranks.encode(ranks.Setup(1, EngineArgs(model="m"), 0, 1)),
            ranks.encode(ranks.Refusal("MemoryError", "none")),
            ranks.encode(ranks.Forward("target", b"\0" * 64, [0, 1], [16], 16, [0])),
        ],
    ),
    "requests of the ranks' table": (
        Table().answer,
        [msgspec.msgpack.encode(Put("a", b"1")), msgspec.msgpack.encode(Get("a", 0.0))],
    ),
}
ERRORS = (msgspec.DecodeError, ValueError, RecursionError, RankLostError)


@st.composite
def mutated(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """A valid message with some bytes changed, cut out, or put in."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 2)):
            case 0:
                data[place : place + 1] = draw(st.binary(min_size=1, max_size=4))
            case 1:
                del data[place : place + draw(st.integers(1, 16))]
            case _:
                data[place:place] = draw(st.sampled_from([*HUGE_LENGTHS, b"\xc1", NESTED]))
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_any_bytes_are_a_message_or_a_documented_error(name: str, data: st.DataObject) -> None:
    decode, valid = DECODERS[name]
    content = data.draw(st.binary(max_size=200) | mutated(valid))
    with contextlib.suppress(*ERRORS):
        decode(content)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("content", [NESTED, *HUGE_LENGTHS], ids=lambda data: data[:5].hex())
def test_deep_nesting_and_lengths_that_nobody_sends_are_refused(name: str, content: bytes) -> None:
    with little_memory(2**28), pytest.raises(ERRORS):
        DECODERS[name][0](content)


@given(value=st.binary(max_size=40))
@example(b"1 0")
@example(b"99999999999999999999 1")
def test_no_value_of_the_table_opens_anything_but_memory_of_ranks(value: bytes) -> None:
    with pytest.raises(RankLostError):
        open_memory(value, "charonia parts 0", 4096)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a server that answers, with messages of at most a thousand bytes."""

    def serve(connection: Connection) -> None:
        for message in connection.messages():
            connection.send(message)

    path = tmp_path_factory.mktemp("fuzz") / "echo.socket"
    server = Server(listen(path), is_same_user, serve, log=print, max_bytes=1000)
    server.start()
    yield path
    server.close()


@given(data=st.lists(st.binary(max_size=300), max_size=5), is_shut=st.booleans())
@example(data=[b"\xff\xff\xff\xff", b"x" * 300], is_shut=False)
@example(data=[b"\xe9\x03\x00\x00"], is_shut=False)
def test_whatever_one_connection_says_others_are_served(
    path: Path, data: list[bytes], is_shut: bool
) -> None:
    channel = connect(path)
    for part in data:
        try:
            channel.socket.sendall(part)
        except OSError:
            break  # it has been hung up on
    if is_shut:
        channel.socket.shutdown(socket.SHUT_WR)
    other = connect(path)
    other.send(b"a")
    assert other.receive(20) == b"a"
    other.close()
    channel.close()


@given(words=st.lists(st.binary(max_size=80), max_size=3))
def test_who_does_not_know_the_secret_is_not_let_in(words: list[bytes]) -> None:
    near, far = socket.socketpair()
    channel = Channel(far, max_bytes=MAX_BYTES)
    near.sendall(b"".join(len(one).to_bytes(4, "little") + one for one in words))
    near.shutdown(socket.SHUT_WR)
    assert not admit_rank(channel, "open sesame")
    near.close()
    channel.close()


def test_what_these_decode_is_what_they_are_named_for() -> None:
    """The valid messages above are valid: what is changed of them is nearly so."""
    for decode, valid in DECODERS.values():
        for data in valid:
            decode(data)
    reply: EngineReply = decode_reply(encode(ShutdownNotice()))
    request: EngineRequest = decode_request(encode(PLAN))
    assert (reply, request) == (ShutdownNotice(), PLAN)
