"""Quantiles of more values than can be kept.

Owns the buckets: each is 1 % wider than the one before it, so a quantile is off by 0.5 % at most.
"""

from collections import defaultdict
from math import exp, inf, log

_WIDTH = log(1.01)


class Distribution:
    """Positive values with their counts, after DDSketch (Masson et al. 2019, arXiv 1908.10693)."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._last = (inf, 0)  # the last value and its bucket: the rows of a step share it
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times. A value that is not positive counts as nearly 0."""
        if value == self._last[0]:
            bucket = self._last[1]
        else:
            bucket = int(log(max(value, 1e-9)) // _WIDTH)
            self._last = (value, bucket)
        self._counts[bucket] += times
        self.count += times
        self.sum += value * times

    def merge(self, other: "Distribution") -> None:
        """Add the counts of another distribution."""
        for bucket, times in other._counts.items():
            self._counts[bucket] += times
        self.count += other.count
        self.sum += other.sum

    @property
    def mean(self) -> float | None:
        """The mean; None if it is empty."""
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value that a share of all values does not exceed; None if it is empty."""
        wanted = share * self.count
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return exp((bucket + 0.5) * _WIDTH)
        return None
