"""A double of Triton's `pb_utils`, shaped like the real one, for what reads and builds messages.

What senders, BLS and models do is tested on the real server, in tests/e2e.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from charonia.errors import CharoniaError
from charonia.serving.tensors import Outputs


class Tensor:
    """As `pb_utils.Tensor`: a name and a numpy array; strings are bytes objects."""

    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    """As `pb_utils.TritonError`."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, CANCELLED = range(7)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class InferenceResponse:
    """As `pb_utils.InferenceResponse`."""

    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


@dataclass
class Request:
    """As `pb_utils.InferenceRequest`, on the receiving side."""

    tensors: list[Tensor] = field(default_factory=list)
    parameters_json: str = ""
    id: str = ""
    timeout_us: int = 0
    output_names: tuple[str, ...] = ("text_output",)

    def inputs(self) -> list[Tensor]:
        return self.tensors

    def parameters(self) -> str:
        return self.parameters_json

    def request_id(self) -> str:
        return self.id

    def timeout(self) -> int:
        return self.timeout_us

    def requested_output_names(self) -> list[str]:
        return list(self.output_names)


class PbUtils:
    """What of `pb_utils` builds and reads messages."""

    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = InferenceResponse
    Request = Request

    @staticmethod
    def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
        return next((tensor for tensor in request.tensors if tensor.name() == name), None)


@pytest.fixture
def pb_utils() -> type[PbUtils]:
    return PbUtils


class RecordingOutlet:
    """An outlet that keeps what it got. Raises what is in `errors`, one per send."""

    is_polled = True
    is_acknowledged = False

    def __init__(self) -> None:
        self.sent: list[tuple[Outputs, bool]] = []
        self.failures: list[CharoniaError] = []
        self.errors: list[Exception] = []
        self.has_gone = False

    def send(self, outputs: Outputs, *, is_final: bool) -> None:
        if self.errors:
            raise self.errors.pop()
        self.sent.append((outputs, is_final))

    def fail(self, error: CharoniaError) -> None:
        self.failures.append(error)

    def is_cancelled(self) -> bool:
        return self.has_gone


@pytest.fixture
def new_outlet() -> type[RecordingOutlet]:
    return RecordingOutlet


def strings(*values: str | bytes) -> Any:
    """A STRING tensor as Triton gives it."""
    return np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)


@pytest.fixture(name="strings")
def strings_fixture() -> Any:
    return strings
