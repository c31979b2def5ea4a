"""The limit of the requests that a process holds, in number and in bytes.

Owns the sums, and the refusal of requests beyond the limit. Must not know what is counted.
"""

import threading
from collections.abc import Callable, Mapping

from charonia.errors import ConfigError, QueueFullError, shown


class QueueLimit:
    """Limits the requests that a process holds, and their bytes.

    Args:
        max_count: most requests. max_bytes: most bytes of all together; a single request may have
            more.
        on_change: called with the number of requests when it changes.
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
    ) -> "QueueLimit":
        """The limit by `max_queue_size` and `max_queue_bytes` of a model's config.pbtxt.

        Raises:
            ConfigError: one of them is not a number of at least 1.
        """
        max_count = _positive(parameters, "max_queue_size")
        return cls(max_count, _positive(parameters, "max_queue_bytes"), on_change)

    @property
    def held(self) -> tuple[int, int]:
        """Number of requests, and their bytes."""
        return self._count, self._bytes

    def take(self, num_bytes: int) -> None:
        """Count a new request; `give_back` must follow.

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
        """Stop counting a request of this many bytes."""
        with self._lock:
            self._count -= 1
            self._bytes -= num_bytes
            self._on_change(self._count)


def _positive(parameters: Mapping[str, Mapping[str, str]], name: str) -> int:
    text = parameters.get(name, {}).get("string_value", "")
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or not int(text):
        raise ConfigError(f"{name} must be a number of at least 1, but is {shown(text)}")
    return int(text)
