"""The metrics page of the real server: names, kinds, labels, and sums that add up.

What is asserted of counters is by how much they rise, because other tests share the server.
"""

import math
import re
from collections import defaultdict
from functools import partial

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from charonia.launch.server import TritonServer
from support.e2e import (
    GrpcStream,
    at_once,
    error_of,
    infer_grpc,
    infer_http,
    request_inputs,
    scrape,
    stream_grpc,
    wait_for,
    wait_idle,
)

REQUEST_HISTOGRAMS = ("queue_seconds", "time_to_first_token_seconds", "request_seconds")
HISTOGRAMS = (*REQUEST_HISTOGRAMS, "recovery_seconds")
HISTOGRAMS_AS_COUNTERS = ("inter_token_seconds", "step_seconds", "plan_seconds")
COUNTERS = {
    "prompt_tokens_total": ("source", {"computed", "cached"}),
    "finished_total": ("reason", {"stop", "length"}),
    "step_phase_seconds_total": ("phase", {"deliver", "transit", "apply", "draft", "verify"}),
    "rejections_total": ("reason", {"invalid", "queue_full", "unavailable"}),
    "generation_tokens_total": None,
    "cancellations_total": None,
    "preemptions_total": None,
    "prefix_cache_queried_tokens_total": None,
    "prefix_cache_hit_tokens_total": None,
    "draft_rounds_total": None,
    "draft_tokens_total": None,
    "accepted_tokens_total": None,
    "engine_restarts_total": None,
    "engine_reloads_total": None,
    "engine_failures_total": ("kind", {"step_failed", "died", "hung", "load_failed"}),
    "requests_quarantined_total": None,
    "requests_recomputed_total": None,
}
GAUGES = {
    "requests_running": None,
    "requests_waiting": None,
    "engine_up": None,
    "draft_depth": None,
    "kv_blocks": ("state", {"total", "used", "cached", "free"}),
}
VLLM_COUNTERS = ("prompt_tokens_total", "generation_tokens_total")
VLLM_HISTOGRAMS = (
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
)
BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
NUM_BLOCKS = 2048


def kinds(server: TritonServer) -> dict[str, str]:
    """The kind of every family, as the page says."""
    page = httpx.get(server.metrics_url).text
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def labels(server: TritonServer, prefix: str) -> dict[str, list[dict[str, str]]]:
    """The labels of every series whose name begins so, by name."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(httpx.get(server.metrics_url).text):
        for sample in family.samples:
            if sample.name.startswith(prefix):
                found[sample.name].append(sample.labels)
    return found


@pytest.fixture(scope="module", autouse=True)
def samples(server: TritonServer) -> dict[str, float]:
    """The page after a request: from here on it is complete, and nothing runs but the tests'."""
    infer_grpc(server, request_inputs("abc", {"max_tokens": 4, "ignore_eos": True}))
    return wait_idle(server)


class Watched:
    """By how much each metric rises while requests run."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._before = wait_idle(server)
        self.after: dict[str, float] = {}

    def settle(self) -> None:
        """Wait until all that was asked of the server is on the page."""
        self.after = wait_idle(self._server)

    def rise(self, name: str) -> float:
        """Of one metric; a series that was not there counts as zero."""
        return self.after[name] - self._before.get(name, 0.0)


# ---------------------------------------------------------------------- the page


def test_every_metric_has_its_name_and_kind(server: TritonServer) -> None:
    expected = {f"charonia_{name}": "counter" for name in COUNTERS}
    expected |= {f"charonia_{name}": "gauge" for name in GAUGES}
    expected |= {f"charonia_{name}": "histogram" for name in HISTOGRAMS}
    expected |= {
        f"charonia_{name}_{part}": "counter"
        for name in HISTOGRAMS_AS_COUNTERS
        for part in ("bucket", "sum", "count")
    }
    ours = {name: kind for name, kind in kinds(server).items() if name.startswith("charonia_")}
    assert ours == expected
    assert kinds(server)[BLOCKS] == "gauge"


def test_every_series_says_which_model_it_is_of(server: TritonServer) -> None:
    for name, all_labels in labels(server, "charonia_").items():
        for one in all_labels:
            assert (one["model"], one["version"]) == ("scheduler", "1"), name


def test_labels_have_the_values_of_the_interface_from_the_start(server: TritonServer) -> None:
    found = labels(server, "charonia_")
    for name, label in (COUNTERS | GAUGES).items():
        others = [set(one) - {"model", "version"} for one in found[f"charonia_{name}"]]
        if label is None:
            assert others == [set()], name
        else:
            values = {one[label[0]] for one in found[f"charonia_{name}"]}
            assert values >= label[1], name
            assert all(one == {label[0]} for one in others), name


def test_no_series_is_there_twice(server: TritonServer) -> None:
    for name, all_labels in labels(server, "").items():
        assert len({tuple(sorted(one.items())) for one in all_labels}) == len(all_labels), name


@pytest.mark.parametrize("name", [*REQUEST_HISTOGRAMS, *HISTOGRAMS_AS_COUNTERS])
def test_a_histogram_is_consistent(samples: dict[str, float], name: str) -> None:
    check_histogram(samples, f"charonia_{name}")


def check_histogram(samples: dict[str, float], name: str) -> None:
    """Assert that buckets rise up to the count, and that the sum is possible."""
    buckets = sorted(
        (float(bound.replace("+Inf", "inf")), value)
        for key, value in samples.items()
        for bound in re.findall(rf'^{re.escape(name)}_bucket{{le="(.+)"}}$', key)
    )
    bounds = [bound for bound, _ in buckets]
    counts = [count for _, count in buckets]
    assert bounds[-1] == math.inf
    assert len(bounds) >= 5
    assert counts == sorted(counts)
    assert counts[-1] == samples[f"{name}_count"] > 0
    assert 0 <= samples[f"{name}_sum"] < math.inf
    in_bucket = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
    least = sum(n * bound for n, bound in zip(in_bucket[1:], bounds, strict=False))
    assert samples[f"{name}_sum"] >= least * 0.999


# ---------------------------------------------------------------------- what is counted


def test_tokens_requests_and_times_add_up(server: TritonServer) -> None:
    num_requests, num_tokens = 6, 20
    watched = Watched(server)
    sampling = {"max_tokens": num_tokens, "ignore_eos": True}
    calls = []
    for index in range(num_requests):
        prompt = [5 + index] * 10
        inputs = request_inputs(prompt, sampling | {"cache_salt": f"sums {index}"})
        if index % 3 == 0:
            calls.append(partial(stream_grpc, server, inputs | {"stream": True}))
        elif index % 3 == 1:
            calls.append(partial(stream_grpc, server, inputs | {"stream": True}, "llm"))
        else:
            calls.append(partial(infer_http, server, inputs))
    at_once(calls)
    watched.settle()
    rise = watched.rise
    assert rise("charonia_generation_tokens_total") == num_requests * num_tokens
    assert rise('charonia_prompt_tokens_total{source="computed"}') == num_requests * 10
    assert rise('charonia_prompt_tokens_total{source="cached"}') == 0
    assert rise('charonia_finished_total{reason="length"}') == num_requests
    assert rise('charonia_finished_total{reason="stop"}') == 0
    assert rise("charonia_inter_token_seconds_count") == num_requests * (num_tokens - 1)
    for name in REQUEST_HISTOGRAMS:
        assert rise(f"charonia_{name}_count") == num_requests, name
    # Some requests shared steps.
    num_steps = rise("charonia_step_seconds_count")
    assert num_tokens <= num_steps <= num_requests * num_tokens
    assert rise("charonia_plan_seconds_count") == num_steps
    for phase in ("deliver", "transit", "apply"):
        assert rise(f'charonia_step_phase_seconds_total{{phase="{phase}"}}') > 0, phase
    total = rise("charonia_request_seconds_sum")
    first = rise("charonia_time_to_first_token_seconds_sum")
    between = rise("charonia_inter_token_seconds_sum")
    assert 0 <= rise("charonia_queue_seconds_sum") <= first <= total
    assert first + between == pytest.approx(total, rel=0.05, abs=0.05)
    assert rise("charonia_cancellations_total") == rise("charonia_preemptions_total") == 0


def test_a_stop_counts_as_stop(server: TritonServer) -> None:
    watched = Watched(server)
    infer_grpc(server, request_inputs("abc", {"logit_bias": {0: 100}, "temperature": 0}))
    watched.settle()
    assert watched.rise('charonia_finished_total{reason="stop"}') == 1
    assert watched.rise("charonia_generation_tokens_total") == 1


def test_hits_of_the_prefix_cache_are_counted(server: TritonServer) -> None:
    prompt = list(range(1, 49))  # three blocks, the last of which must be computed
    inputs = request_inputs(prompt, {"max_tokens": 1, "cache_salt": "hits"})
    watched = Watched(server)
    infer_grpc(server, inputs)
    watched.settle()
    assert watched.rise("charonia_prefix_cache_hit_tokens_total") == 0
    watched = Watched(server)
    infer_grpc(server, inputs)
    watched.settle()
    assert watched.rise("charonia_prefix_cache_hit_tokens_total") == 32
    assert watched.rise('charonia_prompt_tokens_total{source="cached"}') == 32
    assert watched.rise('charonia_prompt_tokens_total{source="computed"}') == 16
    assert 32 <= watched.rise("charonia_prefix_cache_queried_tokens_total") <= 48


def test_refusals_are_counted_with_their_reason(server: TritonServer) -> None:
    watched = Watched(server)
    error_of(lambda: infer_grpc(server, request_inputs("abc", {"max_tokens": 0})))
    error_of(lambda: infer_grpc(server, request_inputs("abc", {"n": 2})))
    error_of(lambda: stream_grpc(server, request_inputs([384])))
    watched.settle()
    assert watched.rise('charonia_rejections_total{reason="invalid"}') == 3
    assert watched.rise('charonia_rejections_total{reason="queue_full"}') == 0


def test_gauges_show_what_runs_and_the_counters_its_cancellation(server: TritonServer) -> None:
    watched = Watched(server)
    inputs = request_inputs([9] * 100, {"max_tokens": 3900, "ignore_eos": True}, stream=True)
    with GrpcStream(server) as stream:
        stream.send(inputs, request_id="metrics").next()
        samples = wait_for(
            lambda: scrape(server), lambda samples: samples["charonia_requests_running"] == 1
        )
        infer_grpc(server, {"cancel": True}, request_id="metrics")
        error_of(lambda: list(stream))
    assert samples["charonia_requests_running"] == 1
    assert samples["charonia_engine_up"] == 1
    states = ("total", "used", "cached", "free")
    total, used, cached, free = (samples[f'charonia_kv_blocks{{state="{s}"}}'] for s in states)
    assert 100 / 16 <= used <= 4096 / 16
    assert used + cached + free == total == NUM_BLOCKS
    watched.settle()
    assert watched.rise("charonia_cancellations_total") == 1
    assert watched.rise('charonia_finished_total{reason="cancelled"}') == 1
    assert watched.after['charonia_kv_blocks{state="used"}'] == 0


def test_blocks_are_shown_as_newer_servers_expect_them(samples: dict[str, float]) -> None:
    shown = {
        kind: samples[f'{BLOCKS}{{kv_cache_block_type="{kind}"}}']
        for kind in ("max", "free", "used", "tokens_per")
    }
    assert shown == {"max": NUM_BLOCKS, "free": NUM_BLOCKS, "used": 0, "tokens_per": 16}


# ---------------------------------------------------------------------- vLLM's names


def test_vllms_names_come_only_when_asked_for(server: TritonServer) -> None:
    assert not [name for name in kinds(server) if name.startswith("vllm:")]


def test_vllms_names_add_up_as_well(narrow_server: TritonServer) -> None:
    server = narrow_server
    found = kinds(server)
    assert {name: found[f"vllm:{name}"] for name in VLLM_COUNTERS} == dict.fromkeys(
        VLLM_COUNTERS, "counter"
    )
    assert {name: found[f"vllm:{name}"] for name in VLLM_HISTOGRAMS} == dict.fromkeys(
        VLLM_HISTOGRAMS, "histogram"
    )
    assert found["vllm:time_per_output_token_seconds_bucket"] == "counter"
    watched = Watched(server)
    for _ in range(3):
        infer_grpc(server, request_inputs([7] * 20, {"max_tokens": 5, "ignore_eos": True}))
    watched.settle()
    rise = watched.rise
    assert rise("vllm:prompt_tokens_total") == 3 * 20
    assert rise("vllm:generation_tokens_total") == 3 * 5
    for name in VLLM_HISTOGRAMS:
        assert rise(f"vllm:{name}_count") == 3, name
        check_histogram(watched.after, f"vllm:{name}")
    check_histogram(watched.after, "vllm:time_per_output_token_seconds")
    assert rise("vllm:request_prompt_tokens_sum") == 3 * 20
    assert rise("vllm:request_generation_tokens_sum") == 3 * 5
    assert rise("vllm:request_params_n_sum") == 3
    assert rise("vllm:time_per_output_token_seconds_count") == 3 * 4


def test_the_queue_is_shown_and_its_refusals_are_counted(narrow_server: TritonServer) -> None:
    server = narrow_server
    watched = Watched(server)
    inputs = request_inputs("abc", {"max_tokens": 1})
    with GrpcStream(server) as running, GrpcStream(server) as first, GrpcStream(server) as second:
        long = {"max_tokens": 4000, "ignore_eos": True}
        running.send(request_inputs("abc", long, stream=True), request_id="long")
        running.next()
        first.send(inputs)
        second.send(inputs)
        samples = wait_for(
            lambda: scrape(server), lambda samples: samples["charonia_requests_waiting"] == 2
        )
        assert samples["charonia_requests_running"] == 1
        assert samples["charonia_requests_waiting"] == 2
        error_of(lambda: infer_grpc(server, inputs))
        infer_grpc(server, {"cancel": True}, request_id="long")
        error_of(lambda: list(running))
        assert [len(list(stream)) for stream in (first, second)] == [1, 1]
    watched.settle()
    assert watched.rise('charonia_rejections_total{reason="queue_full"}') == 1
    assert watched.rise("charonia_queue_seconds_sum") > 0
