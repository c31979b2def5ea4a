"""What requests hold is bounded, and the bounds are read from the configuration."""

from typing import Any

import pytest

from charonia.errors import ConfigError, QueueFullError
from charonia.serving.requests.quota import Quota


def parameters(**values: str) -> dict[str, Any]:
    return {name: {"string_value": value} for name, value in values.items()}


def test_what_was_given_back_can_be_taken_again() -> None:
    quota = Quota(2, 10)
    quota.take(4)
    quota.take(6)
    with pytest.raises(QueueFullError, match="2 requests"):
        quota.take(0)
    quota.give_back(4)
    with pytest.raises(QueueFullError, match="10 bytes"):
        quota.take(5)
    quota.take(4)
    assert quota.held == (2, 10)


def test_one_request_may_be_as_large_as_it_likes_when_it_is_alone() -> None:
    quota = Quota(2, 10)
    quota.take(11)
    with pytest.raises(QueueFullError):
        quota.take(0)


def test_the_configuration_names_both_bounds() -> None:
    values = parameters(max_queue_size="1", max_queue_bytes="5", other="x")
    counts: list[int] = []
    quota = Quota.configured(values, counts.append)
    quota.take(3)
    with pytest.raises(QueueFullError, match="Maximum queue size of 1 requests"):
        quota.take(1)
    quota.give_back(3)
    assert counts == [1, 0]


@pytest.mark.parametrize("value", ["", "0", "-1", "1e3", "²", "x" * 1000, "9" * 19])
def test_a_wrong_bound_is_named(value: str) -> None:
    values = parameters(max_queue_size="1", max_queue_bytes=value)
    with pytest.raises(ConfigError, match="max_queue_bytes must be a number") as caught:
        Quota.configured(values, lambda count: None)
    assert len(str(caught.value)) < 200
