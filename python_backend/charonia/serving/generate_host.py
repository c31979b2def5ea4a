"""The `generate` model's side: unary requests, many at a time, answered when they are done.

Owns what waits for an answer and the one call that brings answers. Must not know anything of the
scheduler but its name and the mailbox of `relay`.
"""

import secrets
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from charonia import errors
from charonia.errors import CharoniaError, UnavailableError
from charonia.serving.bls import clean
from charonia.serving.outlets import CancellationPoller, TritonOutlet
from charonia.serving.relay import RelayBatch, RelayedAnswer
from charonia.serving.schema import read_flag
from charonia.serving.tensors import (
    INTERNAL_ERROR,
    RELAY_KEY,
    RELAYED,
    REQUEST_KEY,
    RawRequest,
    read_request,
    tensor,
)

LOST = "the scheduler was restarted; the request is lost"
_ERRORS_BY_CODE: dict[str, type[CharoniaError]] = {
    kind.code: kind
    for kind in (
        CharoniaError,
        errors.InvalidRequestError,
        errors.NotSupportedError,
        errors.UnavailableError,
        errors.RequestCancelledError,
    )
}


@dataclass
class _Waiting:
    """A client that waits.

    Attributes:
        owner: the scheduler's process that has its request; None until it accepted that.
    """

    outlet: TritonOutlet
    owner: str | None = None


class SchedulerCalls:
    """Short BLS calls to the scheduler.

    Args:
        scheduler_model: its name.
    """

    def __init__(self, pb_utils: Any, scheduler_model: str) -> None:
        self._pb_utils = pb_utils
        self._scheduler_model = scheduler_model

    def cancel(self, request_key: str) -> None:
        """Cancel a request by its key; nothing happens when it is not live."""
        inputs = [
            self._pb_utils.Tensor("cancel", np.array([True])),
            tensor(self._pb_utils, REQUEST_KEY, [request_key]),
        ]
        self.call(inputs, ["text_output"])

    def call(
        self,
        inputs: list[Any],
        output_names: list[str],
        *,
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
        timeout_us: int = 0,
    ) -> Any:
        """Make one call that has one response, and return that.

        Raises:
            UnavailableError: there is no scheduler, or it answers with an error of Triton.
        """
        pb_utils = self._pb_utils
        answer: Any = None
        try:
            request = pb_utils.InferenceRequest(
                model_name=self._scheduler_model,
                requested_output_names=output_names,
                inputs=inputs,
                request_id=request_id,
                parameters=_bls_parameters(parameters or {}),
                timeout=timeout_us,
            )
            for response in request.exec(decoupled=True):
                answer = response if answer is None else answer
        except pb_utils.TritonModelException as error:
            raise UnavailableError(clean(str(error))) from None
        if answer is None:
            raise UnavailableError("the scheduler gave no answer")
        if answer.has_error():
            # BLS loses codes (2.51.0): each is INTERNAL here. The scheduler's own come otherwise.
            raise UnavailableError(clean(answer.error().message()))
        return answer


class GenerateHost:
    """The `generate` model behind Triton.

    Args:
        scheduler_model: its name. log: takes one line, from any thread.
    """

    def __init__(self, pb_utils: Any, scheduler_model: str, *, log: Callable[[str], None]) -> None:
        self._pb_utils = pb_utils
        self._log = log
        self._calls = SchedulerCalls(pb_utils, scheduler_model)
        self._relay_key = secrets.token_hex(16)
        self._waiting: dict[str, _Waiting] = {}
        self._wake = threading.Condition()
        self._is_closing = False
        self._poller = CancellationPoller(self._on_cancelled)
        self._thread = threading.Thread(target=self._run, name="charonia-collector", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand requests in to the scheduler; the answers come later."""
        for request in requests:
            outlet = TritonOutlet(self._pb_utils, request.get_response_sender())
            try:
                self._take(request, outlet)
            except CharoniaError as error:
                outlet.fail(error)
            except Exception:
                self._log(f"a request could not be handed on: {traceback.format_exc()}")
                outlet.fail(CharoniaError(INTERNAL_ERROR))

    def finalize(self) -> None:
        """Answer what is still waiting, and stop."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._fail_all(UnavailableError("the server is shutting down"))
        self._thread.join()
        self._poller.close()

    def _take(self, request: Any, outlet: TritonOutlet) -> None:
        raw = read_request(request)
        if read_flag(raw.tensors, "cancel"):
            answer = self._hand_in(raw, ["text_output"], [])
            outlet.send({"text_output": _values(answer, "text_output")}, is_final=True)
            return
        key = secrets.token_hex(16)
        keys = [tensor(self._pb_utils, REQUEST_KEY, [key])]
        names = [*sorted(raw.output_names), REQUEST_KEY]
        waiting = _Waiting(outlet)
        # First of all, because the answer can be here before the word that it was accepted.
        with self._wake:
            self._waiting[key] = waiting
            self._wake.notify()
        try:
            waiting.owner = _batch(self._hand_in(raw, names, keys)).owner
        except BaseException:
            self._take_waiting(key)
            raise
        with self._wake:
            if key in self._waiting:
                self._poller.add(key, outlet)

    def _hand_in(self, raw: RawRequest, names: list[str], keys: list[Any]) -> Any:
        """Raises CharoniaError: the scheduler's own, when it refuses."""
        inputs = [self._pb_utils.Tensor(name, array) for name, array in raw.tensors.items()]
        relay_key = tensor(self._pb_utils, RELAY_KEY, [self._relay_key])
        answer = self._calls.call(
            [*inputs, *keys, relay_key],
            [*names, RELAYED],
            request_id=raw.request_id,
            parameters=raw.parameters,
            timeout_us=raw.timeout_us,
        )
        if any(output.name() == RELAYED for output in answer.output_tensors()):
            for refusal in _batch(answer).answers:
                raise _error_of(refusal)
        return answer

    # ------------------------------------------------------------------ answers

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._is_closing):
                    self._wake.wait()
                if self._is_closing:
                    return
            try:
                self._deliver(self._collect())
            except CharoniaError as error:
                self._fail_all(error)
            except Exception:
                self._log(f"answers could not be handed on: {traceback.format_exc()}")
                self._fail_all(CharoniaError(INTERNAL_ERROR))

    def _collect(self) -> RelayBatch:
        key = tensor(self._pb_utils, RELAY_KEY, [self._relay_key])
        return _batch(self._calls.call([key], [RELAYED]))

    def _deliver(self, batch: RelayBatch) -> None:
        for answer in batch.answers:
            waiting = self._take_waiting(answer.key)
            if waiting is not None:
                self._answer(waiting.outlet, answer)
        with self._wake:
            waiting_keys = list(self._waiting.items())
        for key, waiting in waiting_keys:
            if waiting.owner not in (None, batch.owner) and self._take_waiting(key):
                waiting.outlet.fail(UnavailableError(LOST))

    def _answer(self, outlet: TritonOutlet, answer: RelayedAnswer) -> None:
        if answer.error is not None:
            outlet.fail(_error_of(answer))
            return
        outputs = {name: v for name, v in answer.outputs.items() if name != REQUEST_KEY}
        outlet.send(outputs, is_final=True)

    def _take_waiting(self, key: str) -> _Waiting | None:
        with self._wake:
            self._poller.remove(key)
            return self._waiting.pop(key, None)

    def _fail_all(self, error: CharoniaError) -> None:
        with self._wake:
            keys = list(self._waiting)
        for key in keys:
            waiting = self._take_waiting(key)
            if waiting is not None:
                waiting.outlet.fail(error)

    def _on_cancelled(self, key: str) -> None:
        """The answer, an error by then, still comes through the mailbox."""
        try:
            self._calls.cancel(key)
        except CharoniaError as error:
            self._log(f"a request could not be cancelled: {error}")


def _error_of(answer: RelayedAnswer) -> CharoniaError:
    return _ERRORS_BY_CODE.get(answer.code, CharoniaError)(answer.error)


def _batch(response: Any) -> RelayBatch:
    return msgspec.msgpack.decode(bytes(_values(response, RELAYED)), type=RelayBatch)


def _values(response: Any, name: str) -> list[Any]:
    for output in response.output_tensors():
        if output.name() == name:
            values: list[Any] = output.as_numpy().tolist()
            return values
    raise UnavailableError("the scheduler's answer is incomplete")


def _bls_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """BLS takes no floats; the scheduler reads numbers in strings as well."""
    return {
        name: repr(value) if isinstance(value, float) else value
        for name, value in parameters.items()
    }
