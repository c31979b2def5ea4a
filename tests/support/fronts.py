"""A double of Triton's `pb_utils` around a front, whose scheduler is the test's own."""

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from charonia.serving.convention import Convention, PlainConvention
from charonia.serving.front_host import FrontHost
from charonia.serving.ledger import Ledger
from support.waiting import WAIT_S


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
        self.ended = threading.Event()
        self.has_gone = False

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        assert not self.ended.is_set()
        if response is not None:
            self.sent.put(response)
        if flags:
            self.ended.set()

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
        refusal: why it does not. verdict: what Triton says to a question without inputs.
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = Response

    class TritonModelException(Exception):
        pass

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.verdict = "unexpected inference output"
        self.num_calls = 0

    def InferenceRequest(self, **_: Any) -> "PbUtils":
        return self

    def exec(self, *, decoupled: bool = False) -> Iterator[Response]:
        if not decoupled:
            raise self.TritonModelException(self.verdict)
        self.num_calls += 1
        if self.refusal is not None:
            raise self.TritonModelException(self.refusal)
        return iter([Response()])

    @staticmethod
    def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
        return next((t for t in request.inputs() if t.name() == name), None)


def new_front(
    pb_utils: Any,
    repository: Path,
    ledger: Ledger,
    *,
    is_decoupled: bool,
    convention: Convention | None = None,
) -> FrontHost:
    return FrontHost(
        pb_utils,
        "scheduler",
        repository,
        ledger,
        convention or PlainConvention(is_decoupled=is_decoupled),
        is_decoupled=is_decoupled,
        log=lambda line: None,
    )


def text_request() -> Request:
    return Request(text_input=np.array([b"x"], dtype=object))


def answer_to(request: Request) -> Any:
    """The text or the error that it got, and that it got nothing else."""
    response = request.sender.sent.get(timeout=WAIT_S)
    assert request.sender.ended.wait(WAIT_S)
    assert request.sender.sent.empty()
    if (error := response.error()) is not None:
        return error.message(), error.code()
    return response.output_tensors()[0].as_numpy().item().decode()
