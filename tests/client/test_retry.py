"""The schedule of attempts, with time and chance as arguments."""

import pytest

from charonia_client import RetryPolicy
from charonia_client.errors import (
    InvalidRequest,
    RateLimited,
    ServerError,
    Timeout,
    Unavailable,
    from_text,
)
from charonia_client.retry import Attempts

POLICY = RetryPolicy(max_attempts=4, initial_backoff_s=1.0, multiplier=3.0, max_backoff_s=5.0)


def attempts(policy: RetryPolicy = POLICY, deadline: float | None = None) -> Attempts:
    return Attempts(policy, deadline, clock=lambda: 100.0, chance=lambda: 0.0)


def test_waits_grow_by_the_multiplier_up_to_the_longest() -> None:
    schedule = attempts()
    waits = [schedule.wait_after(Unavailable("busy")) for _ in range(4)]
    assert waits == [1.0, 3.0, 5.0, None]


def test_chance_shortens_a_wait_by_at_most_the_jitter() -> None:
    policy = RetryPolicy(initial_backoff_s=1.0, jitter=0.25)
    assert policy.backoff_s(1, 0.0) == 1.0
    assert policy.backoff_s(1, 0.5) == 0.875
    assert policy.backoff_s(1, 1.0) == 0.75


def test_a_server_that_says_when_is_not_asked_before() -> None:
    error = from_text("too fast; retry after 7.500 s [charonia:rate_limited]")
    assert isinstance(error, RateLimited)
    assert error.retry_after_s == 7.5
    assert attempts().wait_after(error) == 8.5
    assert attempts(deadline=108.0).wait_after(error) is None


def test_a_very_late_failure_does_not_overflow() -> None:
    assert RetryPolicy(jitter=0).backoff_s(100_000, 0.5) == 5.0


@pytest.mark.parametrize("error", [InvalidRequest("x"), ServerError("x"), Timeout("x")])
def test_what_cannot_succeed_later_is_not_tried_again(error: Exception) -> None:
    assert isinstance(error, InvalidRequest | ServerError | Timeout)
    assert attempts().wait_after(error) is None


def test_one_attempt_means_no_second() -> None:
    assert attempts(RetryPolicy(max_attempts=1)).wait_after(Unavailable("busy")) is None


def test_no_attempt_begins_after_the_total_timeout() -> None:
    assert attempts(deadline=101.5).wait_after(Unavailable("busy")) == 1.0
    assert attempts(deadline=101.0).wait_after(Unavailable("busy")) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"initial_backoff_s": -1},
        {"max_backoff_s": -1},
        {"multiplier": 0.5},
        {"jitter": 1.5},
    ],
)
def test_a_policy_out_of_range_names_the_value(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
