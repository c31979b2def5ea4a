"""Fairness between tenants: the difference of their service while both had requests waiting.

Owns the measure of fairness of Sheng et al. 2024 (arXiv 2401.00588, section 3). The service of a
tenant is the tokens of its prompts plus twice its generated tokens, divided by its weight. While
two tenants both have requests waiting, their difference is that of the service that each got in
that time. Theorem 4.4 bounds the greatest difference over all pairs and times.
"""

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

INPUT_COST = 1.0
OUTPUT_COST = 2.0
MAX_TENANTS = 64
"""Most tenants that are compared, the first ones, because of the number of pairs."""


class ServiceBySteps:
    """Notes what belongs to a step once that step has ended, and then compares tenants.

    A step is planned, and the requests that start with it are known, before the outputs of the step
    before it are delivered. Requests that come meanwhile may start with it. Noting this at once
    would mix steps.

    Args:
        difference: the service, which only this notes.
    """

    def __init__(self, difference: "ServiceDifference") -> None:
        self._difference = difference
        self._notes: deque[tuple[int, Callable[[], None]]] = deque()
        self._num_looked_at = 0

    def note_with(self, step: int, note: Callable[[], None]) -> None:
        """Note something with a step. Steps count from 1 and come in order."""
        self._notes.append((step, note))

    def end(self, num_ended: int) -> None:
        """Note that so many steps have ended; their outputs are noted next."""
        while self._notes and self._notes[0][0] <= num_ended:
            _, note = self._notes.popleft()
            note()

    def look(self, num_ended: int) -> None:
        """Compare, after the outputs of so many steps were noted, and nothing of others."""
        if num_ended > self._num_looked_at:
            self._num_looked_at = num_ended
            self._difference.look()


class ServiceDifference:
    """The greatest difference in service.

    Args:
        weight_of: of a tenant.

    Attributes:
        service: of each tenant, over its weight.
    """

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._places: dict[str, int] = {}
        self._num_waiting: defaultdict[str, int] = defaultdict(int)
        self._backlogged = np.zeros(MAX_TENANTS, dtype=bool)
        self._service = [0.0] * MAX_TENANTS  # Python's own floats: they change often
        shape = (MAX_TENANTS, MAX_TENANTS)
        # For each pair, the extremes of the difference while both have been waiting.
        self._lowest, self._highest = np.zeros(shape), np.zeros(shape)
        self._both = np.zeros(shape, dtype=bool)
        self._greatest = np.zeros(shape)

    @property
    def greatest(self) -> float:
        """The greatest difference, in tokens of weight 1; 0 if no two waited together."""
        return float(self._greatest.max())

    @property
    def service(self) -> dict[str, float]:
        """The service of each tenant, over its weight."""
        return {tenant: self._service[place] for tenant, place in self._places.items()}

    @property
    def lightest(self) -> float:
        """The smallest weight of all tenants so far."""
        return min(map(self._weight_of, self._places), default=1.0)

    def note_arrival(self, tenant: str) -> None:
        """Note that a request of a tenant waits."""
        self._num_waiting[tenant] += 1
        self._show(tenant)

    def note_start(self, tenant: str) -> None:
        """Note that a request of a tenant waits no longer."""
        self._num_waiting[tenant] -= 1
        self._show(tenant)

    def note_input(self, tenant: str, num_tokens: int) -> None:
        """Note that prompt tokens of a tenant were computed."""
        self._serve(tenant, INPUT_COST * num_tokens)

    def note_output(self, tenant: str, num_tokens: int) -> None:
        """Note that tokens of a tenant were generated."""
        self._serve(tenant, OUTPUT_COST * num_tokens)

    def look(self) -> None:
        """Compare all pairs. To be called once per step, after the step was noted."""
        num = len(self._places)
        if num < 2:
            return
        part = slice(0, num)
        backlogged, service = self._backlogged[part], np.array(self._service[part])
        both = backlogged[:, None] & backlogged
        difference = service[:, None] - service
        begin = both & ~self._both[part, part]
        lowest, highest = self._lowest[part, part], self._highest[part, part]
        lowest[begin] = difference[begin]
        highest[begin] = difference[begin]
        np.minimum(lowest, difference, out=lowest, where=both)
        np.maximum(highest, difference, out=highest, where=both)
        greatest = self._greatest[part, part]
        np.maximum(greatest, highest - lowest, out=greatest, where=both)
        self._both[part, part] = both

    def bound(self, longest_input: int, pool_tokens: int, lightest: float = 1.0) -> float:
        """The bound of that theorem under virtual token counters, with weights."""
        return 2 * max(INPUT_COST * longest_input, OUTPUT_COST * pool_tokens) / lightest

    def _place(self, tenant: str) -> int | None:
        place = self._places.get(tenant)
        if place is None and len(self._places) < MAX_TENANTS:
            place = self._places[tenant] = len(self._places)
        return place

    def _show(self, tenant: str) -> None:
        place = self._place(tenant)
        if place is not None:
            self._backlogged[place] = self._num_waiting[tenant] > 0

    def _serve(self, tenant: str, cost: float) -> None:
        place = self._places.get(tenant)
        if place is not None:
            self._service[place] += cost / self._weight_of(tenant)
