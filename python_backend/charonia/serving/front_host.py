"""A model in front of the scheduler, such as `generate`: many requests at a time in one process.

Owns what waits for answers, and the connection that brings them. Must not know anything of the
scheduler but its name and the messages of `relay`.

A decoupled front passes on streams, under another name than the scheduler's. One that is not
decoupled answers each request once, later, through the response sender: so clients that cannot
stream are served, for which Triton wants a model that is not decoupled.
"""

import contextlib
import secrets
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from charonia.errors import (
    CharoniaError,
    InvalidRequestError,
    ShuttingDownError,
    UnavailableError,
)
from charonia.serving.ledger import Ledger
from charonia.serving.outlets import (
    CancellationPoller,
    TritonOutlet,
    fail,
    failing_with_errors,
)
from charonia.serving.relay import (
    Acknowledgement,
    Cancellation,
    RelayedAnswer,
    RelayedRequest,
    SchedulerAddress,
    decode_answer,
    post,
)
from charonia.serving.tensors import RawRequest, read_request
from charonia.sockets.connection import Connection

LOST = "the connection to the scheduler has ended; the request is lost"


@dataclass
class _Waiting:
    """A request that is not answered to its end.

    Attributes:
        num_bytes: of it as it came. num_passed_on: answers. is_cancelled: its client has gone.
    """

    outlet: TritonOutlet
    num_bytes: int
    num_passed_on: int = 0
    is_cancelled: bool = False


class FrontHost:
    """A front behind Triton.

    It connects to the scheduler when there is a request and no connection.

    Args:
        scheduler_model: its name. repository: the models' folders.
        is_decoupled: whether Triton takes several responses to a request.
        ledger: what requests may hold here until they are answered.
        log: takes one line, from any thread.
    """

    def __init__(
        self,
        pb_utils: Any,
        scheduler_model: str,
        repository: Path,
        ledger: Ledger,
        *,
        is_decoupled: bool,
        log: Callable[[str], None],
    ) -> None:
        self._pb_utils = pb_utils
        self._ledger = ledger
        self._is_decoupled = is_decoupled
        self._log = log
        self._scheduler = SchedulerAddress(pb_utils, scheduler_model, repository, log=log)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._waiting: dict[str, _Waiting] = {}  # all came through this connection
        self._poller = CancellationPoller(self._on_cancelled, log=log)

    def execute(self, requests: list[Any]) -> None:
        """Hand requests in to the scheduler; the answers come later."""
        for request in requests:
            outlet = TritonOutlet(self._pb_utils, request.get_response_sender())
            with failing_with_errors(outlet, self._log):
                self._hand_in(request, outlet)

    def finalize(self) -> None:
        """Answer what is still waiting, and stop."""
        with self._lock:
            connection = self._connection
            waiting = self._take_all()
        self._fail(waiting, ShuttingDownError())
        self._poller.close()
        if connection is not None:
            connection.close()

    def _hand_in(self, request: Any, outlet: TritonOutlet) -> None:
        raw = read_request(request)
        self._check(raw)
        message = RelayedRequest(secrets.token_hex(16), raw)
        self._ledger.take(raw.num_bytes)
        try:
            if self._connection is None:
                self._connect()
            with self._lock:
                if self._connection is None:
                    raise UnavailableError(LOST)
                post(self._connection, message)
                self._waiting[message.key] = _Waiting(outlet, raw.num_bytes)
                self._poller.add(message.key, outlet)
        except BaseException:
            self._ledger.give_back(raw.num_bytes)
            raise

    def _check(self, raw: RawRequest) -> None:
        if not self._is_decoupled and "stream" in raw.tensors:
            raise InvalidRequestError("this model cannot stream: it is not decoupled")

    def _connect(self) -> None:
        channel = self._scheduler.connect()
        connection = Connection(channel)
        with self._lock:  # which `_on_end` waits for
            try:
                connection.follow(self._on_answer, self._on_end, log=self._log)
            except OSError as error:
                connection.close()
                raise UnavailableError(f"no answer could be taken: {error.strerror}") from None
            self._connection = connection

    # ------------------------------------------------------------------ the connection's threads

    def _on_answer(self, data: bytes) -> None:
        answer = decode_answer(data)
        with self._lock:
            waiting = self._waiting.get(answer.key)
            if answer.is_final:
                self._poller.remove(answer.key)
                self._waiting.pop(answer.key, None)
        if waiting is None:
            return
        if not answer.is_final:
            self._pass_on(answer, waiting)
            return
        if (failure := answer.failure) is not None:
            self._fail([waiting], failure)
            return
        with failing_with_errors(waiting.outlet, self._log):
            waiting.outlet.send(answer.outputs, is_final=True)
        self._ledger.give_back(waiting.num_bytes)  # it counts until it is answered

    def _pass_on(self, answer: RelayedAnswer, waiting: _Waiting) -> None:
        """Pass on an answer that others follow, and say so."""
        try:
            waiting.outlet.send(answer.outputs, is_final=False)
        except Exception:
            self._log(f"a response could not be passed on: {traceback.format_exc()}")
            self._on_cancelled(answer.key)
        waiting.num_passed_on += 1
        self._tell(Acknowledgement(answer.key, waiting.num_passed_on))

    def _on_end(self) -> None:
        with self._lock:
            self._connection = None
            waiting = self._take_all()
        self._fail(waiting, UnavailableError(LOST))

    def _on_cancelled(self, key: str) -> None:
        """The last answer, an error by then, comes as any other."""
        with self._lock:
            if (waiting := self._waiting.get(key)) is not None:
                waiting.is_cancelled = True
        self._tell(Cancellation(key))

    def _tell(self, message: Cancellation | Acknowledgement) -> None:
        with self._lock:
            if self._connection is not None:
                # Where nobody takes it, the request is lost with the connection.
                with contextlib.suppress(UnavailableError):
                    post(self._connection, message)

    def _take_all(self) -> list[_Waiting]:
        """What waits. The caller holds the lock."""
        for key in self._waiting:
            self._poller.remove(key)
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def _fail(self, waiting: list[_Waiting], error: CharoniaError) -> None:
        """End requests with an error; of streams that is safe a little later, see the poller."""
        for one in waiting:
            give_back = partial(self._ledger.give_back, one.num_bytes)
            if one.num_passed_on or (one.is_cancelled and self._is_decoupled):
                self._poller.fail_later(one.outlet, error, give_back)
            else:
                fail(one.outlet, error, self._log)
                give_back()
