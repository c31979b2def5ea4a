"""A double of Triton's `pb_utils`, shaped like the real one, for what reads and builds messages.

What senders, BLS and models do is tested on the real server, in tests/e2e.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np


class Tensor:
    """Fake `pb_utils.Tensor`: a name and a numpy array; strings are bytes objects."""

    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = np.asarray(array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    """Fake `pb_utils.TritonError`; codes are their names."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    CANCELLED = "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code


class InferenceResponse:
    """Fake `pb_utils.InferenceResponse`."""

    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Sender:
    """Fake response sender; keeps what was sent, and fails if it is used after its end."""

    def __init__(self) -> None:
        self.sent: SimpleQueue[InferenceResponse] = SimpleQueue()
        self.ended = threading.Event()
        self.has_gone = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.ended.is_set(), "used after its last response"
        if response is not None:
            self.sent.put(response)
        if flags:
            self.ended.set()

    def is_cancelled(self) -> bool:
        assert not self.ended.is_set(), "used after its last response"
        return self.has_gone


@dataclass
class Trace:
    """Fake `pb_utils.InferenceTrace`. `context`: as JSON; None without OpenTelemetry."""

    context: str | None = None

    def get_context(self) -> str | None:
        return self.context


@dataclass
class Request:
    """Fake `pb_utils.InferenceRequest`, on the receiving side."""

    tensors: list[Tensor] = field(default_factory=list)
    parameters_json: str = ""
    id: str = ""
    timeout_us: int = 0
    output_names: tuple[str, ...] = ("text_output",)
    sender: Sender = field(default_factory=Sender)
    trace_context: str | None = None

    def inputs(self) -> list[Tensor]:
        return self.tensors

    def parameters(self) -> str:
        return self.parameters_json

    def request_id(self) -> str:
        return self.id

    def timeout(self) -> int:
        return self.timeout_us

    def trace(self) -> Trace:
        return Trace(self.trace_context)

    def requested_output_names(self) -> list[str]:
        return list(self.output_names)

    def get_response_sender(self) -> Sender:
        return self.sender


def request_of(**arrays: Any) -> Request:
    """A request with these inputs."""
    return Request([Tensor(name, array) for name, array in arrays.items()])


class PbUtils:
    """Fake module `pb_utils`, with a scheduler that BLS reaches.

    Attributes:
        refusal: why it does not reach it. verdict: Triton's answer to a question without inputs.
        num_calls: calls of the scheduler.
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = InferenceResponse
    Request = Request

    class TritonModelException(Exception):
        pass

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.verdict = "unexpected inference output"
        self.num_calls = 0

    def InferenceRequest(self, **_: Any) -> "PbUtils":
        return self

    def exec(self, *, decoupled: bool = False) -> Iterator[InferenceResponse]:
        if not decoupled:
            raise self.TritonModelException(self.verdict)
        self.num_calls += 1
        if self.refusal is not None:
            raise self.TritonModelException(self.refusal)
        return iter([InferenceResponse()])

    @staticmethod
    def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
        return next((tensor for tensor in request.inputs() if tensor.name() == name), None)
