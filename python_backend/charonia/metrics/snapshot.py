"""A metrics page at one moment, and what happened between two of them.

Owns how a page becomes numbers, rates and quantiles. Must not know what the metrics mean.

Values of several models on one page are summed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from charonia.local_calls import http_client

Labels = frozenset[tuple[str, str]]


class NoMetricsError(ValueError):
    """A page is not in Prometheus' text format."""


@dataclass(frozen=True)
class Snapshot:
    """A page.

    Attributes:
        at: seconds, on any clock. series: values by sample name and labels.
    """

    at: float
    series: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def of(cls, page: str, at: float) -> "Snapshot":
        """Read a page.

        Raises:
            NoMetricsError: it is not in Prometheus' text format.
        """
        series: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        try:
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    series[sample.name][frozenset(sample.labels.items())] = sample.value
        except (ValueError, KeyError, IndexError) as error:
            raise NoMetricsError(f"the page is not in Prometheus' text format: {error}") from None
        return cls(at, dict(series))

    def total(self, name: str, **labels: str) -> float | None:
        """Sum the series with these labels; None if there is none."""
        return _total(self.series.get(name, {}), labels)

    def least(self, name: str) -> float | None:
        """The smallest value of a gauge; None if there is none."""
        return min(self.series.get(name, {}).values(), default=None)

    def most(self, name: str) -> float | None:
        """The greatest value of a gauge; None if there is none."""
        return max(self.series.get(name, {}).values(), default=None)

    def greatest(self, name: str, count: int) -> list[float] | None:
        """The greatest values of a gauge, the greatest first; None if there is none."""
        values = self.series.get(name)
        return None if values is None else sorted(values.values(), reverse=True)[:count]

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sum the series by a label that they have."""
        return _by(self.series.get(name, {}), label)


class Span:
    """Changes from one snapshot to a later one.

    A counter that has fallen began again, so all of its new value came in between.
    """

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self.after = after
        self.seconds = max(after.at - before.at, 1e-9)
        self._before = before

    def rise(self, name: str, **labels: str) -> float | None:
        """Return the rise of counters with these labels; None if there is none."""
        return _total(self._rises(name), labels)

    def rate(self, name: str, **labels: str) -> float | None:
        """The same per second."""
        found = self.rise(name, **labels)
        return None if found is None else found / self.seconds

    def rates_by(self, name: str, label: str) -> dict[str, float]:
        """Rates per second by a label."""
        return {key: value / self.seconds for key, value in _by(self._rises(name), label).items()}

    def share(self, part: str, whole: str) -> float | None:
        """The rise of a counter over that of another one; None without any."""
        rises = self.rise(part), self.rise(whole)
        return None if rises[0] is None or not rises[1] else rises[0] / rises[1]

    def quantile(self, name: str, share: float) -> float | None:
        """A quantile of a histogram's observations, as `histogram_quantile` of Prometheus.

        Within a bucket observations are taken as evenly spread. In the last bucket, which has no
        upper bound, the answer is its lower bound. None without observations.
        """
        buckets = sorted(
            (math.inf if bound == "+Inf" else float(bound), count)
            for bound, count in _by(self._rises(f"{name}_bucket"), "le").items()
        )
        if not buckets or not buckets[-1][1]:
            return None
        rank = share * buckets[-1][1]
        low, num_below = 0.0, 0.0
        for bound, count in buckets:
            if count >= rank:
                if bound == math.inf:
                    return low
                return low + (bound - low) * (rank - num_below) / max(count - num_below, 1e-9)
            low, num_below = bound, count
        return low

    def _rises(self, name: str) -> dict[Labels, float]:
        """Return the rise of each series.

        A new series began at 0, but not where the earlier page had nothing of that name from the
        model: it may have had no time to say it.
        """
        before = self._before.series.get(name, {})
        models = {dict(own).get("model") for own in before}
        return {
            own: value - (earlier if (earlier := before.get(own, 0.0)) <= value else 0.0)
            for own, value in self.after.series.get(name, {}).items()
            if dict(own).get("model") in models
        }


def read_metrics(url: str) -> dict[str, float] | None:
    """Return the totals of a server's page by name; None if it cannot be reached.

    Of gauges that say whether something is up it is the smallest, not the total.

    Args:
        url: of the page.
    """
    try:
        with http_client() as client:
            page = client.get(url).text
    except httpx.HTTPError:
        return None
    try:
        series = Snapshot.of(page, 0.0).series
    except NoMetricsError:
        return {}
    return {
        name: (min if name.endswith("_up") else sum)(values.values())
        for name, values in series.items()
    }


def _total(series: Mapping[Labels, float], labels: Mapping[str, str]) -> float | None:
    found = [value for own, value in series.items() if labels.items() <= set(own)]
    return sum(found) if found else None


def _by(series: Mapping[Labels, float], label: str) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for own, value in series.items():
        key = dict(own).get(label)
        if key is not None:
            found[key] += value
    return dict(found)
