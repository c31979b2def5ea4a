"""Confidence intervals of medians.

A pure function; must not know what was measured, or its goal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""Least probability that an interval contains the median."""


@dataclass(frozen=True)
class Interval:
    """Confidence interval of a median; it contains it with probability `confidence`."""

    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"


def median_interval(values: Sequence[float]) -> Interval | None:
    """The interval that leaves out as many values at each end as `CONFIDENCE` allows.

    No distribution is assumed. Each of n independent values lies below the median with probability
    1/2, so the k-th lowest value exceeds it as rarely as fewer than k of n coins show heads, and
    likewise at the upper end (David, Nagaraja 2003, "Order Statistics", section 7.1).

    | values | left out at each end | confidence |
    | --- | --- | --- |
    | 6, 7, 8 | 0 | 96.9, 98.4, 99.2 % |
    | 9, 10, 11 | 1 | 96.1, 97.9, 98.8 % |
    | 12, 13, 14 | 2 | 96.1, 97.8, 98.7 % |

    Either end alone is wrong half as often: that the median is below the lower end of nine
    values has a probability of 2.0 %.

    Returns:
        None for fewer than six values: even their whole range has the median less often.
    """
    ordered = sorted(values)
    size = len(ordered)
    left_out, outside = -1, 0.0
    while True:
        further = outside + 2 * math.comb(size, left_out + 1) / 2**size
        if further > 1 - CONFIDENCE:
            break
        left_out, outside = left_out + 1, further
    if left_out < 0:
        return None
    return Interval(ordered[left_out], ordered[-1 - left_out], 1 - outside)
