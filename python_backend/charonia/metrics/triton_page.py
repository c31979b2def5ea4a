"""Exports the engine service's metrics to Triton's own metrics page.

Owns the families at Triton. A thread updates them once a second, and again whenever
the page is about to be read (`page_socket`), and what the page has beside Triton's. Must not know
what the numbers mean.

One update is a round trip of 15 to 43 µs, and a Triton histogram takes one value at a time. Two
threads that update one series at the same time crash tritonserver (2.51.0: 4 of 4 tries). So
observations per request go into Triton histograms. Observations per token or step stay in this
process, and the page asks for them.

Nothing that was created at Triton is ever given back. Families of one name are one to Prometheus,
whichever process made them, but each counts its own references. The last reference frees a metric
that the family of another process still writes to (2.51.0, and not fixed in 2026:
https://github.com/triton-inference-server/server/issues/8663). Triton loads a model again before it
lets the old one go, so the old scheduler's end corrupted the server's heap under the new one.
Because nothing is freed, the counters and histograms of one scheduler continue in the next.
"""

import ctypes
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from charonia.metrics.metric_table import BY_NAME, OLDEST, VLLM_METRICS, labels_of
from charonia.metrics.metrics import Histogram, Metrics, Series
from charonia.metrics.other_names import cache_config_of_vllm, gauges_of_others, shown_again
from charonia.metrics.page_socket import Sample

INTERVAL_S = 1.0
THREAD = "metrics"
"""Name of the thread in the kernel, as in `top -H`; at most 15 characters."""


class MetricsExporter:
    """Keeps Triton's metrics equal to `metrics`.

    A thread must not call Triton while it loads the model. So the families and first values
    are made here, in `initialize`, and the thread starts later, with `start`.

    Args:
        labels: of every series: `model` and `version`. block_size: tokens per KV block.
        oldest_s: returns the ages of this many of the oldest live requests, in seconds.
        with_vllm_names: also report under vLLM's names. log: takes one line.
    """

    def __init__(
        self,
        pb_utils: Any,
        metrics: Metrics,
        *,
        labels: Mapping[str, str],
        block_size: Callable[[], int],
        oldest_s: Callable[[int], Sequence[float]],
        with_vllm_names: bool,
        log: Callable[[str], None],
    ) -> None:
        self._metrics = metrics
        self._block_size = block_size
        self._oldest_s = oldest_s
        self._log = log
        self._series = TritonSeries(pb_utils, labels)
        self._hidden = {} if with_vllm_names else VLLM_METRICS
        self._histograms = {
            name: metric
            for name, metric in BY_NAME.items()
            if metric.kind == "histogram" and name not in self._hidden
        }
        self._lock = threading.Lock()  # one thread at a time at Triton, and none after the end
        self._is_open = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-metrics", daemon=True)
        self._export()

    def start(self) -> None:
        """Start the thread, once the model is loaded."""
        with self._lock:
            self._is_open = True
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and set the gauges to 0, because they described this scheduler."""
        self.update()
        with self._lock:
            self._is_open = False
            self._series.set_to_zero()
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def update(self) -> None:
        """Update Triton's page. Does nothing before `start` or after `close`."""
        with self._lock:
            if not self._is_open:
                return
            try:
                self._export()
            except Exception:
                self._log(f"error: metrics could not be exported: {traceback.format_exc()}")

    def read(self) -> list[Sample]:
        """Update Triton's page, and return what is not on it."""
        self.update()
        found = [
            sample
            for name, metric in self._histograms.items()
            if metric.place == "page"
            for sample in _samples(name, self._metrics.histograms[metric.shows or name])
        ]
        if not self._hidden:
            labels = cache_config_of_vllm(self._metrics.gauges, self._block_size())
            found.append(Sample("vllm:cache_config_info", "", labels, 1.0))
        return found

    def _run(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD, "ascii")
        while not self._stop.wait(INTERVAL_S):
            self.update()

    def _export(self) -> None:
        gauges = dict(self._metrics.gauges)  # before the counters: if idle, it has counted all
        counters = dict(self._metrics.counters)
        gauges |= self._ages()
        gauges |= shown_again("gauge", gauges) | gauges_of_others(gauges, self._block_size())
        counters |= shown_again("counter", counters)
        for series, total in counters.items():
            if series[0] not in self._hidden:
                self._series.count_up_to(series, total)
        for series, value in gauges.items():
            if series[0] not in self._hidden:
                self._series.set(series, value)
        observations = self._metrics.drain()
        for name, metric in self._histograms.items():
            if metric.place == "triton":
                self._series.observe(name, observations.get(metric.shows or name, ()))

    def _ages(self) -> dict[Series, float]:
        """The ages of the oldest requests, which grow while the scheduling thread does nothing."""
        found = [*self._oldest_s(len(OLDEST)), *(0.0 for _ in OLDEST)]
        return {
            ("charonia_oldest_request_seconds", place): age
            for place, age in zip(OLDEST, found, strict=False)
        }


class TritonSeries:
    """Triton's metric families and series. They are made on first use and kept for ever.

    Args:
        labels: of every series.
    """

    def __init__(self, pb_utils: Any, labels: Mapping[str, str]) -> None:
        self._family_class = pb_utils.MetricFamily
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._series: dict[Series, Any] = {}
        self._totals: dict[Series, float] = {}

    def count_up_to(self, series: Series, total: float) -> None:
        """Raise a counter to `total`, which never falls."""
        found = self._find(series)
        delta = total - self._totals.get(series, 0.0)
        if delta > 0:
            found.increment(delta)
            self._totals[series] = total

    def set(self, series: Series, value: float) -> None:
        """Set a gauge, changed or not: an old scheduler that ends may have set it to 0."""
        self._find(series).set(value)

    def observe(self, name: str, values: Iterable[float]) -> None:
        """Add values to a histogram."""
        found = self._find((name, ""))
        for value in values:
            found.observe(value)

    def set_to_zero(self) -> None:
        """Set every gauge to 0."""
        for (name, _), found in self._series.items():
            if BY_NAME[name].kind == "gauge":
                found.set(0.0)

    def _find(self, series: Series) -> Any:
        if series not in self._series:
            name, label = series
            metric = BY_NAME[name]
            if name not in self._families:
                kind = getattr(self._family_class, metric.kind.upper())
                self._families[name] = _immortal(
                    self._family_class(name=name, description=metric.help, kind=kind)
                )
            labels = labels_of(name, self._labels) | ({metric.label: label} if label else {})
            options = {"buckets": list(metric.buckets)} if metric.buckets else {}
            made = self._families[name].Metric(labels=labels, **options)
            self._series[series] = _immortal(made)
        return self._series[series]


def _samples(name: str, histogram: Histogram) -> list[Sample]:
    """Return a histogram as Prometheus has it: each bucket counts all up to its bound."""
    counts, total = list(accumulate(histogram.counts)), histogram.sum
    buckets = zip(BY_NAME[name].bounds, counts, strict=True)
    return [
        *(Sample(name, "_bucket", {"le": bound}, count) for bound, count in buckets),
        Sample(name, "_count", {}, counts[-1]),
        Sample(name, "_sum", {}, total),
    ]


def _immortal(triton_object: Any) -> Any:
    """Return the same object without a destructor call, not even at the end of the process.

    The destructor would give the object back to Triton, or crash after `finalize` has returned.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(triton_object))
    return triton_object
