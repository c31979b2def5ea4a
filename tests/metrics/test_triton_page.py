"""What the exporter hands to Triton; a real scrape is tested on the real server."""

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from charonia.metrics.merged_page import _is_expected
from charonia.metrics.metric_table import BY_NAME, METRICS, OLDEST
from charonia.metrics.metrics import Metrics
from charonia.metrics.page_socket import decode_samples
from charonia.metrics.triton_page import THREAD, MetricsExporter
from support.waiting import eventually

SHARED = ("model", "version", "model_name", "engine")
"""Labels that are not a series' own."""


class Series:
    """As `pb_utils.MetricFamily.Metric`."""

    def __init__(self, labels: dict[str, str], buckets: list[float] | None = None) -> None:
        self.labels = labels
        self.value = 0.0
        self.observed: list[float] = []
        self.num_updates = 0

    def increment(self, delta: float) -> None:
        assert delta > 0
        self.value += delta
        self.num_updates += 1

    def set(self, value: float) -> None:
        self.value = value
        self.num_updates += 1

    def observe(self, value: float) -> None:
        self.observed.append(value)


class Registry:
    """A `pb_utils` with metrics, and all series that were made."""

    def __init__(self) -> None:
        made: dict[tuple[str, tuple[str, ...]], Series] = {}
        self.made = made
        self.num_given_back = 0

        def give_back() -> None:
            self.num_given_back += 1

        class MetricFamily:
            COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

            def __init__(self, name: str, description: str, kind: str) -> None:
                assert description == BY_NAME[name].help
                assert kind == BY_NAME[name].kind
                self.name = name
                weakref.finalize(self, give_back).atexit = False

            def Metric(self, labels: dict[str, str], buckets: Any = None) -> Series:
                own = tuple(v for k, v in labels.items() if k not in SHARED)
                assert (self.name, own) not in made
                made[self.name, own] = Series(labels, buckets)
                weakref.finalize(made[self.name, own], give_back).atexit = False
                return made[self.name, own]

        self.MetricFamily = MetricFamily

    def value(self, name: str, *labels: str) -> float:
        return self.made[name, labels].value


@pytest.fixture(autouse=True)
def never_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter's own thread stays out of the tests."""
    monkeypatch.setattr("charonia.metrics.triton_page.INTERVAL_S", 3600.0)


def new_exporter(registry: Registry, metrics: Metrics, **options: Any) -> MetricsExporter:
    """An exporter that was not started; whatever it logs fails the test."""
    plain = {
        "labels": {},
        "block_size": lambda: 16,
        "oldest_s": lambda count: [],
        "with_vllm_names": False,
        "log": pytest.fail,
    }
    return MetricsExporter(registry, metrics, **(plain | options))


def make(metrics: Metrics, **options: Any) -> tuple[Registry, MetricsExporter]:
    """An exporter that was started, and where its families are."""
    registry = Registry()
    exporter = new_exporter(
        registry,
        metrics,
        labels={"model": "scheduler", "version": "1"},
        **options,
    )
    exporter.start()
    return registry, exporter


def test_what_is_shown_as_idle_has_counted_all_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on while its numbers are read: here a request is cancelled."""
    metrics = Metrics()
    metrics.gauges["charonia_requests_running", ""] = 1.0
    metrics.count("charonia_generation_tokens_total")
    registry = Registry()
    exporter = new_exporter(registry, metrics)
    increment = Series.increment

    def and_the_engine_goes_on(series: Series, delta: float) -> None:
        increment(series, delta)
        metrics.count("charonia_cancellations_total")
        metrics.gauges["charonia_requests_running", ""] = 0.0
        metrics.gauges["charonia_kv_blocks", "used"] = 0.0

    exporter.start()
    with monkeypatch.context() as patches:
        patches.setattr(Series, "increment", and_the_engine_goes_on)
        metrics.count("charonia_generation_tokens_total")
        exporter.update()
    shown = (
        registry.value("charonia_requests_running"),
        registry.value("charonia_cancellations_total"),
    )
    assert shown != (0.0, 0.0)
    exporter.update()
    assert registry.value("charonia_requests_running") == 0
    assert registry.value("charonia_cancellations_total") == 1


def test_counters_and_gauges_follow_and_only_changes_are_sent() -> None:
    metrics = Metrics()
    registry, exporter = make(metrics)
    assert registry.value("charonia_generation_tokens_total") == 0
    metrics.count("charonia_generation_tokens_total", 5)
    metrics.count("charonia_rejections_total", label="queue_full")
    metrics.gauges["charonia_kv_blocks", "used"] = 7.0
    exporter.update()
    exporter.update()
    metrics.count("charonia_generation_tokens_total", 2)
    exporter.update()
    assert registry.value("charonia_generation_tokens_total") == 7
    assert registry.made["charonia_generation_tokens_total", ()].num_updates == 2
    assert registry.value("charonia_rejections_total", "queue_full") == 1
    assert registry.value("charonia_kv_blocks", "used") == 7
    labels = registry.made["charonia_rejections_total", ("queue_full",)].labels
    assert labels == {"model": "scheduler", "version": "1", "reason": "queue_full"}


def test_every_counter_whose_labels_are_known_is_there_at_zero_from_the_start() -> None:
    registry, _ = make(Metrics())
    counters = {name: metric for name, metric in METRICS.items() if metric.kind == "counter"}
    assert {name for name, metric in counters.items() if not metric.values and metric.label} == {
        "charonia_drafted_at_position_total",
        "charonia_accepted_at_position_total",
    }
    for name, metric in counters.items():
        if metric.values or not metric.label:
            own = {labels for made, labels in registry.made if made == name}
            assert own == ({(value,) for value in metric.values} or {()}), name
            assert all(registry.value(name, *labels) == 0 for labels in own)


def test_a_gauge_is_set_again_and_again_because_an_older_scheduler_may_have_ended() -> None:
    metrics = Metrics()
    registry, exporter = make(metrics)
    metrics.gauges["charonia_engine_up", ""] = 1.0
    exporter.update()
    older = registry.made["charonia_engine_up", ()]
    older.value = 0.0
    exporter.update()
    assert older.value == 1


def test_at_the_end_gauges_are_zero_and_nothing_is_given_back_to_triton() -> None:
    metrics = Metrics()
    registry, exporter = make(metrics)
    metrics.count("charonia_generation_tokens_total", 5)
    metrics.gauges["charonia_engine_up", ""] = 1.0
    exporter.update()
    exporter.close()
    assert registry.value("charonia_engine_up") == 0
    assert registry.value("charonia_generation_tokens_total") == 5
    num_made = len(registry.made)
    registry.made.clear()
    del exporter
    gc.collect()
    assert num_made > 30
    assert registry.num_given_back == 0


def test_nothing_goes_to_triton_before_the_start_and_after_the_end() -> None:
    metrics = Metrics()
    registry = Registry()
    exporter = new_exporter(registry, metrics)
    name = "charonia_generation_tokens_total"
    metrics.count(name, 5)
    exporter.update()
    assert registry.value(name) == 0
    exporter.start()
    exporter.update()
    assert registry.value(name) == 5
    metrics.count(name, 2)
    exporter.close()
    assert registry.value(name) == 7, "the last word"
    metrics.count(name, 1)
    exporter.update()
    assert registry.value(name) == 7


def test_top_shows_its_thread_by_name() -> None:
    before = threads_called(THREAD)  # of other tests, which leave theirs open
    _, exporter = make(Metrics())
    eventually(lambda: threads_called(THREAD) - before)
    [mine] = threads_called(THREAD) - before
    exporter.close()
    # The kernel's thread ends a moment after Python's.
    eventually(lambda: mine not in threads_called(THREAD))


def threads_called(name: str) -> set[str]:
    """The ids of the threads of this process that the kernel calls so."""
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            if path.read_text("ascii").strip() == name:
                found.add(path.parent.name)
    return found


def test_a_failing_triton_is_logged() -> None:
    metrics, registry, log = Metrics(), Registry(), list[str]()
    exporter = new_exporter(registry, metrics, log=log.append)
    exporter.start()
    exporter.update()
    assert log == []
    del registry.made["charonia_draft_tokens_total", ()].value
    metrics.count("charonia_draft_tokens_total")
    exporter.update()
    assert len(log) == 1
    assert "metrics could not be exported" in log[0]


def test_what_is_observed_per_step_stays_here() -> None:
    metrics = Metrics()
    registry, exporter = make(metrics)
    metrics.histograms["charonia_step_seconds"].observe(0.003, 2)
    metrics.histograms["charonia_step_seconds"].observe(60.0)
    exporter.update()
    assert not [name for name, _ in registry.made if "step_seconds" in name]
    found = exporter.read()
    assert {name for name, *_ in found} == {
        "charonia_inter_token_seconds",
        "charonia_step_seconds",
        "charonia_plan_seconds",
    }
    of_steps = {
        (suffix, labels.get("le")): value
        for name, suffix, labels, value in found
        if name == "charonia_step_seconds"
    }
    assert [of_steps["_bucket", bound] for bound in ("0.0025", "0.005", "1", "+Inf")] == [
        0,
        2,
        2,
        3,
    ]
    assert of_steps["_count", None] == 3
    assert of_steps["_sum", None] == pytest.approx(60.006)


def test_what_is_observed_per_request_is_handed_on_once() -> None:
    metrics = Metrics()
    registry, exporter = make(metrics)
    metrics.observe_request("charonia_queue_seconds", 0.5)
    exporter.update()
    exporter.update()
    assert registry.made["charonia_queue_seconds", ()].observed == [0.5]


GAUGES = {
    ("charonia_kv_blocks", "total"): 12.0,
    ("charonia_kv_blocks", "used"): 4.0,
    ("charonia_kv_blocks", "aside"): 2.0,
    ("charonia_requests_running", ""): 3.0,
    ("charonia_requests_waiting", ""): 5.0,
    ("charonia_max_rows", ""): 8.0,
}


def test_the_ages_of_the_oldest_requests_are_asked_for_at_each_update() -> None:
    ages: list[float] = []
    registry, exporter = make(Metrics(), oldest_s=lambda count: ages[:count])

    def shown() -> list[float]:
        return [registry.value("charonia_oldest_request_seconds", place) for place in OLDEST]

    assert shown() == [0, 0, 0, 0, 0]
    ages = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    exporter.update()
    assert shown() == [7, 6, 5, 4, 3]
    ages = [1.5]
    exporter.update()
    assert shown() == [1.5, 0, 0, 0, 0]
    exporter.close()
    assert shown() == [0, 0, 0, 0, 0]


def test_gauges_are_shown_by_tensorrt_llms_words_too() -> None:
    metrics = Metrics(gauges=dict(GAUGES))
    registry, _ = make(metrics)
    for name, expected in {
        "nv_trt_llm_kv_cache_block_metrics": {
            "max": 10,
            "free": 6,
            "used": 4,
            "tokens_per": 16,
            "fraction": 0.4,
        },
        "nv_trt_llm_request_metrics": {"active": 8, "scheduled": 3, "waiting": 5, "max": 8},
    }.items():
        assert {kind: registry.value(name, kind) for kind in expected} == expected


def test_gauges_are_shown_by_vllms_names_too() -> None:
    metrics = Metrics(gauges=dict(GAUGES))
    registry, exporter = make(metrics, with_vllm_names=True)
    assert registry.value("vllm:num_requests_running") == 3
    assert registry.value("vllm:num_requests_waiting") == 5
    assert registry.value("vllm:kv_cache_usage_perc") == 0.4
    config = {"block_size": "16", "num_gpu_blocks": "12"}
    assert ("vllm:cache_config_info", "", config, 1.0) in exporter.read()
    answer = decode_samples(msgspec.msgpack.encode(exporter.read()))
    assert all(map(_is_expected, answer)), "or the page would leave it out"
    _, plain = make(metrics)
    assert "vllm:cache_config_info" not in {name for name, *_ in plain.read()}
    empty, _ = make(Metrics(), with_vllm_names=True)
    assert empty.value("vllm:kv_cache_usage_perc") == 0


def test_vllms_names_have_the_labels_by_which_vllms_dashboards_select() -> None:
    registry, _ = make(Metrics(gauges=dict(GAUGES)), with_vllm_names=True)
    shared = {"model": "scheduler", "version": "1"}
    theirs = {**shared, "model_name": "scheduler", "engine": "0"}
    assert registry.made["charonia_requests_running", ()].labels == shared
    assert registry.made["vllm:num_requests_running", ()].labels == theirs
    success = registry.made["vllm:request_success_total", ("stop",)].labels
    assert success == theirs | {"finished_reason": "stop"}


def test_vllms_names_come_on_request() -> None:
    plain, _ = make(Metrics())
    assert not [name for name, _ in plain.made if name.startswith("vllm:")]
    metrics = Metrics()
    registry, exporter = make(metrics, with_vllm_names=True)
    metrics.count("charonia_prompt_tokens_total", 3, label="computed")
    metrics.count("charonia_prompt_tokens_total", 4, label="cached")
    metrics.histograms["charonia_inter_token_seconds"].observe(0.01, 9)
    metrics.observe_request("request_prompt_tokens", 7)
    metrics.observe_request("charonia_request_seconds", 1.5)
    metrics.observe_request("request_params_n", 1)
    metrics.count("charonia_finished_total", 2, label="length")
    metrics.count("charonia_finished_total", 4, label="timeout")
    exporter.update()
    assert registry.value("vllm:prompt_tokens_total") == 7
    assert registry.value("vllm:request_success_total", "length") == 2
    assert registry.value("vllm:request_success_total", "stop") == 0
    assert ("vllm:request_success_total", ("timeout",)) not in registry.made
    assert ("vllm:time_per_output_token_seconds", "_count", {}, 9) in exporter.read()
    assert registry.made["vllm:request_prompt_tokens", ()].observed == [7]
    assert registry.made["vllm:e2e_request_latency_seconds", ()].observed == [1.5]
    assert registry.made["vllm:request_params_n", ()].observed == [1.0]
    expected = {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_params_n",
    }
    assert expected <= {name for name, _ in registry.made}
