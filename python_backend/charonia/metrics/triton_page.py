"""Exports the engine service's metrics to Triton's own metrics page.

Owns the families at Triton. A thread updates them twice a second, and again whenever
the page is about to be read (`page_socket`). Must not know what the numbers mean.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from charonia.metrics.metric_table import BY_NAME, METRICS, VLLM_METRICS, Metric, labels_of
from charonia.metrics.metrics import Metrics, Series
from charonia.metrics.other_names import Gauge, gauges_of_triton, gauges_of_vllm, infos_of_vllm
from charonia.metrics.page_socket import HistogramState

INTERVAL_S = 0.5


class MetricsExporter:
    """Keeps Triton's metrics equal to `metrics`.

    A thread must not call Triton while it loads the model. So the families and first values
    are made here, in `initialize`, and the thread starts later, with `start`.

    Args:
        labels: of every series: `model` and `version`. block_size: tokens per KV block.
        with_vllm_names: also report under vLLM's names. log: takes one line.
    """

    def __init__(
        self,
        pb_utils: Any,
        metrics: Metrics,
        *,
        labels: Mapping[str, str],
        block_size: Callable[[], int],
        with_vllm_names: bool,
        log: Callable[[str], None],
    ) -> None:
        self._metrics = metrics
        self._block_size = block_size
        self._log = log
        self._families = Families(pb_utils, labels)
        shown = (*METRICS, *VLLM_METRICS) if with_vllm_names else METRICS
        self._has_vllm_names = with_vllm_names
        self._copied_counters = [m for m in shown if m.kind == "counter" and m.shows]
        self._copied_gauges = [m for m in shown if m.kind == "gauge" and m.shows]
        histograms = [metric for metric in shown if metric.kind == "histogram"]
        self._request_histograms = [m for m in histograms if m.place == "triton"]
        self._step_histograms = [m for m in histograms if m.place == "page"]
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
            self._families.set_to_zero()
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

    def step_histograms(self) -> dict[str, HistogramState]:
        """Return the histograms per token or step, which are not on Triton's page, by name."""
        found = {}
        for metric in self._step_histograms:
            histogram = self._metrics.histograms[metric.source]
            state = HistogramState(metric.buckets, histogram.cumulative(), histogram.sum)
            found[metric.name] = state
        return found

    def infos(self) -> dict[str, dict[str, str]]:
        """Return the labels of metrics that say something by their labels, by name."""
        if not self._has_vllm_names:
            return {}
        return infos_of_vllm(dict(self._metrics.gauges), self._block_size())

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.update()

    def _export(self) -> None:
        metrics, families = self._metrics, self._families
        gauges = dict(metrics.gauges)  # before the counters: an idle scheduler has counted all
        counters = list(metrics.counters.items())
        for (name, label), value in counters:
            families.count_up_to(BY_NAME[name], value, label)
        for metric in self._copied_counters:
            of_labels = {label: value for (name, label), value in counters if name == metric.source}
            if metric.label:
                for label in metric.values:
                    families.count_up_to(metric, of_labels.get(label, 0.0), label)
            else:
                families.count_up_to(metric, sum(of_labels.values()))
        for (name, label), value in gauges.items():
            families.set(BY_NAME[name], value, label)
        for metric in self._copied_gauges:
            families.set(metric, gauges.get((metric.source, ""), 0.0))
        for metric, label, value in self._gauges_of_others(gauges):
            families.set(metric, value, label)
        observations = metrics.drain()
        for metric in self._request_histograms:
            families.observe(metric, observations.get(metric.source, ()))

    def _gauges_of_others(self, gauges: Mapping[Series, float]) -> Iterator[Gauge]:
        yield from gauges_of_triton(gauges, self._block_size())
        if self._has_vllm_names:
            yield from gauges_of_vllm(gauges)


class Families:
    """Triton's metric families and series. They are made on first use and kept for ever.

    Args:
        labels: of every series.
    """

    def __init__(self, pb_utils: Any, labels: Mapping[str, str]) -> None:
        self._family_class = pb_utils.MetricFamily
        self._labels = dict(labels)
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, str], Any] = {}
        self._gauges: list[Any] = []
        self._values: dict[tuple[str, str], float] = {}

    def count_up_to(self, metric: Metric, total: float, label: str = "") -> None:
        """Raise a counter to `total`, which never falls."""
        series = self._find(metric, label)
        key = (metric.name, label)
        delta = total - self._values.get(key, 0.0)
        if delta > 0:
            series.increment(delta)
            self._values[key] = total

    def set(self, metric: Metric, value: float, label: str = "") -> None:
        """Set a gauge, changed or not: an old scheduler that ends may have set it to 0."""
        self._find(metric, label).set(value)

    def observe(self, metric: Metric, values: Iterable[float]) -> None:
        """Add values to a histogram."""
        series = self._find(metric, "")
        for value in values:
            series.observe(value)

    def set_to_zero(self) -> None:
        """Set every gauge to 0."""
        for series in self._gauges:
            series.set(0.0)

    def _find(self, metric: Metric, label: str) -> Any:
        key = (metric.name, label)
        if key not in self._series:
            labels = labels_of(metric, self._labels) | ({metric.label: label} if label else {})
            options = {"buckets": list(metric.buckets)} if metric.buckets else {}
            series = _immortal(self._family(metric).Metric(labels=labels, **options))
            self._series[key] = series
            if metric.kind == "gauge":
                self._gauges.append(series)
        return self._series[key]

    def _family(self, metric: Metric) -> Any:
        if metric.name not in self._families:
            self._families[metric.name] = _immortal(
                self._family_class(
                    name=metric.name,
                    description=metric.help,
                    kind=getattr(self._family_class, metric.kind.upper()),
                )
            )
        return self._families[metric.name]


def _immortal(triton_object: Any) -> Any:
    """Return the same object without a destructor call, not even at the end of the process.

    The destructor would give the object back to Triton, or crash after `finalize` has returned.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(triton_object))
    return triton_object
