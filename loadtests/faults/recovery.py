"""Recovery of a stream after a fault, by the times at which its responses came.

Owns the arithmetic. Must not know servers or clocks: times are arguments, in seconds.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

Arrival = tuple[float, int]
"""Time of a response, in seconds, and its number of tokens."""

MARGIN = 16
"""Tokens that show that a stream goes on, once the server has said that it does. Fewer may have
been under way already, of the steps in flight."""


def resumed_at(arrivals: Iterable[Arrival], since: float, sure_from: float) -> float | None:
    """Return the time of the first token that the fault had delayed; None if it is not sure yet.

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
