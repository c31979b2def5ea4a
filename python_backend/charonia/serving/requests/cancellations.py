"""Which requests, and which samples, clients cancelled that had not come here yet.

Owns the memory of these. Must not know requests that are live.

A prompt of `llm` may wait in `tokenizer` when its request is cancelled in `scheduler`, which has
not heard of it. So a cancellation counts for every request of its name that came to the server
before.
"""

import threading
import time
from collections.abc import Iterable

MAX_NAMES = 4096
"""With a sample's index or without; the oldest is forgotten."""


class Cancellations:
    """When each request id of a tenant was last cancelled. For all threads."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str, int | None], float] = {}  # with a sample's index, or None
        self._lock = threading.Lock()

    def note(self, request_id: str, tenant: str, samples: Iterable[int] | None = None) -> None:
        """All requests of this name that came before now are cancelled.

        Args:
            samples: only these of each.
        """
        now = time.monotonic()
        with self._lock:
            for index in [None] if samples is None else samples:
                self._times.pop((request_id, tenant, index), None)
                self._times[request_id, tenant, index] = now
            while len(self._times) > MAX_NAMES:
                del self._times[next(iter(self._times))]

    def cover(self, request_id: str, tenant: str, arrived_at: float) -> bool:
        """Whether a request that came then, on the monotonic clock, is cancelled."""
        return self._cover(request_id, tenant, None, arrived_at)

    def samples(
        self, request_id: str, tenant: str, arrived_at: float, num_samples: int
    ) -> frozenset[int]:
        """Which of the samples of such a request are."""
        return frozenset(
            index
            for index in range(num_samples)
            if self._cover(request_id, tenant, index, arrived_at)
        )

    def _cover(self, request_id: str, tenant: str, index: int | None, arrived_at: float) -> bool:
        cancelled_at = self._times.get((request_id, tenant, index))
        return cancelled_at is not None and arrived_at < cancelled_at
