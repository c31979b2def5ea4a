"""Runs a call in a thread of its own, for whoever must not wait for it.

Owns that thread. Must not know what is called.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """Start a call; nobody waits for it when the process ends."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="charonia-background").start()
    return answer
