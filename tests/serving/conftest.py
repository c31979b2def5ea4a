"""What tests of the Triton glue share: a double of `pb_utils`, and a responder that keeps all."""

from typing import Any

import numpy as np
import pytest

from charonia.errors import CharoniaError
from charonia.serving.requests.raw_request import Outputs
from support.pb_utils import PbUtils


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


class RecordingResponder:
    """A responder that keeps what it got. Raises what is in `errors`, one per send."""

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
def new_responder() -> type[RecordingResponder]:
    return RecordingResponder


def strings(*values: str | bytes) -> Any:
    """A STRING tensor as Triton gives it."""
    return np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)


@pytest.fixture(name="strings")
def strings_fixture() -> Any:
    return strings
