"""Attempts to connect to an engine or to load one, one at a time.

Owns the present attempt, and whether its result is still wanted. Must not know when an engine is
needed, nor how it is used.
"""

from collections.abc import Callable

from charonia.protocol import Executor, Opening


class EngineSearch:
    """Attempts to get an engine, each in a thread of its own (`Executor.open`).

    Args:
        clock: monotonic, in seconds. timeout_s: an attempt that takes longer counts as stuck.
        wake: called from any thread when an attempt has ended.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        clock: Callable[[], float],
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._timeout_s = timeout_s
        self._wake = wake
        self._opening: Opening | None = None
        self._began_at = 0.0
        self._is_void = False

    @property
    def is_under_way(self) -> bool:
        """True if there is an attempt that `take_ended` has not returned yet."""
        return self._opening is not None

    @property
    def is_stuck(self) -> bool:
        """True if the present attempt takes longer than `timeout_s`."""
        seconds = self._clock() - self._began_at
        return self._opening is not None and seconds >= self._timeout_s

    def begin(self, *, replace: bool) -> None:
        """Begin an attempt; there must be none under way.

        Args:
            replace: load a new engine, instead of connecting to the present one.
        """
        self._began_at = self._clock()
        self._opening = self._executor.open(replace=replace, on_done=self._wake)

    def discard(self) -> None:
        """Ignore the result of the present attempt."""
        self._is_void = self._opening is not None

    def take_ended(self) -> Opening | None:
        """Return an ended attempt, once; None if there is none or its result is not wanted."""
        opening = self._opening
        if opening is None or not opening.is_done:
            return None
        is_void, self._opening, self._is_void = self._is_void, None, False
        return None if is_void else opening
