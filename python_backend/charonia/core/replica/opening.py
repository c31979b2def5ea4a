"""An engine that is being looked for or loaded, and how that is seen from another thread.

Owns the hand-over of what came of it. Must not know what is done to get an engine.
"""

import threading
from collections.abc import Callable

from charonia.protocol import EngineInfo


class EngineOpening:
    """Work that ends with an engine, or an error.

    Args:
        work: looks for an engine, or loads one; what it raises is kept.
    """

    def __init__(self, work: Callable[[], EngineInfo]) -> None:
        self._work = work
        self._outcome: EngineInfo | Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._outcome is not None

    def result(self) -> EngineInfo:
        """The engine; raises what the work did."""
        assert self._outcome is not None, "result() before it is done"
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def run(self) -> None:
        """Do the work here and now."""
        try:
            self._outcome = self._work()
        except Exception as error:
            self._outcome = error

    def start(self, on_done: Callable[[], None]) -> None:
        """Do the work in a thread of its own.

        Args:
            on_done: called there at the end.
        """

        def run() -> None:
            self.run()
            on_done()

        self._thread = threading.Thread(target=run, name="charonia-opening", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, if there is one; not longer than this."""
        if self._thread is not None:
            self._thread.join(timeout)
