"""Carries the engine service's metrics to Triton's own metrics page.

Owns the families at Triton, twice a second brought up to date in a thread of its own. Must not know
what the numbers mean.

One update is a round trip of 15 to 43 µs and a Triton histogram takes one value at a time. So
what is observed per request goes into Triton histograms, and what is observed per token or step
is kept in this process and exported as counters `…_bucket`, `…_sum` and `…_count`, which
Prometheus reads as the same thing.

Nothing that was made at Triton is ever given back. Families of one name are one to Prometheus,
whichever process made them, but each counts its own references: the last one frees a metric that
the family of another process still writes to (2.51.0, and unmended in 2026:
https://github.com/triton-inference-server/server/issues/8663). Triton loads a model again before it
lets the old one go, so the old scheduler's end corrupted the server's heap under the new one. As
nothing is freed, the counters and histograms of one scheduler go on in the next.
"""

import ctypes
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from charonia.engine.metrics import LABELS, Metrics, Series

INTERVAL_S = 0.5
SECONDS = Metrics.LONG_BOUNDS
TOKENS = tuple(float(2**power) for power in range(18))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)

REQUEST_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "charonia_queue_seconds": ("charonia_queue_seconds", SECONDS),
    "charonia_time_to_first_token_seconds": ("charonia_time_to_first_token_seconds", SECONDS),
    "charonia_request_seconds": ("charonia_request_seconds", SECONDS),
    "charonia_recovery_seconds": ("charonia_recovery_seconds", SECONDS),
}
"""Metric: the observation that it shows, and its buckets."""

VLLM_REQUEST_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("charonia_time_to_first_token_seconds", SECONDS),
    "vllm:e2e_request_latency_seconds": ("charonia_request_seconds", SECONDS),
    "vllm:request_prompt_tokens": ("request_prompt_tokens", TOKENS),
    "vllm:request_generation_tokens": ("request_generation_tokens", TOKENS),
}
VLLM_COUNTERS = {
    "vllm:prompt_tokens_total": "charonia_prompt_tokens_total",
    "vllm:generation_tokens_total": "charonia_generation_tokens_total",
}
"""Metric: the counter whose series it sums."""
VLLM_STEP_HISTOGRAMS = {"vllm:time_per_output_token_seconds": "charonia_inter_token_seconds"}
VLLM_PARAMS_N = "vllm:request_params_n"
BLOCK_METRIC = "nv_trt_llm_kv_cache_block_metrics"


class MetricsExporter:
    """Keeps Triton's metrics equal to `metrics`.

    Triton must not be called from a thread while it loads the model: the families and first values
    are made here, in `initialize`; the thread starts later, with `start`.

    Args:
        labels: of every series. block_size: tokens per KV block.
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
        self._with_vllm_names = with_vllm_names
        self._log = log
        self._families = Families(pb_utils, labels)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-metrics", daemon=True)
        self._export()

    def start(self) -> None:
        """Start the thread, once the model is loaded."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Gauges are 0 from now on: they were of this scheduler."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._families.set_to_zero()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self._export()
            except Exception:
                self._log(f"metrics could not be exported: {traceback.format_exc()}")

    def _export(self) -> None:
        metrics, families = self._metrics, self._families
        for (name, label), value in list(metrics.counters.items()):
            families.count_up_to(name, value, _labels_of((name, label)))
        for (name, label), value in list(metrics.gauges.items()):
            families.set(name, value, _labels_of((name, label)))
        for name in metrics.histograms:
            self._export_histogram(name, name)
        observations = metrics.drain()
        self._observe(REQUEST_HISTOGRAMS, observations)
        self._export_blocks()
        if self._with_vllm_names:
            self._export_vllm(observations)

    def _export_histogram(self, name: str, source: str) -> None:
        histogram = self._metrics.histograms[source]
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        totals = histogram.cumulative()
        for bound, total in zip(bounds, totals, strict=True):
            self._families.count_up_to(f"{name}_bucket", total, {"le": bound})
        self._families.count_up_to(f"{name}_count", totals[-1])
        self._families.count_up_to(f"{name}_sum", histogram.sum)

    def _observe(
        self,
        histograms: Mapping[str, tuple[str, tuple[float, ...]]],
        observations: Mapping[str, list[float]],
    ) -> None:
        for name, (source, buckets) in histograms.items():
            self._families.observe(name, observations.get(source, ()), buckets)

    def _export_blocks(self) -> None:
        gauges = self._metrics.gauges
        total = gauges.get(("charonia_kv_blocks", "total"), 0.0)
        used = gauges.get(("charonia_kv_blocks", "used"), 0.0)
        values = {
            "max": total,
            "used": used,
            "free": total - used,  # what is only cached can be had at once
            "tokens_per": float(self._block_size()),
        }
        for kind, value in values.items():
            self._families.set(BLOCK_METRIC, value, {"kv_cache_block_type": kind})

    def _export_vllm(self, observations: Mapping[str, list[float]]) -> None:
        for name, source in VLLM_COUNTERS.items():
            counters = list(self._metrics.counters.items())
            total = sum(value for (other, _), value in counters if other == source)
            self._families.count_up_to(name, total)
        for name, source in VLLM_STEP_HISTOGRAMS.items():
            self._export_histogram(name, source)
        self._observe(VLLM_REQUEST_HISTOGRAMS, observations)
        num_requests = len(observations.get("request_prompt_tokens", ()))
        self._families.observe(VLLM_PARAMS_N, [1.0] * num_requests, COUNTS)


class Families:
    """Triton's metric families and series, made on first use; each is kept for ever.

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

    def count_up_to(self, name: str, total: float, labels: Mapping[str, str] | None = None) -> None:
        """Bring a counter to `total`, which never falls."""
        key, series = self._find(name, "COUNTER", labels)
        delta = total - self._values.get(key, 0.0)
        if delta > 0:
            series.increment(delta)
            self._values[key] = total

    def set(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Set a gauge, changed or not: a scheduler that ends sets it to 0 behind the next one."""
        _, series = self._find(name, "GAUGE", labels)
        series.set(value)

    def observe(self, name: str, values: Any, buckets: tuple[float, ...]) -> None:
        """Add values to a histogram."""
        _, series = self._find(name, "HISTOGRAM", None, buckets=list(buckets))
        for value in values:
            series.observe(value)

    def set_to_zero(self) -> None:
        """Set every gauge to 0."""
        for series in self._gauges:
            series.set(0.0)

    def _find(
        self, name: str, kind: str, labels: Mapping[str, str] | None, **options: Any
    ) -> tuple[tuple[str, str], Any]:
        labels = labels or {}
        key = (name, ",".join(labels.values()))
        if key not in self._series:
            if name not in self._families:
                self._families[name] = _immortal(
                    self._family_class(
                        name=name,
                        description=name.replace("_", " "),
                        kind=getattr(self._family_class, kind),
                    )
                )
            series = _immortal(
                self._families[name].Metric(labels=self._labels | dict(labels), **options)
            )
            self._series[key] = series
            if kind == "GAUGE":
                self._gauges.append(series)
        return key, self._series[key]


def _immortal(triton_object: Any) -> Any:
    """The same object, whose destructor never runs, not even at the end of the process.

    It would give the object back to Triton, or crash when `finalize` has returned.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(triton_object))
    return triton_object


def _labels_of(series: Series) -> dict[str, str]:
    name, value = series
    return {LABELS[name]: value} if value else {}
