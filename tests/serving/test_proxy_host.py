"""Each request of a proxy is answered to its end once, however connections interleave."""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from charonia.errors import (
    CharoniaError,
    InvalidRequestError,
    NotSupportedError,
    QueueFullError,
    RequestCancelledError,
    ShuttingDownError,
    UnavailableError,
)
from charonia.events import parse_event
from charonia.serving.hosts.proxy import LOST, ProxyHost
from charonia.serving.messages.relay_client import SchedulerClient
from charonia.serving.messages.relay_server import RelayedResponder
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import Outputs, RawRequest
from support.pb_utils import InferenceResponse, PbUtils, Request, request_of
from support.proxies import answer_to, new_proxy, text_request
from support.sockets import SchedulerEnd, refuse_threads
from support.waiting import WAIT_S, eventually

MAX_WAITING = 3


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerEnd]:
    scheduler = SchedulerEnd(tmp_path)
    yield scheduler
    scheduler.relay.close()


@pytest.fixture
def host(pb_utils: PbUtils, tmp_path: Path) -> Iterator[ProxyHost]:
    queue_limit = QueueLimit(MAX_WAITING, 2**27)
    host = new_proxy(pb_utils, tmp_path, queue_limit, is_decoupled=False)
    yield host
    host.finalize()


def test_requests_are_answered_in_any_order_through_one_connection(
    pb_utils: PbUtils, scheduler: SchedulerEnd, host: ProxyHost
) -> None:
    requests = [text_request() for _ in range(3)]
    host.execute(requests)
    responders = [scheduler.next()[2] for _ in requests]
    for index in (2, 0, 1):
        responders[index].send({"text_output": [f"text {index}"]}, is_final=True)
        assert answer_to(requests[index]) == f"text {index}"
    assert pb_utils.num_calls == 1


def test_a_request_that_is_far_too_large_does_not_reach_the_scheduler(
    pb_utils: PbUtils, scheduler: SchedulerEnd, host: ProxyHost
) -> None:
    request = request_of(text_input=np.array([b"x" * (2**26 + 1)], dtype=object))
    host.execute([request])
    text, code = answer_to(request)
    assert text == (
        "of the request's tensors at most 67108864 bytes are accepted, but 67108865 came"
        " [charonia:invalid_request]"
    )
    assert code == "INVALID_ARG"
    assert pb_utils.num_calls == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("top_p must be …"), "INVALID_ARG"),
        (NotSupportedError("beam search"), "UNSUPPORTED"),
        (QueueFullError("the queue is full"), "UNAVAILABLE"),
        (CharoniaError("internal error"), "INTERNAL"),
    ],
)
def test_an_error_of_the_scheduler_keeps_its_words_and_code(
    scheduler: SchedulerEnd, host: ProxyHost, error: CharoniaError, code: str
) -> None:
    scheduler.take = lambda key, raw, responder: responder.fail(error)
    request = text_request()
    host.execute([request])
    assert answer_to(request) == (error.answer, code)


def test_without_a_scheduler_a_request_is_refused_and_a_later_one_connects(
    pb_utils: PbUtils, tmp_path: Path, host: ProxyHost
) -> None:
    pb_utils.refusal = "Request for unknown model: 'scheduler' is not found"
    refused, unheard = text_request(), text_request()
    host.execute([refused])
    assert answer_to(refused) == (f"{pb_utils.refusal} [charonia:unavailable]", "UNAVAILABLE")
    pb_utils.refusal = None
    host.execute([unheard])
    assert answer_to(unheard) == (
        "the scheduler cannot be reached: No such file or directory [charonia:unavailable]",
        "UNAVAILABLE",
    )
    scheduler = SchedulerEnd(tmp_path)
    scheduler.take = lambda key, raw, responder: responder.send(
        {"text_output": ["y"]}, is_final=True
    )
    taken = text_request()
    host.execute([taken])
    assert answer_to(taken) == "y"
    scheduler.relay.close()


def test_a_connection_that_nobody_could_read_is_not_kept(
    scheduler: SchedulerEnd, host: ProxyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.take = lambda key, raw, responder: responder.send(
        {"text_output": ["y"]}, is_final=True
    )
    refused, taken = text_request(), text_request()
    with monkeypatch.context() as patch:
        refuse_threads(patch, "charonia-reader")
        host.execute([refused])
    assert answer_to(refused) == (
        "no answer could be taken: can't start new thread [charonia:unavailable]",
        "UNAVAILABLE",
    )
    host.execute([taken])
    assert answer_to(taken) == "y"


def test_requests_of_a_scheduler_that_was_restarted_are_lost_and_say_so(
    scheduler: SchedulerEnd, tmp_path: Path, host: ProxyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(host, "_log", log.append)
    lost = [text_request(), text_request()]
    for request, name in zip(lost, "ab", strict=True):
        request.request_id = lambda name=name: name  # type: ignore[misc]
    host.execute(lost)
    for _ in lost:
        scheduler.next()
    scheduler.relay.close()
    assert [answer_to(request) for request in lost] == [
        (f"{LOST} [charonia:unavailable]", "UNAVAILABLE")
    ] * 2
    ended = [fields for name, fields in filter(None, map(parse_event, log))]
    assert {fields["request_id"] for fields in ended} == {"a", "b"}
    assert {(fields["level"], fields["reason"]) for fields in ended} == {("warning", LOST)}
    restarted = SchedulerEnd(tmp_path)
    request = text_request()
    host.execute([request])
    restarted.next()[2].send({"text_output": ["y"]}, is_final=True)
    assert answer_to(request) == "y"
    restarted.relay.close()


def test_what_is_over_the_bounds_is_refused_and_what_was_answered_makes_room(
    scheduler: SchedulerEnd, host: ProxyHost
) -> None:
    requests = [text_request() for _ in range(MAX_WAITING + 1)]
    host.execute(requests)
    text, code = answer_to(requests[-1])
    assert text.startswith("Exceeds maximum queue size")
    assert f"Maximum queue size of {MAX_WAITING} requests" in text
    assert (text.endswith("[charonia:queue_full]"), code) == (True, "UNAVAILABLE")
    for _ in requests[:-1]:
        scheduler.next()[2].send({"text_output": ["y"]}, is_final=True)
    assert [answer_to(request) for request in requests[:-1]] == ["y"] * MAX_WAITING
    again = text_request()
    host.execute([again])
    scheduler.next()[2].send({"text_output": ["z"]}, is_final=True)
    assert answer_to(again) == "z"


def test_a_request_counts_until_it_is_answered(
    scheduler: SchedulerEnd, pb_utils: PbUtils, tmp_path: Path
) -> None:
    queue_limit = QueueLimit(MAX_WAITING, 2**27)
    host = new_proxy(pb_utils, tmp_path, queue_limit, is_decoupled=False)
    counts: SimpleQueue[int] = SimpleQueue()
    requests = [text_request() for _ in range(3)]
    for request in requests:
        request.sender.send = lambda response, flags=0: counts.put(queue_limit.held[0])
    host.execute(requests)
    responders = [scheduler.next()[2] for _ in requests]
    responders[0].send({"text_output": ["y"]}, is_final=True)
    assert counts.get(timeout=WAIT_S) == 3
    eventually(lambda: queue_limit.held[0] == 2)
    scheduler.relay.close()
    assert [counts.get(timeout=WAIT_S) for _ in requests[1:]] == [2, 1]
    eventually(lambda: queue_limit.held == (0, 0))
    host.finalize()


def test_an_answer_that_cannot_be_sent_keeps_none_from_being_sent(
    scheduler: SchedulerEnd, host: ProxyHost
) -> None:
    requests = [text_request(), text_request()]

    def fail(response: InferenceResponse, flags: int = 0) -> None:
        raise OSError("it has gone")

    requests[0].sender.send = fail  # type: ignore[method-assign]
    host.execute(requests)
    for _ in requests:
        scheduler.next()
    scheduler.relay.close()
    assert answer_to(requests[1]) == (f"{LOST} [charonia:unavailable]", "UNAVAILABLE")


def test_an_answer_that_cannot_be_read_ends_the_wait_of_all(
    scheduler: SchedulerEnd, host: ProxyHost
) -> None:
    requests = [text_request(), text_request()]
    host.execute(requests)
    _, _, responder = scheduler.next()
    assert isinstance(responder, RelayedResponder)
    responder._connection.post(b"no answer")
    assert [answer_to(request) for request in requests] == [
        (f"{LOST} [charonia:unavailable]", "UNAVAILABLE")
    ] * 2


def test_a_request_whose_client_has_gone_is_cancelled_and_still_answered_once(
    scheduler: SchedulerEnd, host: ProxyHost
) -> None:
    request, other = text_request(), text_request()
    host.execute([request, other])
    key, _, responder = scheduler.next()
    request.sender.has_gone = True
    assert scheduler.cancelled.get(timeout=WAIT_S) == key
    responder.fail(RequestCancelledError("the request was cancelled"))
    assert answer_to(request) == ("the request was cancelled [charonia:cancelled]", "CANCELLED")
    assert scheduler.cancelled.empty()
    assert other.sender.sent.empty()


def test_the_end_of_generate_answers_what_waits_and_hangs_up(
    scheduler: SchedulerEnd, host: ProxyHost
) -> None:
    request = text_request()
    host.execute([request])
    _, _, responder = scheduler.next()
    host.finalize()
    assert answer_to(request) == (
        "the server is shutting down [charonia:shutting_down]",
        "UNAVAILABLE",
    )
    eventually(responder.is_cancelled)
    responder.send({"text_output": ["late"]}, is_final=True)


def test_a_proxy_whose_requests_hold_up_the_servers_end_tells_the_scheduler(
    scheduler: SchedulerEnd, host: ProxyHost, pb_utils: PbUtils
) -> None:
    # Triton waits for no request of the scheduler's then, so that one must not ask.
    request = text_request()
    host.execute([request])
    _, _, responder = scheduler.next()
    pb_utils.verdict = "Server not ready"
    assert scheduler.is_stopping.wait(WAIT_S)
    responder.fail(ShuttingDownError())
    assert answer_to(request)[1] == "UNAVAILABLE"


def test_a_decoupled_front_passes_streams_on_and_says_so(
    pb_utils: PbUtils, scheduler: SchedulerEnd, tmp_path: Path
) -> None:
    queue_limit = QueueLimit(MAX_WAITING, 2**27)
    host = new_proxy(pb_utils, tmp_path, queue_limit, is_decoupled=True)
    request = request_of(text_input=np.array([b"x"], dtype=object), stream=np.array([True]))
    host.execute([request])
    key, _, responder = scheduler.next()
    for number in (1, 2):
        responder.send({"text_output": [f"text {number}"]}, is_final=False)
        assert scheduler.acknowledged.get(timeout=WAIT_S) == (key, number)
        response = request.sender.sent.get(timeout=WAIT_S)
        assert response.output_tensors()[0].as_numpy().item().decode() == f"text {number}"
    responder.fail(QueueFullError("full"))
    assert answer_to(request) == ("full [charonia:queue_full]", "UNAVAILABLE")
    eventually(lambda: queue_limit.held == (0, 0))
    host.finalize()


def test_a_proxy_that_is_not_decoupled_takes_no_streams(
    pb_utils: PbUtils, scheduler: SchedulerEnd, host: ProxyHost
) -> None:
    request = request_of(text_input=np.array([b"x"], dtype=object), stream=np.array([False]))
    host.execute([request])
    text, code = answer_to(request)
    assert text == "this model cannot stream: it is not decoupled [charonia:invalid_request]"
    assert code == "INVALID_ARG"
    assert pb_utils.num_calls == 0


# ---------------------------------------------------------------------- requests in parts


class Pair:
    """A convention in which each request is two, and a stopped one just ends."""

    def split(self, raw: RawRequest) -> list[tuple[RawRequest, "Half"]]:
        return [(raw, Half(index)) for index in range(2)]


class Half:
    def __init__(self, index: int) -> None:
        self.index = index

    def answer(self, outputs: Outputs) -> Outputs:
        return {"text_output": [f"{self.index}: {outputs['text_output'][0]}"]}

    def failure(self, error: CharoniaError) -> CharoniaError | None:
        if isinstance(error, RequestCancelledError):
            return None
        return InvalidRequestError(f"{self.index}: {error}")


@pytest.fixture
def queue_limit() -> QueueLimit:
    return QueueLimit(MAX_WAITING, 2**27)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def pair_host(
    pb_utils: PbUtils,
    scheduler: SchedulerEnd,
    tmp_path: Path,
    queue_limit: QueueLimit,
    log: list[str],
) -> Iterator[ProxyHost]:
    host = new_proxy(
        pb_utils, tmp_path, queue_limit, is_decoupled=True, convention=Pair(), log=log.append
    )
    yield host
    host.finalize()


def said(response: InferenceResponse) -> str:
    error = response.error()
    return error.message() if error else response.output_tensors()[0].as_numpy().item().decode()


def sent_to(request: Request, num: int) -> list[str]:
    """The next responses, texts or errors."""
    return [said(request.sender.sent.get(timeout=WAIT_S)) for _ in range(num)]


def test_the_parts_of_a_request_are_answered_to_one_client_which_ends_with_the_last(
    scheduler: SchedulerEnd, pair_host: ProxyHost, queue_limit: QueueLimit
) -> None:
    request = text_request()
    pair_host.execute([request])
    (first_key, _, first), (second_key, _, second) = scheduler.next(), scheduler.next()
    order = ((second_key, second, 1), (first_key, first, 1), (first_key, first, 2))
    for key, responder, number in order:
        responder.send({"text_output": ["a"]}, is_final=False)
        assert scheduler.acknowledged.get(timeout=WAIT_S) == (key, number)
    first.send({"text_output": ["b"]}, is_final=True)
    assert sent_to(request, 4) == ["1: a", "0: a", "0: a", "0: b"]
    assert not request.sender.ended.is_set()
    assert queue_limit.held[0] == 1
    second.send({"text_output": ["c"]}, is_final=True)
    assert sent_to(request, 1) == ["1: c"]
    assert request.sender.ended.wait(WAIT_S)
    eventually(lambda: queue_limit.held == (0, 0))


def test_an_error_of_one_part_leaves_the_others(
    scheduler: SchedulerEnd, pair_host: ProxyHost
) -> None:
    request = text_request()
    pair_host.execute([request])
    first, second = scheduler.next()[2], scheduler.next()[2]
    first.fail(QueueFullError("full"))
    assert sent_to(request, 1) == ["0: full [charonia:invalid_request]"]
    assert not request.sender.ended.is_set()
    second.send({"text_output": ["b"]}, is_final=True)
    assert sent_to(request, 1) == ["1: b"]
    assert request.sender.ended.wait(WAIT_S)


def test_a_client_that_goes_away_cancels_all_its_parts_and_is_told_nothing(
    scheduler: SchedulerEnd, pair_host: ProxyHost, queue_limit: QueueLimit
) -> None:
    request = text_request()
    pair_host.execute([request])
    parts = [scheduler.next(), scheduler.next()]
    request.sender.has_gone = True
    cancelled = {scheduler.cancelled.get(timeout=WAIT_S) for _ in parts}
    assert cancelled == {key for key, _, _ in parts}
    for _, _, responder in parts:
        responder.fail(RequestCancelledError("the request was cancelled"))
    assert request.sender.ended.wait(WAIT_S)
    assert request.sender.sent.empty()
    eventually(lambda: queue_limit.held == (0, 0))


def test_an_answer_that_cannot_be_made_is_an_error_and_no_end(
    scheduler: SchedulerEnd, pair_host: ProxyHost, queue_limit: QueueLimit, log: list[str]
) -> None:
    request = text_request()
    request.id, request.parameters_json = "7", '{"tenant": "t"}'
    pair_host.execute([request])
    parts = [scheduler.next(), scheduler.next()]
    parts[0][2].send({"no_such_output": ["a"]}, is_final=False)
    cancelled = {scheduler.cancelled.get(timeout=WAIT_S) for _ in parts}
    assert cancelled == {key for key, _, _ in parts}
    for _, _, responder in parts:
        responder.fail(RequestCancelledError("the request was cancelled"))
    assert request.sender.ended.wait(WAIT_S)
    (said,) = sent_to(request, 1)
    assert "internal error" in said
    ((name, fields),) = filter(None, map(parse_event, log))
    assert (name, fields["request_id"], fields["tenant"]) == ("response_not_passed_on", "7", "t")
    eventually(lambda: queue_limit.held == (0, 0))


def test_a_request_of_which_one_part_cannot_be_handed_in_is_refused_and_the_others_cancelled(
    scheduler: SchedulerEnd,
    pair_host: ProxyHost,
    queue_limit: QueueLimit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_sent = 0

    send = SchedulerClient.send

    def send_one(client: SchedulerClient, raw: RawRequest) -> str:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 2:
            raise UnavailableError("the scheduler takes nothing")
        return send(client, raw)

    monkeypatch.setattr(SchedulerClient, "send", send_one)
    request = text_request()
    pair_host.execute([request])
    assert answer_to(request) == (
        "the scheduler takes nothing [charonia:unavailable]",
        "UNAVAILABLE",
    )
    assert request.sender.ended.wait(WAIT_S)
    key, _, responder = scheduler.next()
    assert scheduler.cancelled.get(timeout=WAIT_S) == key
    assert queue_limit.held == (0, 0)
    responder.send({"text_output": ["late"]}, is_final=True)
    again = text_request()
    pair_host.execute([again])
    for _ in range(2):
        scheduler.next()[2].send({"text_output": ["b"]}, is_final=True)
    assert sorted(sent_to(again, 2)) == ["0: b", "1: b"]


def test_the_end_of_a_proxy_answers_a_request_of_many_parts_once(
    scheduler: SchedulerEnd, pair_host: ProxyHost, queue_limit: QueueLimit
) -> None:
    request = text_request()
    pair_host.execute([request])
    scheduler.next()
    pair_host.finalize()
    assert sent_to(request, 1) == ["the server is shutting down [charonia:shutting_down]"]
    assert request.sender.ended.wait(WAIT_S)
    assert queue_limit.held == (0, 0)
