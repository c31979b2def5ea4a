"""Cancellations of requests, or samples, that have not reached the scheduler yet.

Owns the memory of these. Must not know live requests.

A prompt of `llm` may still wait in `tokenizer` when its request is cancelled in `scheduler`, which
does not know it yet. So a cancellation applies to every request of its id and tenant that arrived
at the server before it.
"""

import threading
import time
from collections.abc import Iterable

MAX_NAMES = 4096
"""Most cancellations that are remembered; the oldest is forgotten."""


class Cancellations:
    """The last cancellation of each request id of a tenant. For all threads."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str, int | None], float] = {}  # with a sample's index, or None
        self._lock = threading.Lock()

    def note(self, request_id: str, tenant: str, samples: Iterable[int] | None = None) -> None:
        """Note that all requests of this name that arrived before now are cancelled.

        Args:
            samples: only these samples of each; None is all.
        """
        now = time.monotonic()
        with self._lock:
            for index in [None] if samples is None else samples:
                self._times.pop((request_id, tenant, index), None)
                self._times[request_id, tenant, index] = now
            while len(self._times) > MAX_NAMES:
                del self._times[next(iter(self._times))]

    def cover(self, request_id: str, tenant: str, arrived_at: float) -> bool:
        """Return whether a request with this arrival, on the monotonic clock, is cancelled."""
        return self._cover(request_id, tenant, None, arrived_at)

    def samples(
        self, request_id: str, tenant: str, arrived_at: float, num_samples: int
    ) -> frozenset[int]:
        """The cancelled samples of such a request."""
        return frozenset(
            index
            for index in range(num_samples)
            if self._cover(request_id, tenant, index, arrived_at)
        )

    def _cover(self, request_id: str, tenant: str, index: int | None, arrived_at: float) -> bool:
        cancelled_at = self._times.get((request_id, tenant, index))
        return cancelled_at is not None and arrived_at < cancelled_at
