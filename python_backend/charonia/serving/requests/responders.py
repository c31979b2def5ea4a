"""Responders: safe wrappers of the response senders of requests.

Owns the safe use of `pb_utils` senders. Must not know the contents of a response.

Triton frees the state of a sender as soon as the FINAL flag was sent. A later question to such a
sender, whether its client has disconnected, crashes the whole server. So only a responder holds the
sender, and it never uses the sender after the last response.
"""

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from charonia.errors import CharoniaError
from charonia.events import exception_event
from charonia.serving.requests.raw_request import Outputs
from charonia.serving.requests.tensors import INTERNAL_ERROR, error_response, response


class Responder(Protocol):
    """Takes the answer to one request: responses, the last of which is final, or an error.

    Attributes:
        is_polled: whether a disconnected client is found only by polling `is_cancelled`.
        is_acknowledged: whether the receiver acknowledges responses; only a few are sent before
            that.
    """

    is_polled: bool
    is_acknowledged: bool

    def send(self, outputs: Outputs, *, is_final: bool) -> None:
        """Send a response."""
        ...

    def fail(self, error: CharoniaError) -> None:
        """Send an error, as the last response."""
        ...

    def is_cancelled(self) -> bool:
        """Return whether the client has disconnected; False once the answer is complete."""
        ...


LogFields = Mapping[str, str | None]
"""The names of a request in the log, see `events.request_fields`."""


class Polled(Hashable, Protocol):
    """A request that is polled.

    Attributes:
        log_fields: its names in the log.
    """

    @property
    def log_fields(self) -> LogFields: ...


P = TypeVar("P", bound=Polled)


def fail(
    responder: Responder,
    error: CharoniaError,
    log: Callable[[str], None],
    fields: LogFields | None = None,
) -> None:
    """Send an error; log it if it cannot be sent.

    Args:
        fields: the names of the request.
    """
    try:
        responder.fail(error)
    except Exception:
        log(exception_event("error_not_sent", **(fields or {})))


@contextmanager
def failing_with_errors(
    responder: Responder, log: Callable[[str], None], fields: LogFields | None = None
) -> Iterator[dict[str, str | None]]:
    """Send an exception as the answer. One that is not a CharoniaError is logged.

    Args:
        fields: the names of the request, as far as they are known.

    Yields:
        These names; what becomes known of them meanwhile is to be added.
    """
    known = dict(fields or {})
    try:
        yield known
    except CharoniaError as error:
        fail(responder, error, log, known)
    except Exception:
        log(exception_event("request_failed", **known))
        fail(responder, CharoniaError(INTERNAL_ERROR), log, known)


def answered(
    pb_utils: Any,
    make: Callable[[], Any],
    log: Callable[[str], None],
    fields: Callable[[], LogFields],
) -> Any:
    """The response that `make` returns, or one with its exception, logged as above.

    Args:
        fields: returns the names of the request; asked only for a line.
    """
    try:
        return make()
    except CharoniaError as error:
        return error_response(pb_utils, error)
    except Exception:
        log(exception_event("request_failed", **fields()))
        return error_response(pb_utils, CharoniaError(INTERNAL_ERROR))


class TritonResponder:
    """The client of one Triton request.

    Args:
        sender: of the request; no other code may use it.
        is_decoupled: whether Triton takes any number of responses, even none.
    """

    is_polled = True
    is_acknowledged = False

    def __init__(self, pb_utils: Any, sender: Any, *, is_decoupled: bool = False) -> None:
        self._pb_utils = pb_utils
        self._sender = sender
        self._is_decoupled = is_decoupled
        self._lock = threading.Lock()

    def send(self, outputs: Outputs, *, is_final: bool) -> None:
        """Send a response. Nothing is sent after the last one."""
        self._send(response(self._pb_utils, outputs), is_final=is_final)

    def fail(self, error: CharoniaError, *, is_final: bool = True) -> None:
        """Send an error, unless the answer is complete."""
        self._send(error_response(self._pb_utils, error), is_final=is_final)

    def end(self) -> None:
        """Complete the answer, with an empty response if Triton needs one."""
        self._send(None if self._is_decoupled else response(self._pb_utils, {}), is_final=True)

    def is_cancelled(self) -> bool:
        """Ask Triton; a round trip to the server of 0.05 ms."""
        with self._lock:
            return self._sender is not None and bool(self._sender.is_cancelled())

    def _send(self, message: Any, *, is_final: bool) -> None:
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        with self._lock:
            sender = self._sender
            if is_final:
                self._sender = None
            if sender is not None and message is None:
                sender.send(flags=flags)
            elif sender is not None:
                sender.send(message, flags=flags)


class _LateEnd(NamedTuple):
    """A function that ends a stream, and its time by the monotonic clock."""

    at: float
    end: Callable[[], None]


class CancellationPoller(Generic[P]):
    """Polls live requests, in a thread of its own, for clients that have disconnected.

    Triton does not report disconnected clients. It must be asked, and each question is a round trip
    that takes the server 0.1 ms. A responder is asked every `INTERVAL_S`, or less often if there
    are so many that this would exceed `MAX_POLLS_PER_S`.

    The early end of a stream is sent `LATE_END_S` later, for two reasons. Triton 2.51.0 sometimes
    crashes if a gRPC stream ends in the moment of its cancellation. And an ensemble that fails
    while another of its steps still holds a response never ends inside Triton: it keeps the models
    of its steps loaded, even if others were loaded in their place, and blocks the server's
    shutdown.

    A responder whose poll fails is not polled again; its request goes on.

    Args:
        on_cancelled: gets a request whose client has disconnected, at most once.
        log: takes one line, from any thread.
    """

    MAX_POLLS_PER_S = 200
    INTERVAL_S = 0.05
    LATE_END_S = 0.2

    def __init__(self, on_cancelled: Callable[[P], None], *, log: Callable[[str], None]) -> None:
        self._on_cancelled = on_cancelled
        self._log = log
        self._responders: dict[P, Responder] = {}
        self._late_ends: deque[_LateEnd] = deque()
        self._stop = threading.Event()
        self._has_work = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-polling", daemon=True)
        self._thread.start()

    def add(self, request: P, responder: Responder) -> None:
        """Begin to poll for a request."""
        self._responders[request] = responder
        self._has_work.set()

    def remove(self, request: P) -> None:
        """Stop polling for a request, if that has not ended yet."""
        self._responders.pop(request, None)

    @property
    def has_responders(self) -> bool:
        """True if there are responders to poll."""
        return bool(self._responders)

    @property
    def has_late_ends(self) -> bool:
        """True if streams are still to be ended."""
        return bool(self._late_ends)

    def end_later(self, end: Callable[[], None]) -> None:
        """End a stream early, `LATE_END_S` from now, when it is safe.

        Args:
            end: ends it.
        """
        self._late_ends.append(_LateEnd(time.monotonic() + self.LATE_END_S, end))
        self._has_work.set()

    def close(self) -> None:
        """Stop the thread, and end the remaining streams."""
        self._stop.set()
        self._has_work.set()
        self._thread.join()
        if self._late_ends:
            time.sleep(self.LATE_END_S)
            self._send_late_ends(until=math.inf)

    def _run(self) -> None:
        pause = 1 / self.MAX_POLLS_PER_S
        while not self._stop.wait(self.INTERVAL_S):
            self._has_work.clear()
            if self._stop.is_set():
                return
            if not (self._responders or self._late_ends):
                self._has_work.wait()
                continue
            self._send_late_ends(until=time.monotonic())
            for request, responder in list(self._responders.items()):
                self._ask(request, responder)
                self._send_late_ends(until=time.monotonic())  # a round may take many seconds
                if self._stop.wait(pause):
                    return

    def _ask(self, request: P, responder: Responder) -> None:
        try:
            if responder.is_cancelled() and self._responders.pop(request, None) is not None:
                self._on_cancelled(request)
        except Exception:
            self._responders.pop(request, None)
            self._log(exception_event("client_not_polled", **request.log_fields))

    def _send_late_ends(self, *, until: float) -> None:
        while self._late_ends and self._late_ends[0].at <= until:
            try:
                self._late_ends.popleft().end()
            except Exception:
                self._log(f"error: an answer could not be ended: {traceback.format_exc()}")
