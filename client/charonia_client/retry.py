"""Schedule of retries.

Owns the schedule: exponential back-off with jitter, within the call's total timeout, and not
before the time that the server names. Must not know what is retried; time and chance are arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass

from charonia_client.errors import CharoniaClientError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Number of attempts, and the waits in between.

    Only errors with `is_retryable` are retried, and only while nothing was received.

    Attributes:
        max_attempts: in all, at least 1; 1 never retries.
        initial_backoff_s: longest wait before the second attempt.
        multiplier: of the longest wait, for each further attempt, up to `max_backoff_s`.
        jitter: the random share of each wait, 0 to 1, so that many clients that
            failed together do not retry together.
    """

    max_attempts: int = 3
    initial_backoff_s: float = 0.1
    multiplier: float = 2.0
    max_backoff_s: float = 5.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, but is {self.max_attempts}")
        if self.initial_backoff_s < 0 or self.max_backoff_s < 0:
            raise ValueError("initial_backoff_s and max_backoff_s must not be negative")
        if self.multiplier < 1:
            raise ValueError(f"multiplier must be at least 1, but is {self.multiplier}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be from 0 to 1, but is {self.jitter}")

    def backoff_s(self, num_failures: int, chance: float) -> float:
        """Return the wait after this many failures (from 1), in seconds.

        Args:
            chance: a random number, uniform in [0, 1).
        """
        longest = self.initial_backoff_s
        for _ in range(num_failures - 1):  # not a power, which would overflow
            longest *= self.multiplier
            if longest >= self.max_backoff_s:
                break
        return min(longest, self.max_backoff_s) * (1 - self.jitter * chance)


class Attempts:
    """The attempts of one call.

    Args:
        deadline: end of the call's total timeout, on `clock`; None for no limit.
        clock: monotonic seconds. chance: uniform in [0, 1).
    """

    def __init__(
        self,
        policy: RetryPolicy,
        deadline: float | None,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._deadline = deadline
        self._clock = clock
        self._chance = chance
        self._num_failures = 0

    def wait_after(self, error: CharoniaClientError) -> float | None:
        """Count a failure. Return the seconds until the next attempt; None if there is none."""
        self._num_failures += 1
        if not error.is_retryable or self._num_failures >= self._policy.max_attempts:
            return None
        wait = self._policy.backoff_s(self._num_failures, self._chance())
        wait += error.retry_after_s or 0.0
        if self._deadline is not None and self._clock() + wait >= self._deadline:
            return None
        return wait
