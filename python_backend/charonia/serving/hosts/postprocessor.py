"""The `postprocessor` model: passes chunks of `llm` on and reports each one to the scheduler.

Owns these reports. It also reports clients that have disconnected: in an ensemble, the step that
generates cannot see that, but the next step can. Must not know tokens.

Triton takes any number of responses from a step and keeps them for the next one. So the scheduler
has only a few responses of each request under way, see `sessions`, and sends more after a report.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from charonia.errors import CharoniaError, InvalidRequestError
from charonia.events import request_fields, warning_event
from charonia.serving.conventions.interface import CHUNK_PREFIX, REQUEST_KEY
from charonia.serving.hosts.scheduler_address import SchedulerAddress
from charonia.serving.messages.relay import Cancellation, Delivery
from charonia.serving.messages.relay_client import DeliveryClient
from charonia.serving.requests.raw_request import Array
from charonia.serving.requests.responders import answered
from charonia.serving.requests.tensors import traceparent_of
from charonia.tracing.traceparent import trace_id_of

_KEY = re.compile(rb"([0-9a-f]{32})\.([0-9]{1,9})\.(.{0,1024})", re.DOTALL)
_NUM_REMEMBERED = 4096
"""Cancelled requests that are remembered, so that each is cancelled only once."""
_TRY_AGAIN_S = 5.0


class PostprocessorHost:
    """The postprocessor behind Triton.

    Args:
        scheduler_model: its name. repository: directory of the models.
        log: takes one line.
    """

    def __init__(
        self, pb_utils: Any, scheduler_model: str, repository: Path, *, log: Callable[[str], None]
    ) -> None:
        self._pb_utils = pb_utils
        self._log = log
        self._scheduler = SchedulerAddress(pb_utils, scheduler_model, repository, log=log)
        self._client: DeliveryClient | None = None
        self._connect_at = 0.0  # not before this, by the monotonic clock
        self._cancelled: dict[str, None] = {}  # in the order in which they were cancelled

    def execute(self, requests: list[Any]) -> list[Any]:
        """Pass each chunk on unchanged: each input that is present becomes an output."""
        return [
            answered(
                self._pb_utils,
                partial(self._hand_on, request),
                self._log,
                partial(_log_fields, request),
            )
            for request in requests
        ]

    def finalize(self) -> None:
        """Report that no chunk is left here, and disconnect."""
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
                key, number, _ = _parts_of_key(chunk.as_numpy())
                self._report(key, number, request)
        return self._pb_utils.InferenceResponse(outputs)

    def _report(self, key: str, number: int, request: Any) -> None:
        """Report that a chunk is passed on, or that its client has disconnected."""
        if key in self._cancelled or time.monotonic() < self._connect_at:
            return
        has_gone = request.is_cancelled()
        try:
            self._send(Cancellation(key) if has_gone else Delivery(key, number))
        except (OSError, CharoniaError) as error:
            self._disconnect()
            self._connect_at = time.monotonic() + _TRY_AGAIN_S  # else each chunk would try
            self._log(
                warning_event("chunk_not_reported", **_log_fields(request), reason=str(error))
            )
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


def _parts_of_key(array: Array) -> tuple[str, int, str]:
    """The scheduler's key of a request, the number of this response, and the tenant.

    See `Session.chunk_key`.

    Raises:
        InvalidRequestError: the scheduler did not make it.
    """
    text = array.item() if array.size == 1 and array.dtype == np.object_ else b""
    match = _KEY.fullmatch(text) if isinstance(text, bytes) else None
    if match is None:
        raise InvalidRequestError(f"{REQUEST_KEY} must be one string that the scheduler made")
    return match[1].decode(), int(match[2]), match[3].decode(errors="replace")


def _log_fields(request: Any) -> dict[str, str | None]:
    """The names of a request in the log, as far as they can be read; only asked for a line."""
    key = tenant = trace_id = None
    request_id = ""
    # Whatever failed before may fail again.
    with contextlib.suppress(Exception):
        request_id = request.request_id()
    with contextlib.suppress(Exception):
        trace_id = trace_id_of(traceparent_of(request, json.loads(request.parameters() or "{}")))
    with contextlib.suppress(Exception):
        for chunk in request.inputs():
            if chunk.name() == REQUEST_KEY:
                key, _, tenant = _parts_of_key(chunk.as_numpy())
    return request_fields(request_id=request_id, key=key, tenant=tenant, trace_id=trace_id)
