"""What sessions send to their end, and what is refused before there is one."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from charonia.core.output.outputs import Chunk
from charonia.errors import CharoniaError, InvalidRequestError
from charonia.serving.conventions.schema import GenerateCall, OutputOptions
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import Outputs, RawRequest
from charonia.serving.requests.sessions import Sessions
from charonia.serving.requests.tensors import refuse_all
from support.calls import parse
from support.pb_utils import PbUtils
from support.waiting import WAIT_S

# ---------------------------------------------------------------------- sessions


class SlowResponder:
    """A responder whose sends wait until `go` is set."""

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
    sessions = Sessions(
        None,  # type: ignore[arg-type]
        2,
        QueueLimit(9, 9),
        log=lambda line: None,
    )
    responder = SlowResponder()
    session = sessions.open("key", options, str, responder)
    sessions.take(session, Chunk("key", text="a", token_ids=(1,)))
    assert responder.is_sending.wait(WAIT_S)
    closing = threading.Thread(target=sessions.close)
    closing.start()
    time.sleep(0.1)  # both threads' marks are in the queue now
    responder.go.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert responder.num_sent == 1
    assert [str(error) for error in responder.failures] == ["the server is shutting down"]


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


def test_a_model_that_takes_no_requests_refuses_each_without_a_look_at_it() -> None:
    pb_utils: Any = PbUtils()
    responses = refuse_all(pb_utils, [object(), object()])
    assert [one.error().code() for one in responses] == [pb_utils.TritonError.UNSUPPORTED] * 2
    assert "send them to the scheduler" in responses[0].error().message()
