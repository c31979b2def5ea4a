"""How an engine is got that is to serve: looked for or loaded, one attempt at a time.

Owns the attempt that is under way, and whether anybody wants what comes of it. Must not know when
an engine is needed, nor what it is good for.
"""

from collections.abc import Callable

from charonia.protocol import Executor, Opening


class EngineSearch:
    """Attempts to get an engine, each in a thread of its own (`Executor.open`).

    Args:
        clock: seconds, monotonic. timeout_s: what takes longer counts as stuck.
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
        """Whether an attempt has not ended, or `take_ended` has not given it back."""
        return self._opening is not None

    @property
    def is_stuck(self) -> bool:
        """Whether an attempt takes longer than it may."""
        seconds = self._clock() - self._began_at
        return self._opening is not None and seconds >= self._timeout_s

    def begin(self, *, replace: bool) -> None:
        """Begin an attempt: none is under way.

        Args:
            replace: load a fresh engine, instead of asking the one that is there what it is.
        """
        self._began_at = self._clock()
        self._opening = self._executor.open(replace=replace, on_done=self._wake)

    def discard(self) -> None:
        """Whatever comes of the attempt that is under way is not wanted any more."""
        self._is_void = self._opening is not None

    def take_ended(self) -> Opening | None:
        """An attempt that has ended, once; None where there is none, or nobody wants it."""
        opening = self._opening
        if opening is None or not opening.is_done:
            return None
        is_void, self._opening, self._is_void = self._is_void, None, False
        return None if is_void else opening
