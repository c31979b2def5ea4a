"""An attempt to connect to an engine or to load one, and how another thread sees it.

Owns the handover of the result. Must not know how an engine is found or loaded.
"""

import threading
from collections.abc import Callable

from charonia.errors import UnavailableError
from charonia.protocol import EngineInfo


class EngineOpening:
    """Work that ends with an engine or an error.

    Args:
        work: finds or loads an engine; its exception is kept for `result`.
    """

    def __init__(self, work: Callable[[], EngineInfo]) -> None:
        self._work = work
        self._outcome: EngineInfo | Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_done(self) -> bool:
        """True if `result` returns at once."""
        return self._outcome is not None

    def result(self) -> EngineInfo:
        """The engine. Raises the exception of the work, if it has failed."""
        assert self._outcome is not None, "result() before it is done"
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def run(self) -> None:
        """Do the work in this thread."""
        try:
            self._outcome = self._work()
        except Exception as error:
            self._outcome = error

    def start(self, on_done: Callable[[], None]) -> None:
        """Do the work in a thread of its own. It is done without one if none can be started.

        Args:
            on_done: called in that thread at the end.
        """

        def run() -> None:
            self.run()
            on_done()

        thread = threading.Thread(target=run, name="charonia-opening", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit of processes is reached, perhaps for a moment
            self._outcome = UnavailableError(f"nobody can look for it: {error}")
        else:
            self._thread = thread

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, if there is one, for at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
