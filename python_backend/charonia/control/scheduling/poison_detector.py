"""Finds the poison request, the one that kills the engine, by running suspects one at a time.

Owns the suspicion. Knows nothing about rows, blocks or plans: the planner asks which request may
run.
"""

from collections.abc import Iterable

from charonia.control.state.request import Request

PROGRESS = 16
"""Tokens. If a request generated so many between two deaths of the engine, they are unrelated: a
request that kills the engine does so at the same position again."""


class PoisonDetector:
    """Requests in flight at two engine deaths in a row, without progress between them.

    They run one at a time until each has generated one more token. A request that kills the engine
    while it runs alone is guilty.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    @property
    def first(self) -> Request | None:
        """The suspect that may run now, and no other request may; None without suspects."""
        return self._requests[0] if self._requests else None

    def note_death(self, requests: Iterable[Request]) -> Request | None:
        """The engine died with these live requests, some of them in flight.

        Returns:
            The guilty request, if it is known.
        """
        stuck = []
        for request in requests:
            if _is_stuck(request):
                stuck.append(request)
            request.num_restarts += 1
            num_known = len(request.token_ids) if request.num_in_flight else None
            request.num_known_at_death = num_known
        if not self._requests:
            self._requests = stuck
        elif self._requests[0].num_in_flight:  # it ran alone
            return self._requests[0]
        return None

    def acquit(self, request: Request) -> None:
        """The suspect that runs alone has generated a token."""
        self._requests.remove(request)
        request.num_known_at_death = None

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if request in self._requests:
            self._requests.remove(request)


def _is_stuck(request: Request) -> bool:
    """Return whether the engine may have died of it twice, at the same position."""
    before = request.num_known_at_death
    if before is None or not request.num_in_flight or request.is_ended:
        return False
    return len(request.token_ids) - before < PROGRESS
