"""The `generate` model's side: unary requests, many at a time, answered when they are done.

Owns what waits for an answer, and the connection that brings answers. Must not know anything of
the scheduler but its name and the messages of `relay`.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from charonia.errors import (
    CharoniaError,
    ShuttingDownError,
    UnavailableError,
    error_of,
)
from charonia.serving.ledger import Ledger
from charonia.serving.outlets import (
    CancellationPoller,
    TritonOutlet,
    fail,
    failing_with_errors,
)
from charonia.serving.relay import (
    Cancellation,
    RelayedAnswer,
    RelayedRequest,
    SchedulerAddress,
    decode_answer,
    post,
)
from charonia.serving.tensors import Outputs, read_request
from charonia.sockets.connection import Connection

LOST = "the connection to the scheduler has ended; the request is lost"


class GenerateHost:
    """The `generate` model behind Triton.

    It connects to the scheduler when there is a request and no connection.

    Args:
        scheduler_model: its name. repository: the models' folders.
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
        log: Callable[[str], None],
    ) -> None:
        self._pb_utils = pb_utils
        self._ledger = ledger
        self._log = log
        self._scheduler = SchedulerAddress(pb_utils, scheduler_model, repository, log=log)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        # All came through this connection; each with the bytes that it holds.
        self._waiting: dict[str, tuple[TritonOutlet, int]] = {}
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
        message = RelayedRequest(secrets.token_hex(16), raw)
        self._ledger.take(raw.num_bytes)
        try:
            if self._connection is None:
                self._connect()
            with self._lock:
                if self._connection is None:
                    raise UnavailableError(LOST)
                post(self._connection, message)
                self._waiting[message.key] = (outlet, raw.num_bytes)
                self._poller.add(message.key, outlet)
        except BaseException:
            self._ledger.give_back(raw.num_bytes)
            raise

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
            self._poller.remove(answer.key)
            outlet, num_bytes = self._waiting.pop(answer.key, (None, 0))
        if outlet is not None:
            with failing_with_errors(outlet, self._log):
                outlet.send(_outputs(answer), is_final=True)
            self._ledger.give_back(num_bytes)  # it counts until it is answered

    def _on_end(self) -> None:
        with self._lock:
            self._connection = None
            waiting = self._take_all()
        self._fail(waiting, UnavailableError(LOST))

    def _on_cancelled(self, key: str) -> None:
        """The answer, an error by then, comes as any other."""
        with self._lock:
            if self._connection is not None:
                # Where nobody takes it, the request is lost with the connection.
                with contextlib.suppress(UnavailableError):
                    post(self._connection, Cancellation(key))

    def _take_all(self) -> list[tuple[TritonOutlet, int]]:
        """What waits, with the bytes that each holds. The caller holds the lock."""
        for key in self._waiting:
            self._poller.remove(key)
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def _fail(self, waiting: list[tuple[TritonOutlet, int]], error: CharoniaError) -> None:
        for outlet, num_bytes in waiting:
            fail(outlet, error, self._log)
            self._ledger.give_back(num_bytes)


def _outputs(answer: RelayedAnswer) -> Outputs:
    """Raises CharoniaError: that is the answer."""
    if answer.error is not None:
        raise error_of(answer.error, answer.kind)
    return answer.outputs
