"""Each request gets exactly one answer, however the threads of the hosts interleave."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from charonia.engine.outputs import Chunk
from charonia.errors import (
    CharoniaError,
    InvalidRequestError,
    NotSupportedError,
    QueueFullError,
    RequestCancelledError,
)
from charonia.serving.convention import PlainConvention
from charonia.serving.front_host import LOST, FrontHost
from charonia.serving.ledger import Ledger
from charonia.serving.relay import RelayedOutlet
from charonia.serving.schema import GenerateCall, OutputOptions
from charonia.serving.sessions import Sessions
from charonia.serving.tensors import Outputs, RawRequest, refuse_all
from support.calls import parse
from support.sockets import WAIT_S, SchedulerEnd, refuse_threads

MAX_WAITING = 3


class Tensor:
    """As `pb_utils.Tensor`."""

    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, np.array(array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    """As `pb_utils.TritonError`; codes are their names."""

    INTERNAL, INVALID_ARG, UNSUPPORTED, UNAVAILABLE, CANCELLED = (
        "INTERNAL",
        "INVALID_ARG",
        "UNSUPPORTED",
        "UNAVAILABLE",
        "CANCELLED",
    )

    def __init__(self, message: str, code: str) -> None:
        self.text, self.name = message, code

    def message(self) -> str:
        return self.text

    def code(self) -> str:
        return self.name


class Response:
    """As `pb_utils.InferenceResponse`."""

    def __init__(self, tensors: Any = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Sender:
    """As a response sender; keeps what was sent."""

    def __init__(self) -> None:
        self.sent: SimpleQueue[Response] = SimpleQueue()
        self.has_gone = False

    def send(self, response: Response, flags: int = 0) -> None:
        self.sent.put(response)

    def is_cancelled(self) -> bool:
        return self.has_gone


class Request:
    """As a `pb_utils.InferenceRequest` that came in."""

    def __init__(self, **arrays: Any) -> None:
        self._tensors = [Tensor(name, array) for name, array in arrays.items()]
        self.sender = Sender()

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def parameters(self) -> str:
        return ""

    def request_id(self) -> str:
        return ""

    def timeout(self) -> int:
        return 0

    def requested_output_names(self) -> list[str]:
        return ["text_output"]

    def get_response_sender(self) -> Sender:
        return self.sender


class PbUtils:
    """As `pb_utils`, with a scheduler that BLS reaches.

    Attributes:
        refusal: why it does not.
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = Response

    class TritonModelException(Exception):
        pass

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.num_calls = 0

    def InferenceRequest(self, **_: Any) -> "PbUtils":
        return self

    def exec(self, *, decoupled: bool) -> Iterator[Response]:
        self.num_calls += 1
        if self.refusal is not None:
            raise self.TritonModelException(self.refusal)
        return iter([Response()])

    @staticmethod
    def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
        return next((t for t in request.inputs() if t.name() == name), None)


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerEnd]:
    scheduler = SchedulerEnd(tmp_path)
    yield scheduler
    scheduler.relay.close()


@pytest.fixture
def host(pb_utils: PbUtils, tmp_path: Path) -> Iterator[FrontHost]:
    ledger = Ledger(MAX_WAITING, 2**27)
    host = new_front(pb_utils, tmp_path, ledger, is_decoupled=False)
    yield host
    host.finalize()


def new_front(pb_utils: Any, repository: Path, ledger: Ledger, *, is_decoupled: bool) -> FrontHost:
    return FrontHost(
        pb_utils,
        "scheduler",
        repository,
        ledger,
        PlainConvention(is_decoupled=is_decoupled),
        is_decoupled=is_decoupled,
        log=lambda line: None,
    )


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def text_request() -> Request:
    return Request(text_input=np.array([b"x"], dtype=object))


def answer_to(request: Request) -> Any:
    """The text or the error that it got, and that it got nothing else."""
    response = request.sender.sent.get(timeout=WAIT_S)
    time.sleep(0.05)
    assert request.sender.sent.empty()
    if (error := response.error()) is not None:
        return error.message(), error.code()
    return response.output_tensors()[0].as_numpy().item().decode()


def test_requests_are_answered_in_any_order_through_one_connection(
    pb_utils: PbUtils, scheduler: SchedulerEnd, host: FrontHost
) -> None:
    requests = [text_request() for _ in range(3)]
    host.execute(requests)
    outlets = [scheduler.next()[2] for _ in requests]
    for index in (2, 0, 1):
        outlets[index].send({"text_output": [f"text {index}"]}, is_final=True)
        assert answer_to(requests[index]) == f"text {index}"
    assert pb_utils.num_calls == 1


def test_a_request_that_is_far_too_large_does_not_reach_the_scheduler(
    pb_utils: PbUtils, scheduler: SchedulerEnd, host: FrontHost
) -> None:
    request = Request(text_input=np.array([b"x" * (2**26 + 1)], dtype=object))
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
    scheduler: SchedulerEnd, host: FrontHost, error: CharoniaError, code: str
) -> None:
    scheduler.take = lambda key, raw, outlet: outlet.fail(error)
    request = text_request()
    host.execute([request])
    assert answer_to(request) == (error.answer, code)


def test_without_a_scheduler_a_request_is_refused_and_a_later_one_connects(
    pb_utils: PbUtils, tmp_path: Path, host: FrontHost
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
    scheduler.take = lambda key, raw, outlet: outlet.send({"text_output": ["y"]}, is_final=True)
    taken = text_request()
    host.execute([taken])
    assert answer_to(taken) == "y"
    scheduler.relay.close()


def test_a_connection_that_nobody_could_read_is_not_kept(
    scheduler: SchedulerEnd, host: FrontHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.take = lambda key, raw, outlet: outlet.send({"text_output": ["y"]}, is_final=True)
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
    scheduler: SchedulerEnd, tmp_path: Path, host: FrontHost
) -> None:
    lost = [text_request(), text_request()]
    host.execute(lost)
    for _ in lost:
        scheduler.next()
    scheduler.relay.close()
    assert [answer_to(request) for request in lost] == [
        (f"{LOST} [charonia:unavailable]", "UNAVAILABLE")
    ] * 2
    restarted = SchedulerEnd(tmp_path)
    request = text_request()
    host.execute([request])
    restarted.next()[2].send({"text_output": ["y"]}, is_final=True)
    assert answer_to(request) == "y"
    restarted.relay.close()


def test_what_is_over_the_bounds_is_refused_and_what_was_answered_makes_room(
    scheduler: SchedulerEnd, host: FrontHost
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
    ledger = Ledger(MAX_WAITING, 2**27)
    host = new_front(pb_utils, tmp_path, ledger, is_decoupled=False)
    counts: SimpleQueue[int] = SimpleQueue()
    requests = [text_request() for _ in range(3)]
    for request in requests:
        request.sender.send = lambda response, flags=0: counts.put(ledger.held[0])
    host.execute(requests)
    outlets = [scheduler.next()[2] for _ in requests]
    outlets[0].send({"text_output": ["y"]}, is_final=True)
    assert counts.get(timeout=WAIT_S) == 3
    eventually(lambda: ledger.held[0] == 2)
    scheduler.relay.close()
    assert [counts.get(timeout=WAIT_S) for _ in requests[1:]] == [2, 1]
    eventually(lambda: ledger.held == (0, 0))
    host.finalize()


def test_an_answer_that_cannot_be_sent_keeps_none_from_being_sent(
    scheduler: SchedulerEnd, host: FrontHost
) -> None:
    requests = [text_request(), text_request()]

    def fail(response: Response, flags: int = 0) -> None:
        raise OSError("it has gone")

    requests[0].sender.send = fail  # type: ignore[method-assign]
    host.execute(requests)
    for _ in requests:
        scheduler.next()
    scheduler.relay.close()
    assert answer_to(requests[1]) == (f"{LOST} [charonia:unavailable]", "UNAVAILABLE")


def test_an_answer_that_cannot_be_read_ends_the_wait_of_all(
    scheduler: SchedulerEnd, host: FrontHost
) -> None:
    requests = [text_request(), text_request()]
    host.execute(requests)
    _, _, outlet = scheduler.next()
    assert isinstance(outlet, RelayedOutlet)
    outlet._connection.post(b"no answer")
    assert [answer_to(request) for request in requests] == [
        (f"{LOST} [charonia:unavailable]", "UNAVAILABLE")
    ] * 2


def test_a_request_whose_client_has_gone_is_cancelled_and_still_answered_once(
    scheduler: SchedulerEnd, host: FrontHost
) -> None:
    request, other = text_request(), text_request()
    host.execute([request, other])
    key, _, outlet = scheduler.next()
    request.sender.has_gone = True
    assert scheduler.cancelled.get(timeout=WAIT_S) == key
    outlet.fail(RequestCancelledError("the request was cancelled"))
    assert answer_to(request) == ("the request was cancelled [charonia:cancelled]", "CANCELLED")
    assert scheduler.cancelled.empty()
    assert other.sender.sent.empty()


def test_the_end_of_generate_answers_what_waits_and_hangs_up(
    scheduler: SchedulerEnd, host: FrontHost
) -> None:
    request = text_request()
    host.execute([request])
    _, _, outlet = scheduler.next()
    host.finalize()
    assert answer_to(request) == (
        "the server is shutting down [charonia:shutting_down]",
        "UNAVAILABLE",
    )
    deadline = time.monotonic() + WAIT_S
    while not outlet.is_cancelled():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    outlet.send({"text_output": ["late"]}, is_final=True)


def test_a_decoupled_front_passes_streams_on_and_says_so(
    pb_utils: PbUtils, scheduler: SchedulerEnd, tmp_path: Path
) -> None:
    ledger = Ledger(MAX_WAITING, 2**27)
    host = new_front(pb_utils, tmp_path, ledger, is_decoupled=True)
    request = Request(text_input=np.array([b"x"], dtype=object), stream=np.array([True]))
    host.execute([request])
    key, _, outlet = scheduler.next()
    for number in (1, 2):
        outlet.send({"text_output": [f"text {number}"]}, is_final=False)
        assert scheduler.taken.get(timeout=WAIT_S) == (key, number)
        response = request.sender.sent.get(timeout=WAIT_S)
        assert response.output_tensors()[0].as_numpy().item().decode() == f"text {number}"
    outlet.fail(QueueFullError("full"))
    assert answer_to(request) == ("full [charonia:queue_full]", "UNAVAILABLE")
    eventually(lambda: ledger.held == (0, 0))
    host.finalize()


def test_a_front_that_is_not_decoupled_takes_no_streams(
    pb_utils: PbUtils, scheduler: SchedulerEnd, host: FrontHost
) -> None:
    request = Request(text_input=np.array([b"x"], dtype=object), stream=np.array([False]))
    host.execute([request])
    text, code = answer_to(request)
    assert text == "this model cannot stream: it is not decoupled [charonia:invalid_request]"
    assert code == "INVALID_ARG"
    assert pb_utils.num_calls == 0


# ---------------------------------------------------------------------- sessions


class SlowOutlet:
    """An outlet whose sends wait until `go` is set."""

    is_polled = True
    is_acknowledged = False

    def __init__(self) -> None:
        self.go = threading.Event()
        self.is_sending = threading.Event()
        self.num_sent = 0
        self.failures: list[CharoniaError] = []

    def send(self, outputs: Outputs, *, is_final: bool) -> None:
        self.is_sending.set()
        assert self.go.wait(WAIT_S)
        self.num_sent += 1

    def fail(self, error: CharoniaError) -> None:
        self.failures.append(error)

    def is_cancelled(self) -> bool:
        return False


def test_a_stream_whose_send_is_under_way_at_the_end_still_gets_its_last_response() -> None:
    options = OutputOptions(is_streaming=True, has_echo=False, names=frozenset())
    sessions = Sessions(None, 2, Ledger(9, 9), cancel=lambda key: None, log=lambda line: None)  # type: ignore[arg-type]
    outlet = SlowOutlet()
    sink = sessions.open("key", options, str, outlet)
    sink(Chunk("key", text="a", token_ids=(1,)))
    assert outlet.is_sending.wait(WAIT_S)
    closing = threading.Thread(target=sessions.close)
    closing.start()
    time.sleep(0.1)  # both threads' marks are in the queue now
    outlet.go.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert outlet.num_sent == 1
    assert [str(error) for error in outlet.failures] == ["the server is shutting down"]


# ---------------------------------------------------------------------- what plain clients can do


def internal(**arrays: Any) -> RawRequest:
    return RawRequest({name: np.array(a) for name, a in arrays.items()}, {})


def test_a_key_is_short_and_an_empty_one_is_none() -> None:
    text = np.array([b"x"], dtype=object)
    long = np.array([b"k" * 129], dtype=object)
    with pytest.raises(InvalidRequestError, match="request_key must have at most 128 bytes"):
        parse(internal(text_input=text, request_key=long))
    call = parse(internal(text_input=text, request_key=np.array([b""], dtype=object)))
    assert isinstance(call, GenerateCall)
    assert call.key


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"text_input": [b"x" * (2**24 + 1)]}, "text_input must have at most 16777216 bytes"),
        (
            {"text_input": [b"x"], "sampling_parameters": [b" " * (2**20 + 1)]},
            "sampling_parameters must have at most 1048576 bytes",
        ),
    ],
)
def test_what_would_occupy_the_process_for_long_is_refused(
    arrays: dict[str, Any], message: str
) -> None:
    raw = internal(**{name: np.array(a, dtype=object) for name, a in arrays.items()})
    with pytest.raises(InvalidRequestError, match=message):
        parse(raw)


def test_too_many_token_ids_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 4194304 are accepted"):
        parse(internal(input_ids=np.zeros(2**22 + 1, dtype=np.int32)))


def test_a_model_that_takes_no_requests_refuses_each_without_a_look_at_it(pb_utils: Any) -> None:
    responses = refuse_all(pb_utils, [object(), object()])
    assert [one.error().code() for one in responses] == [pb_utils.TritonError.UNSUPPORTED] * 2
    assert "send them to the scheduler" in responses[0].error().message()
