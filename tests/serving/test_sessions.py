"""Sessions: every request's chunks in order, its answer complete exactly once, others undisturbed.

Responders record here; Triton's own senders are tested on the real server.
"""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from charonia.core.output.outputs import Chunk
from charonia.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    ShuttingDownError,
)
from charonia.serving.conventions.schema import OutputOptions
from charonia.serving.requests.raw_request import Outputs
from support.sessions import AT_ONCE, NAMED, STREAMING, Harness, Source, chunk, texts
from support.waiting import WAIT_S, eventually


def test_each_response_of_a_named_request_has_its_number_and_tenant(
    harness: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = harness.open("k", NAMED, str, responder, tenant="t")
    for step in range(3):
        sink(chunk(step, is_last=step == 2))
        eventually(lambda step=step: len(responder.sent) == step + 1)
    keys = [outputs["request_key"] for outputs, _ in responder.sent]
    assert keys == [["k.1.t"], ["k.2.t"], ["k.3.t"]]


def test_what_requests_hold_is_bounded_and_given_back(harness: Harness, new_responder: Any) -> None:
    sink = harness.open("a", STREAMING, str, new_responder(), num_bytes=600)
    with pytest.raises(QueueFullError, match="1000 bytes"):
        harness.open("b", STREAMING, str, new_responder(), num_bytes=500)
    with pytest.raises(InvalidRequestError):
        harness.open("a", STREAMING, str, new_responder(), num_bytes=100)
    harness.open("b", STREAMING, str, new_responder(), num_bytes=400)
    harness.sessions.drop(harness.live["b"])
    harness.sessions.drop(harness.live["b"])
    sink(chunk(0, is_last=True))
    eventually(lambda: harness.queue_limit.held == (0, 0))


def test_a_flood_of_cancellations_is_one(harness: Harness, new_responder: Any) -> None:
    for key, name in (("a", "x"), ("b", "x"), ("c", "y")):
        harness.open(key, STREAMING, str, new_responder(), request_id=name, tenant="t")
    assert harness.sessions.find("x", "another") == []
    for _ in range(100):
        for one in harness.sessions.find("x", "t"):
            harness.sessions.cancel(one)
        harness.sessions.client_left("nobody")
    assert harness.cancelled == ["a", "b"]
    assert harness.live["a"].is_cancelled
    assert not harness.live["c"].is_cancelled


def test_who_makes_the_chunks_later_is_told_of_what_was_cancelled_before(
    harness: Harness, new_responder: Any
) -> None:
    for key in "ab":
        harness.live[key] = harness.sessions.open(
            key, STREAMING, str, new_responder(), num_samples=2
        )
    harness.sessions.cancel(harness.live["a"])
    harness.sessions.cancel_samples(harness.live["b"], [1])
    for _ in range(2):  # the tokenizer, and then the engine service
        for key in "ab":
            harness.sessions.attach(harness.live[key], Source(harness, key))
    assert harness.cancelled == ["a"] * 2
    assert harness.cancelled_samples == [("b", {1})] * 2


def test_who_makes_the_chunks_is_forgotten_once_they_have_come(
    harness: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = harness.open("k", AT_ONCE, str, responder)
    session = harness.live["k"]
    assert session.source is not None
    sink(chunk(0, is_last=True))
    assert session.source is None
    eventually(lambda: responder.sent)
    harness.sessions.attach(session, Source(harness, "k"))  # a cached answer is as fast as that
    assert session.source is None


def test_a_stream_keeps_its_order_and_ends_with_its_last_token(
    harness: Harness, new_responder: Any
) -> None:
    responders = [new_responder() for _ in range(20)]
    sinks = [
        harness.open(str(index), STREAMING, str, responder)
        for index, responder in enumerate(responders)
    ]
    for step in range(100):
        for sink in sinks:
            sink(chunk(step, is_last=step == 99))
    for responder in responders:
        eventually(lambda responder=responder: responder.sent and responder.sent[-1][1])
        assert texts(responder.sent) == "".join(f"{step} " for step in range(100))
        ids = [token_id for outputs, _ in responder.sent for token_id in outputs["output_ids"]]
        assert ids == list(range(100))
        assert [is_final for _, is_final in responder.sent[:-1]] == [False] * (
            len(responder.sent) - 1
        )
        assert not responder.failures


def test_what_piles_up_during_a_send_leaves_as_one_response(
    harness: Harness, new_responder: Any
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    responder = new_responder()
    record = responder.send

    def slow_send(outputs: Outputs, *, is_final: bool) -> None:
        has_begun.set()
        assert may_go_on.wait(WAIT_S)
        record(outputs, is_final=is_final)

    responder.send = slow_send
    sink = harness.open("k", STREAMING, str, responder)
    sink(chunk(0))
    assert has_begun.wait(WAIT_S)
    for index in (1, 2, 3):
        sink(chunk(index, is_last=index == 3))
    may_go_on.set()
    eventually(lambda: len(responder.sent) == 2)
    assert responder.sent[1][0]["text_output"] == ["1 2 3 "]
    assert responder.sent[1][1]


def test_without_streaming_there_is_one_response_with_the_echo(
    harness: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = harness.open("k", AT_ONCE, lambda: "prompt: ", responder)
    for index in range(5):
        sink(chunk(index, is_last=index == 4))
    eventually(lambda: responder.sent)
    assert responder.sent == [
        ({"text_output": ["prompt: 0 1 2 3 4 "], "output_ids": [0, 1, 2, 3, 4]}, True)
    ]


@pytest.mark.parametrize("num_chunks", [0, 2])
def test_a_whole_answer_that_is_cancelled_has_what_there_is_where_that_is_asked_for(
    harness: Harness, new_responder: Any, num_chunks: int
) -> None:
    names = AT_ONCE.names | {"finish_reason"}
    options = replace(AT_ONCE, names=names, keeps_cancelled=True)
    cancelled = Chunk("k", error=RequestCancelledError("the request was cancelled"))
    responders = [new_responder() for _ in range(3)]
    for responder, some, error in (
        (responders[0], options, cancelled),
        (responders[1], replace(options, keeps_cancelled=False), cancelled),
        (responders[2], options, Chunk("k", error=ShuttingDownError())),
    ):
        sink = harness.open("k", some, lambda: "prompt: ", responder)
        for step in range(num_chunks):
            sink(chunk(step))
        sink(error)
        eventually(lambda responder=responder: responder.sent or responder.failures)
    ((outputs, is_final),) = responders[0].sent
    assert is_final
    assert outputs["text_output"] == ["prompt: " + "".join(f"{n} " for n in range(num_chunks))]
    assert outputs["output_ids"] == list(range(num_chunks))
    assert outputs["finish_reason"] == ["cancelled"]
    assert responders[0].failures == []
    assert [str(error) for error in responders[1].failures] == ["the request was cancelled"]
    assert [str(error) for error in responders[2].failures] == ["the server is shutting down"]
    assert responders[1].sent == responders[2].sent == []


@pytest.mark.parametrize(("options", "num_sent"), [(STREAMING, 1), (AT_ONCE, 0)])
def test_an_error_comes_last_and_once(
    harness: Harness, new_responder: Any, options: OutputOptions, num_sent: int
) -> None:
    responder = new_responder()
    sink = harness.open("k", options, str, responder)
    sink(chunk(0))
    error = RequestCancelledError("the request was cancelled")
    sink(Chunk("k", error=error))
    eventually(lambda: responder.failures)
    assert responder.failures == [error]
    assert len(responder.sent) == num_sent


def test_a_send_that_raises_ends_that_request_alone(harness: Harness, new_responder: Any) -> None:
    broken, sound = new_responder(), new_responder()
    broken.errors.append(RuntimeError("no connection"))
    broken_sink = harness.open("broken", STREAMING, str, broken)
    sound_sink = harness.open("sound", STREAMING, str, sound)
    broken_sink(chunk(0))
    sound_sink(chunk(0, is_last=True))
    eventually(lambda: broken.failures and sound.sent)
    assert harness.cancelled == ["broken"]
    assert str(broken.failures[0]) == "internal error; the server's log has the details"
    assert "no connection" in harness.log[0]


def test_a_request_whose_response_failed_is_cancelled_also_if_its_source_comes_later(
    harness: Harness, new_responder: Any
) -> None:
    broken = new_responder()
    broken.errors.append(RuntimeError("no connection"))
    session = harness.sessions.open("k", STREAMING, str, broken)
    harness.sessions.take(session, chunk(0))
    eventually(lambda: not harness.sessions.num_live)
    harness.sessions.attach(session, Source(harness, "k"))
    assert harness.cancelled == ["k"]


def test_a_client_that_has_gone_is_noticed_and_its_request_cancelled(
    harness: Harness, new_responder: Any
) -> None:
    responders = {key: new_responder() for key in "abc"}
    for key, responder in responders.items():
        harness.open(key, STREAMING, str, responder)
    responders["b"].has_gone = True
    eventually(lambda: harness.cancelled)
    time.sleep(0.1)
    assert harness.cancelled == ["b"]


def test_a_key_cannot_be_live_twice(harness: Harness, new_responder: Any) -> None:
    sink = harness.open("k", STREAMING, str, new_responder())
    with pytest.raises(InvalidRequestError, match="request_key belongs to a live request"):
        harness.open("k", STREAMING, str, new_responder())
    sink(chunk(0, is_last=True))
    eventually(lambda: not harness.sessions.find("", ""))
    harness.open("k", STREAMING, str, new_responder())


def test_a_request_that_was_refused_is_forgotten(harness: Harness, new_responder: Any) -> None:
    responder = new_responder()
    harness.open("k", STREAMING, str, responder)
    harness.sessions.drop(harness.live["k"])
    responder.has_gone = True
    time.sleep(0.1)
    assert not harness.cancelled
    assert not responder.sent + responder.failures


def test_closing_answers_whatever_is_live(new_responder: Any) -> None:
    harness = Harness()
    responders = [new_responder() for _ in range(3)]
    sinks = [
        harness.open(str(index), options, str, responder)
        for index, (responder, options) in enumerate(
            zip(responders, (STREAMING, AT_ONCE, STREAMING), strict=True)
        )
    ]
    sinks[2](chunk(0, is_last=True))
    eventually(lambda: responders[2].sent)
    harness.sessions.close()
    for responder in responders[:2]:
        assert [type(error) for error in responder.failures] == [ShuttingDownError]
    assert not responders[2].failures


def test_each_sample_is_cancelled_once_and_only_one_that_there_is(
    harness: Harness, new_responder: Any
) -> None:
    sink = harness.open("k", STREAMING, str, new_responder(), num_samples=3)
    for indexes in ([1, 3, 127], [1], [2, 1], [5]):
        harness.sessions.cancel_samples(harness.live["k"], indexes)
    assert harness.cancelled_samples == [("k", {1}), ("k", {2})]
    assert harness.live["k"].cancelled_samples == {1, 2}
    assert not harness.cancelled
    sink(Chunk("k", finish_reason="stop"))
    eventually(lambda: not harness.sessions.num_live)


def test_the_end_of_a_cancelled_sample_is_a_response_and_its_reason_stays(
    harness: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    names = frozenset({"text_output", "finish_reason", "num_output_tokens"})
    sink = harness.open("k", replace(STREAMING, names=names), str, responder, num_samples=2)
    sink(Chunk("k", finish_reason="cancelled", index=1, num_open=1))
    eventually(lambda: len(responder.sent) == 1)
    sink(Chunk("k", text="a", token_ids=(1,), finish_reason="stop", index=0))
    eventually(lambda: len(responder.sent) == 2)
    assert responder.sent == [
        (
            {
                "text_output": ["", ""],
                "finish_reason": ["None", "cancelled"],
                "num_output_tokens": [0, 0],
            },
            False,
        ),
        (
            {
                "text_output": ["a", ""],
                "finish_reason": ["stop", "cancelled"],
                "num_output_tokens": [1, 0],
            },
            True,
        ),
    ]
