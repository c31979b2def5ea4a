"""Runs a blocking call in a thread of its own.

Owns the thread. Must not know the call.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """Start a call. The end of the process does not wait for it.

    If a limit of processes is reached, `done` of the future tries again to start it.
    """
    return _Background(call)


class _Background(Future[T]):
    """The result of a call, for one thread that asks whether it is done."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call = call
        self._is_started = False
        self._start()

    def done(self) -> bool:
        """Return whether there is a result."""
        if not self._is_started:
            self._start()
        return super().done()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, daemon=True, name="charonia-background").start()
        except RuntimeError:  # no thread can be started now
            return
        self._is_started = True

    def _run(self) -> None:
        try:
            self.set_result(self._call())
        except Exception as error:
            self.set_exception(error)
