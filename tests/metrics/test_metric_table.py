"""The table of metrics keeps to Prometheus' conventions, and the values keep to the table."""

import re
from pathlib import Path

import pytest

from charonia.metrics import metric_table
from charonia.metrics.metric_table import BY_NAME, METRICS, VLLM_METRICS, Metric
from charonia.metrics.metrics import Metrics
from core.bench import FIXED, Bench
from support.echo import EchoExecutor

EVERY = pytest.mark.parametrize(("name", "metric"), BY_NAME.items(), ids=BY_NAME)
NO_UNIT = {  # what they count is in their name
    "charonia_scheduler_up",
    "charonia_engine_up",
    "charonia_engine_state",
    "charonia_requests_running",
    "charonia_requests_waiting",
    "charonia_tenant_requests_running",
    "charonia_tenant_requests_waiting",
    "charonia_degradation_level",
    "charonia_max_rows",
    "charonia_max_step_tokens",
    "charonia_kv_blocks",
    "charonia_kv_retained_blocks",
    "charonia_kv_tier_blocks",
    "charonia_answer_cache_answers",
    "charonia_draft_depth",
    "nv_trt_llm_kv_cache_block_metrics",
    "nv_trt_llm_request_metrics",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_n",
}


def test_every_name_is_there_once() -> None:
    table = Path(metric_table.__file__).read_text(encoding="utf-8")
    assert {name: table.count(f'"{name}": ') for name in BY_NAME} == dict.fromkeys(BY_NAME, 1)


@EVERY
def test_a_metric_is_explained_in_a_sentence(name: str, metric: Metric) -> None:
    assert re.fullmatch(r"[A-Z][^\n\\]{15,140}\.", metric.help)
    assert len(metric.help.split()) >= 3


@EVERY
def test_a_name_says_kind_and_base_unit(name: str, metric: Metric) -> None:
    assert name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(bucket|sum|count|ms|us|milli|micro|minutes|kib|mib)(_|$)", name)
    if metric.kind != "counter":
        assert name.endswith(("_seconds", "_bytes")) != (name in NO_UNIT)


@EVERY
def test_buckets_ascend_and_belong_to_histograms(name: str, metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert not (metric.values and not metric.label)


def test_what_is_shown_under_another_name_is_there() -> None:
    metrics = Metrics()
    counters = {name for name, _ in metrics.counters}
    for name, metric in VLLM_METRICS.items():
        if metric.kind == "gauge":
            assert not metric.shows or BY_NAME[metric.shows].kind == "gauge"
            continue
        there = {
            ("counter", "triton"): counters,
            ("histogram", "triton"): metrics.observations,
            ("histogram", "page"): metrics.histograms,
        }[metric.kind, metric.place]
        assert metric.shows in there, name
        if metric.place == "page":
            assert metric.buckets == metrics.histograms[metric.shows].bounds


def test_the_table_says_which_of_our_metrics_answers_each_of_vllms() -> None:
    for name, metric in VLLM_METRICS.items():
        named = re.findall(r"charonia_\w+", metric.ours or metric.shows)
        assert named or metric.shows in Metrics().observations, name
        assert all(one in METRICS for one in named), name


def test_all_that_is_counted_is_in_the_table_with_its_label() -> None:
    bench = Bench(EchoExecutor(max_draft_len=100), FIXED)
    bench.add("a", max_tokens=21)
    bench.run()
    metrics = bench.core.metrics
    for kind, series in (("counter", metrics.counters), ("gauge", metrics.gauges)):
        for name, value in series:
            assert BY_NAME[name].kind == kind
            assert bool(value) == bool(BY_NAME[name].label), name
