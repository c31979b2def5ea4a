"""Which requests clients cancelled that had not come here yet.

Owns the memory of these. Must not know requests that are live.

A prompt of `llm` may wait in `tokenizer` when its request is cancelled in `scheduler`, which has
not heard of it. So a cancellation counts for every request of its name that came to the server
before.
"""

import threading
import time

MAX_NAMES = 4096
"""The oldest is forgotten."""


class Cancellations:
    """When each request id of a tenant was last cancelled. For all threads."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def note(self, request_id: str, tenant: str) -> None:
        """All requests of this name that came before now are cancelled."""
        with self._lock:
            self._times.pop((request_id, tenant), None)
            self._times[request_id, tenant] = time.monotonic()
            if len(self._times) > MAX_NAMES:
                del self._times[next(iter(self._times))]

    def cover(self, request_id: str, tenant: str, arrived_at: float) -> bool:
        """Whether a request that came then, on the monotonic clock, is cancelled."""
        cancelled_at = self._times.get((request_id, tenant))
        return cancelled_at is not None and arrived_at < cancelled_at
