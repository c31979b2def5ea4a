"""What requests hold of this process: bounded in number and in bytes.

Owns the sum, and the refusal of what is over it. Must not know what is held.
"""

import threading
from collections.abc import Callable, Mapping

from charonia.errors import ConfigError, QueueFullError, shown


class Quota:
    """How many requests a process may hold, and how many bytes of theirs.

    Args:
        max_count: requests at most. max_bytes: of all together; a request by itself may have more.
        on_change: called with the number of requests when that changes.
    """

    def __init__(
        self,
        max_count: int,
        max_bytes: int,
        on_change: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._on_change = on_change
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._count = 0
        self._bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def configured(
        cls, parameters: Mapping[str, Mapping[str, str]], on_change: Callable[[int], None]
    ) -> "Quota":
        """By `max_queue_size` and `max_queue_bytes` of a model's config.pbtxt.

        Raises:
            ConfigError: one of them is no number of at least 1.
        """
        max_count = _positive(parameters, "max_queue_size")
        return cls(max_count, _positive(parameters, "max_queue_bytes"), on_change)

    @property
    def held(self) -> tuple[int, int]:
        """How many requests hold something, and how many bytes."""
        return self._count, self._bytes

    def take(self, num_bytes: int) -> None:
        """Count a request that comes; it must be given back.

        Raises:
            QueueFullError: there is no room for it now.
        """
        with self._lock:
            if self._count >= self._max_count:
                raise QueueFullError.of(f"{self._max_count} requests")
            if self._count and self._bytes + num_bytes > self._max_bytes:
                raise QueueFullError.of(f"{self._max_bytes} bytes")
            self._count += 1
            self._bytes += num_bytes
            self._on_change(self._count)

    def give_back(self, num_bytes: int) -> None:
        """The request has gone that took so many bytes."""
        with self._lock:
            self._count -= 1
            self._bytes -= num_bytes
            self._on_change(self._count)


def _positive(parameters: Mapping[str, Mapping[str, str]], name: str) -> int:
    text = parameters.get(name, {}).get("string_value", "")
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or not int(text):
        raise ConfigError(f"{name} must be a number of at least 1, but is {shown(text)}")
    return int(text)
