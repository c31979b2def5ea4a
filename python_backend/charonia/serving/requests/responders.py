"""Where the answer to one request goes: a response sender that cannot be misused.

Owns the discipline around `pb_utils` senders. Must not know what is in a response.

Triton frees what stands behind a sender as soon as the FINAL flag was sent; asking such a sender
whether its client has gone crashes the whole server. So nobody else holds a sender, and after the
last response it is never touched again.
"""

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from charonia.errors import CharoniaError
from charonia.serving.requests.raw_request import Outputs
from charonia.serving.requests.tensors import INTERNAL_ERROR, error_response, response


class Responder(Protocol):
    """Takes the answer to one request: responses, of which the last one is final, or an error.

    Attributes:
        is_polled: nobody says when the client has gone; it must be asked time and again.
        is_acknowledged: whoever takes the responses says so, and gets only a few before that.
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
        """Whether the client has gone; False once the answer is complete."""
        ...


def fail(responder: Responder, error: CharoniaError, log: Callable[[str], None]) -> None:
    """Send an error, if it can be sent; else it is logged."""
    try:
        responder.fail(error)
    except Exception:
        log(f"an error could not be sent: {traceback.format_exc()}")


@contextmanager
def failing_with_errors(responder: Responder, log: Callable[[str], None]) -> Iterator[None]:
    """Make whatever is raised inside the answer; what is no CharoniaError is logged."""
    try:
        yield
    except CharoniaError as error:
        fail(responder, error, log)
    except Exception:
        log(f"a request failed: {traceback.format_exc()}")
        fail(responder, CharoniaError(INTERNAL_ERROR), log)


def answered(pb_utils: Any, make: Callable[[], Any], log: Callable[[str], None]) -> Any:
    """The response that `make` makes, or one with what it raises; that is logged as above."""
    try:
        return make()
    except CharoniaError as error:
        return error_response(pb_utils, error)
    except Exception:
        log(f"a request failed: {traceback.format_exc()}")
        return error_response(pb_utils, CharoniaError(INTERNAL_ERROR))


class TritonResponder:
    """The client of one Triton request.

    Args:
        sender: of the request; nobody else may use it.
        is_decoupled: whether Triton takes any number of responses, none at all too.
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
        """Complete the answer, with an empty response where Triton wants one."""
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
    """What ends a stream, and when; by the monotonic clock."""

    at: float
    end: Callable[[], None]


class CancellationPoller:
    """Asks responders in turn, from a thread of its own, whether their clients have gone.

    Triton tells nobody that a client has gone; it must be asked, and each question is a round
    trip that takes the server 0.1 ms. A responder is asked every `INTERVAL_S`, and more seldom when
    there are so many that it would be more than `MAX_POLLS_PER_S` questions.

    What ends a stream early is sent `LATE_END_S` later, for two reasons. Triton 2.51.0 crashes
    now and then when a gRPC stream ends in the moment of its cancellation. And an ensemble that
    fails while another of its steps still has a response in hand never ends inside Triton: it keeps
    the models of its steps loaded, also when others were loaded in their place, and the server's
    own end waits for it in vain.

    A responder that cannot be asked is not asked again; its request goes on.

    Args:
        log: takes one line, from any thread.
    """

    MAX_POLLS_PER_S = 200
    INTERVAL_S = 0.05
    LATE_END_S = 0.2

    def __init__(self, on_cancelled: Callable[[str], None], *, log: Callable[[str], None]) -> None:
        self._on_cancelled = on_cancelled
        self._log = log
        self._responders: dict[str, Responder] = {}
        self._late_ends: deque[_LateEnd] = deque()
        self._stop = threading.Event()
        self._has_work = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-polling", daemon=True)
        self._thread.start()

    def add(self, key: str, responder: Responder) -> None:
        """Watch a responder; `on_cancelled(key)` is called at most once."""
        self._responders[key] = responder
        self._has_work.set()

    def remove(self, key: str) -> None:
        """Stop watching."""
        self._responders.pop(key, None)

    @property
    def has_responders(self) -> bool:
        """Whether there is anybody to be asked."""
        return bool(self._responders)

    @property
    def has_late_ends(self) -> bool:
        """Whether answers are still to be ended."""
        return bool(self._late_ends)

    def end_later(self, end: Callable[[], None]) -> None:
        """End a stream early, when it is safe to.

        Args:
            end: does so.
        """
        self._late_ends.append(_LateEnd(time.monotonic() + self.LATE_END_S, end))
        self._has_work.set()

    def close(self) -> None:
        """Stop the thread, and end what was still to be ended."""
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
            for key, responder in list(self._responders.items()):
                self._ask(key, responder)
                if self._stop.wait(pause):
                    return

    def _ask(self, key: str, responder: Responder) -> None:
        try:
            if responder.is_cancelled() and self._responders.pop(key, None) is not None:
                self._on_cancelled(key)
        except Exception:
            self._responders.pop(key, None)
            self._log(f"a client could not be asked after: {traceback.format_exc()}")

    def _send_late_ends(self, *, until: float) -> None:
        while self._late_ends and self._late_ends[0].at <= until:
            try:
                self._late_ends.popleft().end()
            except Exception:
                self._log(f"an answer could not be ended: {traceback.format_exc()}")
