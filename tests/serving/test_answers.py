"""Each request gets exactly one answer, however the threads of the hosts interleave."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest

from charonia.engine.outputs import Chunk
from charonia.errors import CharoniaError, ConfigError, InvalidRequestError
from charonia.serving.engine_host import NOT_THE_SCHEDULER, EngineHost
from charonia.serving.generate_host import GenerateHost
from charonia.serving.relay import RelayBatch, RelayedAnswer
from charonia.serving.schema import GenerateCall, OutputOptions, parse
from charonia.serving.secret import FILE_NAME, read_or_create
from charonia.serving.sessions import Sessions
from charonia.serving.tensors import RELAY_KEY, RELAYED, REQUEST_KEY, Outputs, RawRequest

WAIT_S = 10.0
OWNER = "scheduler-1"


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

    def send(self, response: Response, flags: int = 0) -> None:
        self.sent.put(response)

    def is_cancelled(self) -> bool:
        return False


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


class FakeScheduler:
    """The scheduler as BLS shows it: requests by their key, and one mailbox.

    Attributes:
        before_accepting: called with a request's key before the word that it was accepted.
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = Response

    class TritonModelException(Exception):
        pass

    def __init__(self) -> None:
        self.mailbox: SimpleQueue[list[RelayedAnswer]] = SimpleQueue()
        self.before_accepting: Callable[[str], Any] = lambda key: None
        self.owner = OWNER

    def InferenceRequest(self, *, inputs: list[Tensor], **_: Any) -> "FakeCall":
        return FakeCall(self, {tensor.name(): tensor.as_numpy() for tensor in inputs})

    def answer(self, *answers: RelayedAnswer) -> None:
        self.mailbox.put(list(answers))

    def batch(self, answers: list[RelayedAnswer]) -> Response:
        data = msgspec.msgpack.encode(RelayBatch(self.owner, answers))
        return Response([Tensor(RELAYED, np.frombuffer(data, dtype=np.uint8))])

    @staticmethod
    def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
        return next((t for t in request.inputs() if t.name() == name), None)


class FakeCall:
    """One BLS call."""

    def __init__(self, scheduler: FakeScheduler, arrays: dict[str, Any]) -> None:
        self._scheduler, self._arrays = scheduler, arrays

    def exec(self, *, decoupled: bool) -> Any:
        if REQUEST_KEY in self._arrays:
            self._scheduler.before_accepting(self._arrays[REQUEST_KEY].item().decode())
            return iter([self._scheduler.batch([])])
        try:
            answers = self._scheduler.mailbox.get(timeout=0.05)
        except Exception:
            answers = []
        return iter([self._scheduler.batch(answers)])


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def host(scheduler: FakeScheduler) -> Any:
    host = GenerateHost(scheduler, "scheduler", log=lambda line: None)
    yield host
    host.finalize()


def text_request() -> Request:
    return Request(text_input=np.array([b"x"], dtype=object))


def text_of(response: Response) -> Any:
    return response.output_tensors()[0].as_numpy().item().decode()


def test_an_answer_that_comes_before_the_word_that_it_was_accepted_is_handed_on(
    scheduler: FakeScheduler, host: GenerateHost
) -> None:
    def answer_at_once(key: str) -> None:
        scheduler.answer(RelayedAnswer(key, {"text_output": ["early"]}))
        while not scheduler.mailbox.empty():
            time.sleep(0.001)
        time.sleep(0.1)  # the collector has it, and would drop what nobody waits for

    scheduler.before_accepting = answer_at_once
    request = text_request()
    host.execute([request])
    assert text_of(request.sender.sent.get(timeout=WAIT_S)) == "early"
    assert request.sender.sent.empty()


def test_a_request_that_is_refused_is_answered_once_and_no_longer_waited_for(
    scheduler: FakeScheduler, host: GenerateHost
) -> None:
    def refuse(key: str) -> None:
        raise scheduler.TritonModelException("the queue is full")

    scheduler.before_accepting = refuse
    request = text_request()
    host.execute([request])
    error = request.sender.sent.get(timeout=WAIT_S).error()
    assert error is not None
    assert (error.message(), error.code()) == ("the queue is full", "UNAVAILABLE")
    scheduler.owner = "scheduler-2"
    time.sleep(0.2)
    assert request.sender.sent.empty()


def test_requests_of_a_scheduler_that_was_restarted_are_lost_and_say_so(
    scheduler: FakeScheduler, host: GenerateHost
) -> None:
    request = text_request()
    host.execute([request])
    scheduler.owner = "scheduler-2"
    error = request.sender.sent.get(timeout=WAIT_S).error()
    assert error is not None
    assert "the scheduler was restarted" in error.message()


# ---------------------------------------------------------------------- sessions


class SlowOutlet:
    """An outlet whose sends wait until `go` is set."""

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
    sessions = Sessions(None, 2, cancel=lambda key: None, log=lambda line: None)  # type: ignore[arg-type]
    outlet = SlowOutlet()
    sink = sessions.open("key", options, "", outlet)
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


def test_a_relayed_request_cannot_stream() -> None:
    text = np.array([b"x"], dtype=object)
    raw = internal(text_input=text, request_key=text, relay_key=text, stream=[True])
    with pytest.raises(InvalidRequestError, match="a request with a relay_key cannot stream"):
        parse(raw)


@pytest.mark.parametrize("name", [REQUEST_KEY, RELAY_KEY])
def test_a_key_is_short_and_an_empty_one_is_none(name: str) -> None:
    text = np.array([b"x"], dtype=object)
    long = np.array([b"k" * 65], dtype=object)
    with pytest.raises(InvalidRequestError, match=f"{name} must have at most 64 bytes"):
        parse(internal(text_input=text, **{name: long}))
    call = parse(internal(text_input=text, **{name: np.array([b""], dtype=object)}))
    assert isinstance(call, GenerateCall)
    assert call.key
    assert call.relay_key is None


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
    with pytest.raises(InvalidRequestError, match="input_ids must have at most 4194304 ids"):
        parse(internal(input_ids=np.zeros(2**22 + 1, dtype=np.int32)))


NESTED = b"\x83\xa4type\xa5Hello\xa6secret\xa1x\xa1z" + b"\x91" * 5000 + b"\xc0"


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", NESTED, msgspec.msgpack.encode({"type": "Hello", "secret": ""})]
)
def test_the_engine_tells_a_plain_client_nothing_but_whom_it_serves(
    tmp_path: Path, scheduler: FakeScheduler, data: bytes
) -> None:
    (tmp_path / "model.json").write_text('{"model": "/nowhere"}', encoding="utf-8")
    host = EngineHost(scheduler, lambda args: None, tmp_path, "MODEL", log=lambda line: None)  # type: ignore[arg-type, return-value]
    (answer,) = host.execute([Request(plan=np.frombuffer(data, dtype=np.uint8))])
    assert answer.error().message() == NOT_THE_SCHEDULER


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    assert read_or_create(path) == read_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_secret_or_none_that_can_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.touch()
    with pytest.raises(ConfigError, match=r"plan\.secret must hold 64 characters"):
        read_or_create(path)
    with pytest.raises(ConfigError, match=r"plan\.secret can be neither read nor made"):
        read_or_create(tmp_path / "nowhere" / FILE_NAME)
