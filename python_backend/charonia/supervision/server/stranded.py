"""Calls that a lost process was still to answer, and when the server is restarted for them.

Owns which models left such calls, and since when. Must not know how a process is lost.

They can end in no other way than with the server (`supervision/open_calls.py`).
"""

from collections.abc import Callable
from concurrent.futures import Future

from charonia.events import event
from charonia.supervision.server.background import in_background

_RUNNING = ("charonia_requests_running", "charonia_requests_waiting")


class StrandedCalls:
    """Of one started server.

    Args:
        metrics: gives charonia's metrics by name; None where they cannot be read.
        stranded_s: after that the server is restarted, also while other requests run.
        log: gets one line per model.
    """

    def __init__(
        self,
        metrics: Callable[[], dict[str, float] | None],
        stranded_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._metrics = metrics
        self._stranded_s = stranded_s
        self._log = log
        self._since: dict[str, float] = {}
        self._asked: Future[bool] | None = None

    def note(self, model: str, num_calls: int, now: float) -> None:
        """A process of a model was lost, with so many calls still open."""
        if num_calls and model not in self._since:
            self._since[model] = now
            self._log(event("calls_stranded", model=model, calls=num_calls))

    def look(self, now: float) -> str | None:
        """Why the server must be restarted at this moment, or None."""
        if not self._since:
            return None
        is_idle = False
        if self._asked is None:
            self._asked = in_background(self._is_idle)
        elif self._asked.done():
            is_idle, self._asked = self._asked.result(), None
        for model, since in self._since.items():
            if is_idle or now - since > self._stranded_s:
                return f"calls of the lost {model} process can end in no other way"
        return None

    def _is_idle(self) -> bool:
        found = self._metrics() or {}
        return all(found.get(name) == 0 for name in _RUNNING)
