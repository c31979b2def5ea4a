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
        self._is_on_trial = False

    @property
    def is_open(self) -> bool:
        """True if the server has failed and has not answered since: open, or on trial."""
        return self._open_until is not None

    @property
    def admits(self) -> bool:
        """True if the server may get a request now."""
        return self.wait_s == 0.0 and not self._is_on_trial

    @property
    def wait_s(self) -> float:
        """Seconds until the next trial."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def begin(self) -> None:
        """Note that the server gets a request."""
        self._is_on_trial = self.is_open

    def succeed(self) -> None:
        """Note that the server answered."""
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = None
        self._is_on_trial = False

    def note_up(self) -> None:
        """Note that the server answered a probe: others need not wait for the end of a trial.

        Only an answered request proves that it serves. Until then the next failure opens the
        breaker, for twice the pause.
        """
        if self._is_on_trial:
            self._is_on_trial = False
            self._open_until = None
            self._num_failures = MAX_FAILURES - 1
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def fail(self) -> None:
        """Note that the server failed or could not be reached."""
        self._num_failures += 1
        if self._is_on_trial:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if self._is_on_trial or (self._num_failures >= MAX_FAILURES and not self.is_open):
            self._open_until = self._clock() + self._pause_s
        self._is_on_trial = False

    def abandon(self) -> None:
        """Note that a request ended and told nothing of the server.

        Its client left, or the time was over before the server answered.
        """
        self._is_on_trial = False
