"""What tests of the Triton glue share: a double of `pb_utils`, and a responder that keeps all."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from charonia.errors import CharoniaError
from charonia.serving.requests import session, sessions
from charonia.serving.requests.raw_request import Outputs
from support.pb_utils import PbUtils
from support.sessions import Harness
from support.waiting import Clock


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which sessions wait."""
    clock = Clock()
    for module in (session, sessions):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def harness() -> Iterator[Harness]:
    """Sessions with two senders."""
    yield from closed_soon(Harness())


@pytest.fixture
def by_fours() -> Iterator[Harness]:
    """Sessions whose responses have four tokens; one thread sends them."""
    yield from closed_soon(Harness(num_threads=1, stream_interval=4))


def closed_soon(made: Harness) -> Iterator[Harness]:
    """Sessions that are closed soon, as some tests leave requests that wait for ever."""
    yield made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "CLOSE_WAIT_S", 0.05)
        made.sessions.close()
