"""Which request the engine dies of, found by having those that may be guilty run one at a time.

Owns the suspicion. Must not know rows, blocks or plans: whoever plans asks who may run.
"""

from collections.abc import Iterable

from charonia.control.state.request import Request

PROGRESS = 16
"""Tokens. Two deaths of the engine between which a request has generated so many have nothing to do
with each other: what a request does to an engine it does again at the same place."""


class Suspects:
    """Requests in flight at two deaths in a row, between which they have not got on.

    They run one at a time until each has generated a token more. One that kills the engine alone
    is guilty.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    @property
    def first(self) -> Request | None:
        """The only one that may run while there are any; None where there are none."""
        return self._requests[0] if self._requests else None

    def note_death(self, requests: Iterable[Request]) -> Request | None:
        """The engine died with these live requests, some of them in flight.

        Returns:
            The guilty one, where that is known.
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
        """The one that runs alone has generated a token."""
        self._requests.remove(request)
        request.num_known_at_death = None

    def forget(self, request: Request) -> None:
        """It has gone."""
        if request in self._requests:
            self._requests.remove(request)


def _is_stuck(request: Request) -> bool:
    """Whether the engine died of it, maybe, at the same place as the last time."""
    before = request.num_known_at_death
    if before is None or not request.num_in_flight or request.is_ended:
        return False
    return len(request.token_ids) - before < PROGRESS
