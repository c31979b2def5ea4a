"""Reports of responses that were passed on: how many may be under way, and what a loss changes."""

import time
from typing import Any

import pytest

from charonia.core.output.outputs import Chunk
from charonia.errors import (
    RequestCancelledError,
    ShuttingDownError,
)
from charonia.serving.requests import sessions
from charonia.serving.requests.sessions import (
    LOST_RESPONSE_S,
    MAX_UNDER_WAY,
    SHARED_UNDER_WAY,
)
from support.sessions import NAMED, STREAMING, Harness, chunk, texts
from support.waiting import Clock, eventually

FOR_EVER_S = 3600.0


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
