"""A circuit breaker: stops sending requests to a server that fails.

Owns the states of one server's circuit breaker. Must not know servers; time is an argument.

::

              MAX_FAILURES in a row                the pause is over
    closed ──────────────────────────► open ──────────────────────────► one trial
      ▲                                  ▲                                │  │
      │                                  └──── failed: twice the pause ◄──┘  │
      └──────────────────────── answered, or a probe was meanwhile ◄─────────┘
"""

from collections.abc import Callable

MAX_FAILURES = 3
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class Breaker:
    """Circuit breaker of one server.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_failures = 0  # in a row
        self._pause_s = FIRST_PAUSE_S
        self._open_until: float | None = None
        self._num_begun = 0
        self._trial: int | None = None  # number of the request that tries the server

    @property
    def is_open(self) -> bool:
        """True if the server has failed and has not answered since: open, or on trial."""
        return self._open_until is not None

    @property
    def admits(self) -> bool:
        """True if the server may get a request now."""
        return self.wait_s == 0.0 and self._trial is None

    @property
    def wait_s(self) -> float:
        """Seconds until the next trial."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def begin(self) -> int:
        """Note that the server gets a request. Returns its number, by which its end is told."""
        self._num_begun += 1
        if self.is_open:
            self._trial = self._num_begun
        return self._num_begun

    def succeed(self) -> None:
        """Note that the server answered."""
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = None
        self._trial = None

    def note_up(self) -> None:
        """Note that the server answered a probe: others need not wait for the end of a trial.

        Only an answered request proves that it serves. Until then the next failure opens the
        breaker, for twice the pause.
        """
        if self._trial is not None:
            self._trial = None
            self._open_until = None
            self._num_failures = MAX_FAILURES - 1
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def fail(self, request: int) -> None:
        """Note that the server failed a request or could not be reached.

        While the breaker is open, only the trial counts: other requests began before.
        """
        self._num_failures += 1
        is_trial = request == self._trial
        if is_trial:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._trial = None
        if is_trial or (self._num_failures >= MAX_FAILURES and not self.is_open):
            self._open_until = self._clock() + self._pause_s

    def abandon(self, request: int) -> None:
        """Note that a request ended and told nothing of the server.

        Its client left, or the time was over before the server answered.
        """
        if request == self._trial:
            self._trial = None
