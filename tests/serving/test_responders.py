"""A response sender is never touched after its last response: that crashes the real server."""

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from charonia.errors import RequestCancelledError, UnavailableError
from charonia.events import parse_event
from charonia.serving.requests.responders import (
    CancellationPoller,
    TritonResponder,
    failing_with_errors,
)
from support.waiting import WAIT_S, eventually


class Sender:
    """As a Triton response sender, but it says when it is misused."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []

    def send(self, message: Any = None, flags: int = 0) -> None:
        self._check()
        self.sent.append((message, flags))

    def is_cancelled(self) -> bool:
        self._check()
        return True

    def _check(self) -> None:
        assert not any(flags for _, flags in self.sent), "used after its last response"


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def responder(pb_utils: Any, sender: Sender) -> TritonResponder:
    return TritonResponder(pb_utils, sender)


def test_the_final_flag_rides_on_the_last_response(
    responder: TritonResponder, sender: Sender
) -> None:
    responder.send({"text_output": ["a"]}, is_final=False)
    assert responder.is_cancelled()
    responder.send({"text_output": ["b"]}, is_final=True)
    assert [flags for _, flags in sender.sent] == [0, 1]
    assert all(message.output_tensors() for message, _ in sender.sent)


def test_nothing_follows_the_last_response(responder: TritonResponder, sender: Sender) -> None:
    responder.fail(UnavailableError("no"))
    responder.send({"text_output": ["b"]}, is_final=True)
    responder.fail(UnavailableError("again"))
    assert not responder.is_cancelled()
    assert [message.error().message() for message, _ in sender.sent] == [
        "no [charonia:unavailable]"
    ]


@dataclass(frozen=True)
class Named:
    """A request that is polled."""

    request_id: str

    @property
    def log_fields(self) -> dict[str, str | None]:
        return {"request_id": self.request_id}


def test_an_idle_poller_wakes_up_for_a_client_and_for_a_late_end(
    responder: TritonResponder, sender: Sender
) -> None:
    cancelled: list[Named] = []
    poller = CancellationPoller(cancelled.append, log=print)
    time.sleep(2 * poller.INTERVAL_S)
    poller.add(Named("k"), responder)
    eventually(lambda: cancelled == [Named("k")])
    time.sleep(2 * poller.INTERVAL_S)
    poller.end_later(partial(responder.fail, RequestCancelledError("the request was cancelled")))
    eventually(lambda: sender.sent)
    time.sleep(2 * poller.INTERVAL_S)
    poller.close()


def test_a_responder_that_cannot_be_asked_or_ended_costs_no_other_its_poller(
    responder: TritonResponder,
) -> None:
    class Broken:
        is_polled = True
        is_acknowledged = False

        def is_cancelled(self) -> bool:
            raise OSError("no such request")

        def fail(self, error: Exception) -> None:
            raise OSError("no such response")

    log: list[str] = []
    cancelled: list[Named] = []
    poller = CancellationPoller(cancelled.append, log=log.append)
    broken: Any = Broken()
    poller.add(Named("broken"), broken)
    poller.end_later(partial(broken.fail, RequestCancelledError("the request was cancelled")))
    eventually(lambda: len(log) == 2)
    poller.add(Named("k"), responder)
    eventually(lambda: cancelled == [Named("k")])
    time.sleep(2 * poller.INTERVAL_S)
    assert len(log) == 2  # it is not asked again
    (asked,) = [line for line in log if line.startswith("client_not_polled level=error ")]
    assert "request_id=broken" in asked
    assert "no such request" in asked
    poller.close()


def test_what_cannot_even_be_refused_is_logged_and_raises_nothing(
    responder: TritonResponder,
) -> None:
    def send(message: Any = None, flags: int = 0) -> None:
        raise OSError("no such response")

    responder._sender.send = send
    log: list[str] = []
    with failing_with_errors(responder, log.append):
        raise UnavailableError("no")
    assert log[0].startswith("error_not_sent level=error ")
    assert "no such response" in log[0]


def test_what_fails_is_logged_under_the_names_that_are_known_of_its_request(
    responder: TritonResponder, sender: Sender
) -> None:
    log: list[str] = []
    with failing_with_errors(responder, log.append, {"request_id": "7", "tenant": None}) as known:
        known["trace_id"] = "abc"
        raise OSError("at /usr/lib/x.py")
    assert [message.error().message() for message, _ in sender.sent] == [
        "internal error; the server's log has the details [charonia:internal]"
    ]
    (line,) = log
    parsed = parse_event(line)
    assert parsed is not None
    name, fields = parsed
    traceback = fields.pop("traceback")
    assert (name, fields) == (
        "request_failed",
        {"level": "error", "request_id": "7", "trace_id": "abc"},
    )
    assert traceback.startswith("Traceback")
    assert "OSError: at /usr/lib/x.py" in traceback


def test_a_poller_that_is_closed_in_the_moment_it_turns_idle_ends() -> None:
    cancelled: list[Named] = []
    poller = CancellationPoller(cancelled.append, log=print)
    clear = poller._has_work.clear
    in_clear, may_go_on = threading.Event(), threading.Event()

    def late() -> None:
        in_clear.set()
        may_go_on.wait(WAIT_S)
        clear()

    poller._has_work.clear = late  # type: ignore[method-assign]
    poller._has_work.set()
    assert in_clear.wait(WAIT_S)
    closing = threading.Thread(target=poller.close)
    closing.start()
    time.sleep(0.05)
    may_go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_client_that_has_gone_is_answered_later_and_even_when_the_server_ends(
    responder: TritonResponder, sender: Sender
) -> None:
    cancelled: list[Named] = []
    poller = CancellationPoller(cancelled.append, log=print)
    poller.LATE_END_S = 3600.0
    poller.end_later(partial(responder.fail, RequestCancelledError("the request was cancelled")))
    assert not sender.sent
    poller.LATE_END_S = CancellationPoller.LATE_END_S
    poller.close()
    assert [flags for _, flags in sender.sent] == [1]


def test_a_late_end_does_not_wait_until_all_clients_have_been_asked() -> None:
    happened: list[str] = []

    class Staying:
        is_polled = True
        is_acknowledged = False

        def is_cancelled(self) -> bool:
            if not happened:
                poller.end_later(partial(happened.append, "ended"))
            happened.append("asked")
            return False

    poller = CancellationPoller[Named](lambda request: None, log=print)
    poller.LATE_END_S = 0.0
    staying: Any = Staying()
    for index in range(3):
        poller.add(Named(str(index)), staying)
    eventually(lambda: len(happened) > 3)
    poller.close()
    assert happened[:3] == ["asked", "ended", "asked"]
