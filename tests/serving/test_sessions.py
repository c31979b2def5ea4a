"""Sessions: every request's chunks in order, its answer complete exactly once, others undisturbed.

Responders record here; Triton's own senders are tested on the real server.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from charonia.core.output.outputs import Chunk
from charonia.errors import (
    CharoniaError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    ShuttingDownError,
)
from charonia.serving.conventions.schema import OutputOptions
from charonia.serving.requests import session, sessions
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import Outputs
from charonia.serving.requests.session import Session
from charonia.serving.requests.sessions import (
    LOST_RESPONSE_S,
    MAX_UNDER_WAY,
    SHARED_UNDER_WAY,
    Sessions,
)
from charonia.text.tokenizer import Tokenizer
from support.waiting import WAIT_S, Clock, eventually

STREAMING = OutputOptions(
    is_streaming=True, has_echo=False, names=frozenset({"text_output", "output_ids"})
)
NAMED = OutputOptions(
    is_streaming=True, has_echo=False, names=frozenset({"text_output"}), has_key=True
)
FOR_EVER_S = 3600.0
AT_ONCE = OutputOptions(
    is_streaming=False, has_echo=True, names=frozenset({"text_output", "output_ids"})
)


@dataclass
class Source:
    """Writes down what is cancelled."""

    harness: "Harness"
    key: str

    def cancel(self) -> None:
        self.harness.cancelled.append(self.key)

    def cancel_samples(self, indexes: Collection[int]) -> None:
        self.harness.cancelled_samples.append((self.key, indexes))


class Harness:
    """Sessions, what they cancelled and what they logged."""

    def __init__(self, num_threads: int = 2, stream_interval: int = 1) -> None:
        from support.checkpoints import make_tokenizer

        self.cancelled: list[str] = []
        self.cancelled_samples: list[tuple[str, Collection[int]]] = []
        self.live: dict[str, Session] = {}
        self.log: list[str] = []
        self.queue_limit = QueueLimit(100, 1000)
        self.sessions = Sessions(
            Tokenizer(make_tokenizer()),
            num_threads,
            self.queue_limit,
            log=self.log.append,
            stream_interval=stream_interval,
        )

    def open(self, key: str, *args: Any, **options: Any) -> Callable[[Chunk], None]:
        """Open a session; the sink for its chunks."""
        session = self.live[key] = self.sessions.open(key, *args, **options)
        self.sessions.attach(session, Source(self, key))
        return partial(self.sessions.take, session)

    def settle(self, responder: Any) -> None:
        """Wait until all that may be sent has been, where there is one sender: a stream's only
        token comes last.
        """
        self.open("settles", STREAMING, str, responder)(chunk(0, is_last=True))
        eventually(lambda: responder.sent)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which sessions wait."""
    clock = Clock()
    for module in (session, sessions):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "CLOSE_WAIT_S", 0.05)  # some leave requests that wait for ever
        made.sessions.close()


def chunk(index: int, *, is_last: bool = False) -> Chunk:
    return Chunk(
        "k", text=f"{index} ", token_ids=(index,), finish_reason="stop" if is_last else None
    )


def texts(sent: list[tuple[Outputs, bool]]) -> str:
    return "".join(outputs["text_output"][0] for outputs, _ in sent)


def test_few_responses_are_under_way_to_who_reports_them(
    harness: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = harness.open("k", STREAMING, str, responder)
    sink(chunk(0))
    eventually(lambda: len(responder.sent) == 1)
    harness.sessions.report("k", 1)  # from now on there are reports
    for step in range(1, 20):
        sink(chunk(step))
        eventually(lambda step=step: len(responder.sent) == 1 + min(step, MAX_UNDER_WAY))
    harness.sessions.report("k", 2)
    eventually(lambda: len(responder.sent) == 2 + MAX_UNDER_WAY)
    assert texts(responder.sent) == "".join(f"{step} " for step in range(20))
    sink(chunk(20))
    sink(chunk(21, is_last=True))  # which waits for nobody
    eventually(lambda: responder.sent[-1][1])
    assert texts(responder.sent) == "".join(f"{step} " for step in range(22))


def test_few_responses_are_under_way_to_who_acknowledges_them(
    harness: Harness, new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FIRST_REPORT_S", FOR_EVER_S)
    responder = new_responder()
    responder.is_acknowledged = True
    sink = harness.open("k", STREAMING, str, responder)
    for step in range(20):
        sink(chunk(step))
        eventually(lambda step=step: len(responder.sent) == min(step + 1, MAX_UNDER_WAY))
    harness.sessions.stop_reports(is_lost=True)  # of somebody else
    harness.sessions.acknowledge("k", 1)
    eventually(lambda: len(responder.sent) == MAX_UNDER_WAY + 1)
    assert len(texts(responder.sent).split()) == 20  # what had piled up left as one
    sink(chunk(20, is_last=True))  # which waits for nobody
    eventually(lambda: responder.sent[-1][1])


def test_the_end_of_reports_lets_all_responses_go(harness: Harness, new_responder: Any) -> None:
    responder = new_responder()
    sink = harness.open("k", NAMED, str, responder)
    harness.sessions.report("k", 0)
    for step in range(20):
        sink(chunk(step))
        eventually(lambda step=step: len(responder.sent) == min(step + 1, MAX_UNDER_WAY))
    assert len(texts(responder.sent).split()) == MAX_UNDER_WAY
    harness.sessions.stop_reports()
    eventually(lambda: len(texts(responder.sent).split()) == 20)
    harness.sessions.report("of nobody", 1)


class Loss:
    """Two streams that were reported, after whose reporter was lost with a response of one."""

    def __init__(self, harness: Harness, new_responder: Any) -> None:
        self.sessions = harness.sessions
        self.responders = {name: new_responder() for name in ("lost", "arrived")}
        self.sinks = {
            name: harness.open(name, NAMED, str, responder)
            for name, responder in self.responders.items()
        }
        for name in self.sinks:
            self.send(name, 0)
            self.sessions.report(name, 1)
        self.send("lost", 1)
        self.sessions.stop_reports(is_lost=True)

    def send(self, name: str, step: int) -> None:
        """One response, which goes out."""
        self.sinks[name](chunk(step))
        eventually(lambda: texts(self.responders[name].sent).endswith(f"{step} "))


def test_what_follows_a_lost_response_waits_until_triton_has_missed_it(
    harness: Harness, new_responder: Any, clock: Clock
) -> None:
    loss = Loss(harness, new_responder)
    sent = loss.responders["lost"].sent
    for step in range(2, 20):
        loss.sinks["lost"](chunk(step))
    loss.sinks["lost"](chunk(20, is_last=True))
    clock.now += LOST_RESPONSE_S - 0.1
    time.sleep(1.2 * sessions._LOOK_S)
    assert len(sent) == 2
    clock.now += 0.2
    eventually(lambda: len(sent) == 3)
    assert texts(sent) == "".join(f"{step} " for step in range(21))


def test_who_lost_nothing_goes_on_with_the_successor(
    harness: Harness, new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FIRST_REPORT_S", FOR_EVER_S)
    loss = Loss(harness, new_responder)
    for step in range(1, 1 + MAX_UNDER_WAY):
        loss.send("arrived", step)
    loss.sinks["arrived"](chunk(9))
    time.sleep(0.1)
    assert len(loss.responders["arrived"].sent) == 1 + MAX_UNDER_WAY
    loss.sessions.report("arrived", 2)
    eventually(lambda: texts(loss.responders["arrived"].sent).endswith("9 "))


def test_a_report_shows_that_nothing_was_lost(
    harness: Harness, new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LOST_RESPONSE_S", FOR_EVER_S)
    monkeypatch.setattr(sessions, "MAX_ERROR_WAIT_S", 0.1)
    loss = Loss(harness, new_responder)  # of another process than that which has the responses
    loss.sinks["lost"](chunk(2))
    time.sleep(0.1)
    assert len(loss.responders["lost"].sent) == 2
    loss.sessions.stop_reports()  # of yet another, which changes nothing
    loss.sessions.report("lost", 1)
    eventually(lambda: texts(loss.responders["lost"].sent).endswith("2 "))
    loss.sinks["lost"](Chunk("lost", error=ShuttingDownError()))
    eventually(lambda: loss.responders["lost"].failures)  # which waits no longer than any other


def test_a_second_loss_adds_to_the_first(
    harness: Harness, new_responder: Any, clock: Clock
) -> None:
    loss = Loss(harness, new_responder)
    loss.send("arrived", 1)
    loss.sessions.stop_reports(is_lost=True)
    for sink in loss.sinks.values():
        sink(chunk(2, is_last=True))
    lost, arrived = (loss.responders[name].sent for name in ("lost", "arrived"))
    assert not lost[-1][1]
    clock.now += LOST_RESPONSE_S + 0.1
    eventually(lambda: lost[-1][1])
    assert not arrived[-1][1]
    clock.now += LOST_RESPONSE_S
    eventually(lambda: arrived[-1][1])


def test_a_stream_that_outlives_its_loss_goes_on(
    harness: Harness, new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LOST_RESPONSE_S", 0.2)
    monkeypatch.setattr(sessions, "FIRST_REPORT_S", 0.2)
    loss = Loss(harness, new_responder)
    for step in range(2, 4 + MAX_UNDER_WAY):  # more than may be under way, and nobody reports
        loss.send("lost", step)


def test_what_is_lost_holds_up_no_end_of_all(
    new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LOST_RESPONSE_S", FOR_EVER_S)
    harness = Harness()
    loss = Loss(harness, new_responder)
    loss.sinks["lost"](chunk(2, is_last=True))
    loss.sinks["arrived"](chunk(1))
    harness.sessions.close()
    assert texts(loss.responders["lost"].sent) == "0 1 2 "
    assert not loss.responders["lost"].failures
    assert [type(error) for error in loss.responders["arrived"].failures] == [ShuttingDownError]


def test_a_stream_goes_on_when_somebody_reports_again_after_a_pause(
    harness: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = harness.open("k", STREAMING, str, responder)
    for step in range(20):  # nobody tells of these
        sink(chunk(step))
        eventually(lambda step=step: len(responder.sent) == step + 1)
    harness.sessions.report("k", 20)
    for step in range(20, 20 + MAX_UNDER_WAY):
        sink(chunk(step))
        eventually(lambda step=step: len(responder.sent) == step + 1)
    sink(chunk(30))
    time.sleep(0.05)
    assert len(responder.sent) == 20 + MAX_UNDER_WAY
    harness.sessions.report("k", 19)  # late, and of no use
    harness.sessions.report("k", 22)  # and one was lost before it
    eventually(lambda: len(responder.sent) == 21 + MAX_UNDER_WAY)
    harness.sessions.report("k", 10**9)  # which cannot be
    num_sent = len(responder.sent)
    for step in range(MAX_UNDER_WAY):
        sink(chunk(31 + step))
        eventually(lambda step=step: len(responder.sent) == num_sent + step + 1)
    sink(chunk(40))
    time.sleep(0.05)
    assert len(responder.sent) == num_sent + MAX_UNDER_WAY


def test_a_named_stream_counts_on_reports_from_its_start_but_not_for_ever(
    harness: Harness, new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FIRST_REPORT_S", 0.5)
    responders = {name: new_responder() for name in ("first", "silent")}
    sinks = {}
    for name, responder in responders.items():
        sinks[name] = harness.open(name, NAMED, str, responder)
        begun = time.monotonic()
        for step in range(1 + MAX_UNDER_WAY):
            sinks[name](chunk(step))
            eventually(lambda responder=responder, step=step: len(responder.sent) == 1 + step)
        if name == "first":  # nobody is known to report
            harness.sessions.report("first", 1)
            harness.sessions.drop(harness.live["first"])
    assert time.monotonic() - begun >= 0.5


def test_many_streams_share_what_may_be_under_way(
    harness: Harness, new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FIRST_REPORT_S", FOR_EVER_S)
    harness.sessions.report("of nobody", 1)  # but somebody does
    responders = [new_responder() for _ in range(SHARED_UNDER_WAY)]
    sinks = [
        harness.open(str(index), NAMED, str, responder)
        for index, responder in enumerate(responders)
    ]
    for sink, responder in zip(sinks, responders, strict=True):
        sink(chunk(0))
        eventually(lambda responder=responder: responder.sent)
        sink(chunk(1))
    time.sleep(0.1)
    assert [len(responder.sent) for responder in responders] == [1] * SHARED_UNDER_WAY
    for index in range(1, SHARED_UNDER_WAY):
        harness.sessions.drop(harness.live[str(index)])
    sinks[0](chunk(2))  # who is left has more room
    eventually(lambda: texts(responders[0].sent) == "0 1 2 ")


def test_an_error_does_not_wait_for_ever_for_reports(
    harness: Harness, new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ERROR_WAIT_S", 0.1)
    responder = new_responder()
    sink = harness.open("k", STREAMING, str, responder, num_bytes=10)
    harness.sessions.report("k", 0)  # and never again
    sink(chunk(0))
    eventually(lambda: responder.sent)
    sink(Chunk("k", error=RequestCancelledError("the request was cancelled")))
    eventually(lambda: responder.failures)
    assert harness.queue_limit.held == (0, 0)


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


def test_an_error_follows_when_what_was_sent_before_it_has_been_handed_on(
    harness: Harness, new_responder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ERROR_WAIT_S", FOR_EVER_S)
    responder = new_responder()
    sink = harness.open("k", STREAMING, "", responder)
    for step in range(2):
        sink(chunk(step))
        eventually(lambda step=step: len(responder.sent) == 1 + step)
        harness.sessions.report("k", 1 + step)
    sink(chunk(2))
    eventually(lambda: len(responder.sent) == 3)
    sink(Chunk("k", error=ShuttingDownError()))
    time.sleep(0.3)
    assert responder.failures == []
    harness.sessions.report("k", 3)
    eventually(lambda: responder.failures)
    assert texts(responder.sent) == "0 1 2 "


def test_at_the_end_nobody_waits_for_reports_that_do_not_come(new_responder: Any) -> None:
    harness, responder = Harness(), new_responder()
    sink = harness.open("k", STREAMING, "", responder)
    sink(chunk(0))
    eventually(lambda: len(responder.sent) == 1)
    harness.sessions.report("k", 1)
    sink(chunk(1))
    eventually(lambda: len(responder.sent) == 2)
    harness.sessions.close()
    assert [type(error) for error in responder.failures] == [ShuttingDownError]


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


# ---------------------------------------------------------------------- the interval


@pytest.fixture
def by_fours() -> Iterator[Harness]:
    """Sessions whose responses have four tokens; one thread sends them."""
    made = Harness(num_threads=1, stream_interval=4)
    yield made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "CLOSE_WAIT_S", 0.05)
        made.sessions.close()


def test_the_first_token_goes_at_once_and_others_by_the_interval(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder)
    for step in range(10):
        sink(chunk(step, is_last=step == 9))
        by_fours.settle(new_responder())
    assert [outputs["output_ids"] for outputs, _ in responder.sent] == [
        [0],
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9],
    ]
    assert texts(responder.sent) == "".join(f"{step} " for step in range(10))


def test_a_chunk_of_several_tokens_counts_as_many(by_fours: Harness, new_responder: Any) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder)
    for num_tokens in (3, 3, 2, 1, 7):
        sink(Chunk("k", text="a", token_ids=(1,) * num_tokens))
        by_fours.settle(new_responder())
    assert [len(outputs["output_ids"]) for outputs, _ in responder.sent] == [3, 5, 8]


@pytest.mark.parametrize(
    "error", [None, RequestCancelledError("the request was cancelled"), ShuttingDownError()]
)
def test_the_interval_holds_no_end_back(
    by_fours: Harness, new_responder: Any, error: CharoniaError | None
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder)
    for step in range(3):
        sink(chunk(step))
        by_fours.settle(new_responder())
    assert texts(responder.sent) == "0 "
    sink(chunk(3, is_last=True) if error is None else Chunk("k", error=error))
    eventually(lambda: responder.failures or responder.sent[-1][1])
    assert texts(responder.sent) == ("0 1 2 3 " if error is None else "0 1 2 ")
    assert responder.failures == ([] if error is None else [error])


def test_each_sample_has_an_interval_a_first_token_and_an_end_of_its_own(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder, num_samples=2)
    for text in "aababababab":
        index = "ab".index(text)
        sink(Chunk("k", text=text, token_ids=(index,), index=index, num_open=1))
        by_fours.settle(new_responder())
    sink(Chunk("k", finish_reason="cancelled", index=0, num_open=1))
    by_fours.settle(new_responder())
    assert [outputs["text_output"] for outputs, _ in responder.sent] == [
        ["a", ""],
        ["a", "b"],  # the first of the second one, with what there is
        ["aaaa", "bbb"],
        ["", "b"],
    ]


def test_what_has_no_token_does_not_take_the_place_of_the_first_one(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder, num_samples=2)
    sink(Chunk("k", text="-", index=1, num_open=2))
    for index in (0, 1):
        sink(Chunk("k", text="ab"[index], token_ids=(index,), index=index, num_open=2))
        by_fours.settle(new_responder())
    assert [outputs["text_output"] for outputs, _ in responder.sent] == [["a", "-"], ["", "b"]]


def test_a_whole_answer_is_one_response_with_any_interval(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", AT_ONCE, str, responder)
    for step in range(6):
        sink(chunk(step, is_last=step == 5))
        by_fours.settle(new_responder())
    assert [outputs["output_ids"] for outputs, _ in responder.sent] == [list(range(6))]


def test_few_responses_are_under_way_with_any_interval(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    responder.is_acknowledged = True
    sink = by_fours.open("k", STREAMING, str, responder)
    for step in range(40):
        sink(chunk(step))
        by_fours.settle(new_responder())
        assert len(responder.sent) == min(1 + step // 4, MAX_UNDER_WAY)
    by_fours.sessions.acknowledge("k", MAX_UNDER_WAY)
    eventually(lambda: len(responder.sent) == 1 + MAX_UNDER_WAY)
    assert texts(responder.sent) == "".join(f"{step} " for step in range(40))
