"""A proxy: a model in front of the scheduler, such as `generate`, for many requests at a time.

Owns the requests that wait for answers. Knows the scheduler only by its name and its
`SchedulerClient`. Must not know the clients' tensors: a `Convention` does.

A decoupled proxy passes on streams. A proxy that is not decoupled answers each request once, later,
through the response sender. It serves clients that cannot stream, for which Triton requires a model
that is not decoupled.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from charonia.core.request_log import ended_line
from charonia.errors import CharoniaError, ShuttingDownError, UnavailableError
from charonia.events import exception_event
from charonia.serving.conventions.convention import Convention, Part
from charonia.serving.hosts.open_requests import ClientRequest, OpenPart, OpenRequests
from charonia.serving.hosts.scheduler_address import SchedulerAddress
from charonia.serving.messages.relay import RelayedAnswer
from charonia.serving.messages.relay_client import SchedulerClient
from charonia.serving.requests.queue_limit import QueueLimit
from charonia.serving.requests.raw_request import RawRequest
from charonia.serving.requests.responders import (
    CancellationPoller,
    TritonResponder,
    failing_with_errors,
)
from charonia.serving.requests.tensors import INTERNAL_ERROR, read_request
from charonia.supervision.models.judge import ServerWatch
from charonia.supervision.models.probes import Readiness

LOST = "the connection to the scheduler has ended; the request is lost"


class ProxyHost:
    """A proxy behind Triton.

    It connects to the scheduler when there is a request and no connection.

    Args:
        scheduler_model: its name. repository: directory of the models.
        queue_limit: limits of the requests that wait here for their answers.
        convention: translates requests and answers. is_decoupled: whether Triton takes several
            responses to a request.
        log: takes one line, from any thread.
    """

    def __init__(
        self,
        pb_utils: Any,
        scheduler_model: str,
        repository: Path,
        queue_limit: QueueLimit,
        convention: Convention,
        *,
        is_decoupled: bool,
        log: Callable[[str], None],
    ) -> None:
        self._pb_utils = pb_utils
        self._queue_limit = queue_limit
        self._convention = convention
        self._is_decoupled = is_decoupled
        self._log = log
        self._address = SchedulerAddress(pb_utils, scheduler_model, repository, log=log)
        self._lock = threading.Lock()
        self._scheduler: SchedulerClient | None = None
        self._poller = CancellationPoller(self._on_cancelled, log=log)
        self._open = OpenRequests(self._poller)  # all sent through that client
        readiness = Readiness(pb_utils, scheduler_model)
        readiness.has_server_started = True  # there are requests only then
        self._server = ServerWatch(
            readiness,
            has_requests=lambda: bool(self._open),
            on_stopping=self._tell_stopping,
            log=log,
        )

    def execute(self, requests: list[Any]) -> None:
        """Pass requests to the scheduler; the answers come later."""
        self._server.start()
        for request in requests:
            sender = request.get_response_sender()
            responder = TritonResponder(self._pb_utils, sender, is_decoupled=self._is_decoupled)
            with failing_with_errors(responder, self._log) as log_fields:
                raw = read_request(request)
                log_fields.update(raw.log_fields)
                self._hand_in(raw, responder)

    def finalize(self) -> None:
        """Answer what is still waiting, and stop."""
        self._server.close()
        with self._lock:
            scheduler = self._scheduler
            clients = self._open.take_all()
        self._end_all(clients, ShuttingDownError())
        self._poller.close()
        if scheduler is not None:
            scheduler.close()

    def _hand_in(self, raw: RawRequest, responder: TritonResponder) -> None:
        parts = self._convention.split(raw)
        client = ClientRequest(responder, raw.num_bytes, raw.log_fields)
        self._queue_limit.take(raw.num_bytes)
        try:
            if self._scheduler is None:
                self._connect()
            with self._lock:
                if self._scheduler is None:
                    raise UnavailableError(LOST)
                for request, part in parts:
                    self._send(self._scheduler, request, client, part)
                self._open.poll(client)
        except BaseException:
            self._queue_limit.give_back(raw.num_bytes)
            raise

    def _send(
        self, scheduler: SchedulerClient, raw: RawRequest, client: ClientRequest, part: Part
    ) -> None:
        """Send one part; if that fails, cancel the earlier parts. The caller holds the lock."""
        try:
            key = scheduler.send(raw)
        except BaseException:
            for sent in self._open.withdraw(client):
                scheduler.cancel(sent)
            raise
        self._open.add(OpenPart(key, client, part))

    def _connect(self) -> None:
        channel = self._address.connect()
        with self._lock:  # `on_end` waits for it
            self._scheduler = SchedulerClient(channel, self, log=self._log)

    # ------------------------------------------------------------------ the client's thread

    def on_answer(self, answer: RelayedAnswer) -> None:
        """Pass an answer on, see `AnswerEvents.on_answer`."""
        with self._lock:
            opened = self._open.take_answer(answer.key, is_final=answer.is_final)
            if opened is None:
                return
            client, part = opened.client, opened.part
            is_over = not client.waiting
        if not is_over:
            self._pass_on(answer, opened)
        elif (failure := client.error or answer.failure) is not None:
            self._end(client, failure, part)
        else:
            with self._ending(client):
                outputs = part.answer(answer.outputs)
                if outputs is None:
                    client.responder.end()
                else:
                    client.responder.send(outputs, is_final=True)

    def _pass_on(self, answer: RelayedAnswer, opened: OpenPart) -> None:
        """Pass on an answer that is not the last, and acknowledge it unless it ends its part."""
        client, part = opened.client, opened.part
        try:
            if (failure := answer.failure) is None:
                outputs = part.answer(answer.outputs)
                if outputs is not None:
                    client.responder.send(outputs, is_final=False)
            elif (failure := part.failure(failure)) is not None:
                client.responder.fail(failure, is_final=False)
        except Exception:
            self._log(exception_event("response_not_passed_on", **client.log_fields))
            client.error = CharoniaError(INTERNAL_ERROR)
            self._on_cancelled(client)
        client.num_passed_on += 1
        if not answer.is_final:
            opened.num_passed_on += 1
            with self._lock:
                if self._scheduler is not None:
                    self._scheduler.acknowledge(answer.key, opened.num_passed_on)

    def on_end(self) -> None:
        """End all waiting requests with an error, see `AnswerEvents.on_end`."""
        with self._lock:
            self._scheduler = None
            clients = self._open.take_all()
        self._end_all(clients, UnavailableError(LOST))

    def _end_all(self, clients: Iterable[ClientRequest], error: CharoniaError) -> None:
        """End requests that the scheduler does not answer."""
        for client in clients:
            self._log(ended_line(error, client.log_fields))
            self._end(client, error)

    def _on_cancelled(self, client: ClientRequest) -> None:
        """Cancel an open request. Its last answers, now errors, come like any others."""
        with self._lock:
            if not client.waiting:
                return
            client.is_cancelled = True
            if self._scheduler is not None:
                for key in client.waiting:
                    self._scheduler.cancel(key)

    def _tell_stopping(self) -> None:
        with self._lock:
            if self._scheduler is not None:
                self._scheduler.note_server_stopping()

    @contextlib.contextmanager
    def _ending(self, client: ClientRequest) -> Iterator[None]:
        """Send the last response of a request, or the error that is raised; then stop counting it.

        Every request that was sent to the scheduler ends here.
        """
        with failing_with_errors(client.responder, self._log, client.log_fields):
            yield
        self._queue_limit.give_back(client.num_bytes)

    def _end(self, client: ClientRequest, error: CharoniaError, part: Part | None = None) -> None:
        """End a request early; for a stream this is safe only a little later, see the poller.

        Args:
            part: the part that failed; None if the whole request did.
        """

        def end() -> None:
            with self._ending(client):
                failure = error if part is None else part.failure(error)
                if failure is not None:
                    raise failure
                client.responder.end()

        if client.num_passed_on or (client.is_cancelled and self._is_decoupled):
            self._poller.end_later(end)
        else:
            end()
