"""Patience of tests for what must come, however slow the machine is; and time that they make up.

Owns the patience, and the clock. Must not know what is waited for.
"""

import time
from collections.abc import Callable

WAIT_S = 120.0
"""Longer than anything takes that is right: reached only where something is wrong."""


def eventually(condition: Callable[[], object], what: str = "it happens") -> None:
    """Wait for something that happens soon, or else never."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.001)


class Clock:
    """The module `time` for a module under test, in which time passes only as a test says.

    Args:
        step: seconds that pass whenever it is asked for the time.

    Attributes:
        now: by the monotonic clock.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self, step: float = 0.0) -> None:
        self.now = time.monotonic()
        self._step = step

    def monotonic(self) -> float:
        self.now += self._step
        return self.now
