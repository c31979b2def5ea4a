"""The clients that go on while things break: each lane repeats one request without an end.

Owns when a request is sent again. Must not know faults.
"""

import threading
import time
from collections.abc import Callable, Iterator

from faults.calls import Answer, Call
from faults.recovery import Arrival

_WAIT_TURN_S = 0.01
_PAUSE_AFTER_ERROR_S = 0.5


class Lane:
    """One request that is sent again as soon as it has been answered, by a thread of its own.

    Args:
        entry: the model that it calls. send: the request.

    Attributes:
        answers: of the requests that ended.
    """

    def __init__(self, index: int, entry: str, send: Callable[[], Call]) -> None:
        self.index = index
        self.entry = entry
        self.answers: list[Answer] = []
        self._send = send
        self._watched: list[Call] = []
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lane-{index}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True if the last request has been answered; see `end`."""
        return not self._thread.is_alive()

    @property
    def call(self) -> Call | None:
        """The request under way, or None between two."""
        return next((call for call in self._watched[-1:] if not call.is_over), None)

    @property
    def has_begun(self) -> bool:
        """True if a token has come since `watch`, or before it of the request under way."""
        return any(call.token_ids for call in list(self._watched))

    def watch(self) -> None:
        """Forget arrivals of requests that have ended."""
        del self._watched[:-1]  # in place: the lane's thread appends

    def arrivals(self) -> Iterator[Arrival]:
        """Responses with tokens since `watch`, and those before it of the request under way."""
        for call in list(self._watched):
            yield from call.arrivals()

    def end(self) -> None:
        """Send no more; the request under way goes on to its end."""
        self._is_ending.set()

    def _run(self) -> None:
        while not self._is_ending.is_set():
            try:
                call = self._send()
            except OSError as error:  # HTTP: nobody listens while the server starts
                self.answers.append(self._unreached(error))
                self._is_ending.wait(_PAUSE_AFTER_ERROR_S)
                continue
            self._watched.append(call)
            while not call.is_over:
                time.sleep(_WAIT_TURN_S)
            answer = call.answer()
            self.answers.append(answer)
            if answer.error is not None:
                self._is_ending.wait(_PAUSE_AFTER_ERROR_S)

    def _unreached(self, error: OSError) -> Answer:
        who = f"lane {self.index}"
        return Answer(who, self.entry, time.monotonic(), 0, 0, f"not sent: {error}", equals=True)
