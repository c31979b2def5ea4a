"""When a stream goes on after a fault, read from the times at which its responses came.

Owns the arithmetic. Must not know servers or clocks: times are arguments, in seconds.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

Arrival = tuple[float, int]
"""When a response came, and its tokens."""

MARGIN = 16
"""Tokens that show that a stream goes on, once the server has said that it does. Fewer may have
been under way already, of the steps in flight."""


def resumed_at(arrivals: Iterable[Arrival], since: float, sure_from: float) -> float | None:
    """When the first token came that the fault had delayed, or None if it is not sure yet.

    It is the one after the longest pause since the fault, up to the `MARGIN`th token that came when
    the engine was known to be back. Before that, any number of tokens may come that a client had
    not read yet.
    """
    times, num_tokens = [since], 0
    for came_at, count in arrivals:
        if came_at < since:
            continue
        times.append(came_at)
        if came_at >= sure_from:
            num_tokens += count
        if num_tokens >= MARGIN:
            return _end_of_longest_pause(times)
    return None


def _end_of_longest_pause(times: Sequence[float]) -> float:
    pauses = [after - before for before, after in pairwise(times)]
    return times[pauses.index(max(pauses)) + 1]
