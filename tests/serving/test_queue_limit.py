"""What requests hold is bounded, and the bounds are read from the configuration."""

from typing import Any

import pytest

from charonia.errors import ConfigError, QueueFullError
from charonia.serving.requests.queue_limit import QueueLimit


def parameters(**values: str) -> dict[str, Any]:
    return {name: {"string_value": value} for name, value in values.items()}


def test_what_was_given_back_can_be_taken_again() -> None:
    queue_limit = QueueLimit(2, 10)
    queue_limit.take(4)
    queue_limit.take(6)
    with pytest.raises(QueueFullError, match="2 requests"):
        queue_limit.take(0)
    queue_limit.give_back(4)
    with pytest.raises(QueueFullError, match="10 bytes"):
        queue_limit.take(5)
    queue_limit.take(4)
    assert queue_limit.held == (2, 10)


def test_one_request_may_be_as_large_as_it_likes_when_it_is_alone() -> None:
    queue_limit = QueueLimit(2, 10)
    queue_limit.take(11)
    with pytest.raises(QueueFullError):
        queue_limit.take(0)


def test_the_configuration_names_both_bounds() -> None:
    values = parameters(max_queue_size="1", max_queue_bytes="5", other="x")
    counts: list[int] = []
    queue_limit = QueueLimit.configured(values, counts.append)
    queue_limit.take(3)
    with pytest.raises(QueueFullError, match="Maximum queue size of 1 requests"):
        queue_limit.take(1)
    queue_limit.give_back(3)
    assert counts == [1, 0]


@pytest.mark.parametrize("value", ["", "0", "-1", "1e3", "²", "x" * 1000, "9" * 19])
def test_a_wrong_bound_is_named(value: str) -> None:
    values = parameters(max_queue_size="1", max_queue_bytes=value)
    with pytest.raises(ConfigError, match="max_queue_bytes must be a number") as caught:
        QueueLimit.configured(values, lambda count: None)
    assert len(str(caught.value)) < 200
