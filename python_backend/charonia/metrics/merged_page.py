"""The metrics page: tritonserver's own, followed by what only the schedulers know.

Owns what is on the page, and how long it waits for whom. Must not know how it is served, nor how a
server runs.

    scheduler      asked first: it updates its metrics at Triton, and returns its histograms
    tritonserver   read then, so that the page has everything counted before the request for it
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from charonia.metrics.metric_table import BY_NAME, SCHEDULER_UP, Metric, labels_of
from charonia.metrics.page_server import NoPageError
from charonia.metrics.page_socket import METRICS_SOCKET, SchedulerMetrics, ask_schedulers

SCHEDULERS_S = 1.0
"""Timeout for the schedulers' answers, all together. The page does without late ones."""
TRITON_S = 0.8
"""Timeout for tritonserver's page, which also gets what the schedulers leave of theirs.

Both together are less than the scrape_timeout of docker/prometheus/prometheus.yml. So the page
comes and says who is down; without it the whole server would seem to be."""
LABELS = ("model", "version")

Place = tuple[str, str]
"""A model and its version."""


class MergedPage:
    """The metrics of one server.

    Args:
        repository: its models' folders, which contain the schedulers' sockets.
        triton_url: returns the URL of tritonserver's own page; None while it does not run.
    """

    def __init__(self, repository: Path, triton_url: Callable[[], str | None]) -> None:
        self._repository = repository
        self._triton_url = triton_url
        # tritonserver would wait at its end for connections that are kept alive.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(limits=limits, trust_env=False)

    def read(self) -> bytes:
        """Return the page in Prometheus' text format 0.0.4. For one thread at a time.

        Raises:
            NoPageError: tritonserver has no page.
        """
        url = self._triton_url()
        if url is None:
            raise NoPageError("tritonserver does not run")
        paths = sorted(self._repository.glob(f"*/*/{METRICS_SOCKET}"))
        deadline = time.monotonic() + SCHEDULERS_S
        answers = ask_schedulers(paths, SCHEDULERS_S)
        triton_s = TRITON_S + max(deadline - time.monotonic(), 0.0)
        try:
            triton = self._client.get(url, timeout=triton_s).raise_for_status().content
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoPageError(f"tritonserver's metrics cannot be read: {error}") from None
        places = [(path.parts[-3], path.parts[-2]) for path in paths]
        return triton + exposition(dict(zip(places, answers, strict=True)))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def exposition(answers: Mapping[Place, SchedulerMetrics | None]) -> bytes:
    """Write the schedulers' answers in Prometheus' text format; None is a missing answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Answers(answers))
    return generate_latest(registry)


class _Answers(Collector):
    """The families of the answers, each once, with the series of all schedulers."""

    def __init__(self, answers: Mapping[Place, SchedulerMetrics | None]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Family]:
        """Yield the families that have series."""
        if not self._answers:
            return
        is_up = GaugeMetricFamily(SCHEDULER_UP.name, SCHEDULER_UP.help, labels=LABELS)
        for place, answer in self._answers.items():
            is_up.add_metric(place, float(answer is not None))
        yield is_up
        there = {place: answer for place, answer in self._answers.items() if answer is not None}
        for metric in BY_NAME.values():
            family = _info(metric, there) if metric.info else _histogram(metric, there)
            if family.samples:
                yield family


def _histogram(metric: Metric, answers: Mapping[Place, SchedulerMetrics]) -> Family:
    """The family of a histogram, with a series for each scheduler that has it."""
    family = HistogramMetricFamily(metric.name, metric.help, labels=tuple(_labels(metric)))
    for place, answer in answers.items():
        if (state := answer.histograms.get(metric.name)) is not None:
            bounds = [*(f"{bound:g}" for bound in state.bounds), "+Inf"]
            buckets = list(zip(bounds, state.counts, strict=True))
            family.add_metric(list(_labels(metric, place).values()), buckets, state.sum)
    return family


def _info(metric: Metric, answers: Mapping[Place, SchedulerMetrics]) -> Family:
    """The family of a metric that is always 1, with a series for each scheduler that has it."""
    family = GaugeMetricFamily(metric.name, metric.help, labels=(*_labels(metric), *metric.info))
    for place, answer in answers.items():
        if (found := answer.infos.get(metric.name)) is not None:
            own = (found[label] for label in metric.info)
            family.add_metric((*_labels(metric, place).values(), *own), 1.0)
    return family


def _labels(metric: Metric, place: Place = ("", "")) -> dict[str, str]:
    """The labels of a scheduler's series; their names are the same for all."""
    return labels_of(metric, dict(zip(LABELS, place, strict=True)))
