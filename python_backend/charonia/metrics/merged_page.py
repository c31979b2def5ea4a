"""The metrics page: tritonserver's own, followed by what only the schedulers know.

Owns what is on the page, and the timeouts for tritonserver and the schedulers. Must not know how it
is served, nor how a server runs.

    scheduler      asked first: it updates its metrics at Triton, and returns what is not there
    tritonserver   read then, so that the page has everything counted before the request for it
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
from prometheus_client import Metric as Family
from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from charonia.local_calls import http_client
from charonia.metrics.metric_table import BY_NAME, labels_of
from charonia.metrics.page_server import NoPageError
from charonia.metrics.page_socket import METRICS_SOCKET, Sample, ask_schedulers

SCHEDULERS_S = 1.0
"""Timeout for the schedulers' answers, all together. The page does without late ones."""
TRITON_S = 0.8
"""Timeout for tritonserver's page, which also gets what the schedulers leave of theirs.

Both together are less than the scrape_timeout of docker/prometheus/prometheus.yml. So the page
comes and says who is down; without it the whole server would seem to be."""

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
        self._client = http_client()

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
            triton = self._get(url, triton_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoPageError(f"tritonserver's metrics cannot be read: {error}") from None
        places = [(path.parts[-3], path.parts[-2]) for path in paths]
        return triton + generate_latest(_Answers(dict(zip(places, answers, strict=True))))

    def _get(self, url: str, timeout_s: float) -> bytes:
        """Read a page. httpx limits each read only, so that the parts' time is checked here."""
        deadline = time.monotonic() + timeout_s
        page = bytearray()
        with self._client.stream("GET", url, timeout=timeout_s) as reply:
            reply.raise_for_status()
            for part in reply.iter_bytes():
                page += part
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"it is not complete after {timeout_s:.1f} s")
        return bytes(page)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class _Answers(Collector):
    """The families of the schedulers' answers, each once; None is a missing answer."""

    def __init__(self, answers: Mapping[Place, list[Sample] | None]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Family]:
        """Yield the families that have samples."""
        families = {name: Family(name, one.help, one.kind) for name, one in BY_NAME.items()}
        for (model, version), answer in self._answers.items():
            is_up = Sample("charonia_scheduler_up", "", {}, float(answer is not None))
            for sample in (is_up, *filter(_is_expected, answer or ())):
                labels = labels_of(sample.metric, {"model": model, "version": version})
                name = sample.metric + sample.suffix
                families[sample.metric].add_sample(name, labels | sample.labels, sample.value)
        yield from (family for family in families.values() if family.samples)


def _is_expected(sample: Sample) -> bool:
    """Return whether a scheduler says such a thing: a faulty one must not spoil the page."""
    metric, labels = BY_NAME.get(sample.metric), sample.labels
    if metric is None or metric.place != "page":
        return False
    if metric.kind != "histogram":
        return bool(metric.info) and not sample.suffix and labels.keys() == {*metric.info}
    if sample.suffix == "_bucket":
        return labels.keys() == {"le"} and labels["le"] in metric.bounds
    return sample.suffix in ("_count", "_sum") and not labels
