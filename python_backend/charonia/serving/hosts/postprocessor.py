"""The `postprocessor` model's side: hands chunks of `llm` on, and tells the scheduler so.

Owns that word, and the one that a client has gone: Triton tells a running step of an ensemble
nothing of its client, but the next step sees it. Must not know tokens.

Triton takes any number of responses from a step and keeps them for the next one. So the scheduler
has but a few of each request on this way, see `sessions`, and sends more when it hears that one has
been handed on.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from charonia.errors import CharoniaError, InvalidRequestError
from charonia.serving.conventions.interface import CHUNK_PREFIX, REQUEST_KEY
from charonia.serving.hosts.scheduler_address import SchedulerAddress
from charonia.serving.messages.relay import Cancellation, Delivery
from charonia.serving.messages.relay_client import DeliveryClient
from charonia.serving.requests.raw_request import Array
from charonia.serving.requests.responders import answered

_KEY = re.compile(rb"([0-9a-f]{32})\.([0-9]{1,9})")
_NUM_REMEMBERED = 4096
"""Cancelled requests that are remembered: no chunk of theirs asks for a second cancellation."""
_TRY_AGAIN_S = 5.0


class PostprocessorHost:
    """The postprocessor behind Triton.

    Args:
        scheduler_model: its name. repository: the models' folders.
        log: takes one line.
    """

    def __init__(
        self, pb_utils: Any, scheduler_model: str, repository: Path, *, log: Callable[[str], None]
    ) -> None:
        self._pb_utils = pb_utils
        self._log = log
        self._scheduler = SchedulerAddress(pb_utils, scheduler_model, repository, log=log)
        self._client: DeliveryClient | None = None
        self._connect_at = 0.0  # not before, in seconds of the monotonic clock
        self._cancelled: dict[str, None] = {}  # in the order in which they were cancelled

    def execute(self, requests: list[Any]) -> list[Any]:
        """Hand on each chunk as it is; an input that did not come is an output that does not."""
        return [
            answered(self._pb_utils, partial(self._hand_on, request), self._log)
            for request in requests
        ]

    def finalize(self) -> None:
        """Say that nothing is in hand any more, and hang up."""
        if self._client is not None:
            self._client.part()
            self._client = None

    def _hand_on(self, request: Any) -> Any:
        outputs = []
        for chunk in request.inputs():
            if chunk.name() != REQUEST_KEY:
                name = chunk.name().removeprefix(CHUNK_PREFIX)
                outputs.append(self._pb_utils.Tensor(name, np.array(chunk.as_numpy())))
            else:
                self._report(*_key_and_number(chunk.as_numpy()), request)
        return self._pb_utils.InferenceResponse(outputs)

    def _report(self, key: str, number: int, request: Any) -> None:
        """Say that a chunk is handed on, or that there is nobody to hand it to."""
        if key in self._cancelled or time.monotonic() < self._connect_at:
            return
        has_gone = request.is_cancelled()
        try:
            self._send(Cancellation(key) if has_gone else Delivery(key, number))
        except (OSError, CharoniaError) as error:
            self._disconnect()
            self._connect_at = time.monotonic() + _TRY_AGAIN_S  # each chunk would wait for it
            self._log(f"the scheduler could not be told of a chunk: {error}")
            return
        if has_gone:
            self._cancelled[key] = None
            if len(self._cancelled) > _NUM_REMEMBERED:
                del self._cancelled[next(iter(self._cancelled))]

    def _send(self, message: Delivery | Cancellation) -> None:
        if self._client is not None:
            try:
                self._client.tell(message)
            except OSError:
                self._disconnect()  # there may be another scheduler by now
            else:
                return
        self._client = DeliveryClient(self._scheduler.connect())
        self._client.tell(message)

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.hang_up()
            self._client = None


def _key_and_number(array: Array) -> tuple[str, int]:
    """What the scheduler calls a request, and which response this is.

    Raises:
        InvalidRequestError: it is no scheduler's.
    """
    text = array.item() if array.size == 1 and array.dtype == np.object_ else b""
    match = _KEY.fullmatch(text) if isinstance(text, bytes) else None
    if match is None:
        raise InvalidRequestError(f"{REQUEST_KEY} must be one string that the scheduler made")
    return match[1].decode(), int(match[2])
