"""What the real server counts: sums that add up, by our names and by vLLM's.

What is asserted of counters is by how much they rise, because other tests share the server.
"""

import re
from functools import partial

import pytest

from charonia.launch.commands.health import examine
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    GrpcStream,
    at_once,
    endless_request,
    error_of,
    infer_grpc,
    infer_http,
    request_inputs,
    scrape,
    stream_grpc,
    wait_for,
    wait_idle,
    whole_page,
)
from support.metrics_page import (
    BLOCKS,
    REQUEST_HISTOGRAMS,
    REQUESTS,
    Watched,
    check_histogram,
    kinds,
    labels,
)
from support.waiting import WAIT_S

VLLM_COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)
VLLM_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
)
VLLM_HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_queue_time_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
)


@pytest.fixture(scope="module", autouse=True)
def samples(server: TritonServer) -> dict[str, float]:
    """The page after a request: from here on it is complete, and nothing runs but the tests'."""
    infer_grpc(server, request_inputs("abc", {"max_tokens": 4, "ignore_eos": True}))
    return wait_idle(server)


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


def test_a_second_name_of_the_scheduler_leaves_metrics_and_health_right(
    server: TritonServer,
) -> None:
    watched = Watched(server)
    stream_grpc(server, request_inputs("abc", {"max_tokens": 3, "ignore_eos": True}), "second")
    watched.settle()
    assert watched.rise('charonia_finished_total{reason="length"}') == 1
    assert watched.rise("charonia_generation_tokens_total") == 3
    assert "second" not in {
        one["model"] for one in labels(server, "charonia_")["charonia_finished_total"]
    }
    metrics_url = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    parts = list(examine(server.http_url, metrics_url, "second"))
    assert "second" in [part.name for part in parts]
    assert all(part.is_healthy for part in parts), parts


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
    error_of(lambda: infer_grpc(server, request_inputs("abc", {"num_beams": 2})))
    error_of(lambda: stream_grpc(server, request_inputs([384])))
    watched.settle()
    assert watched.rise('charonia_rejections_total{reason="invalid"}') == 3
    assert watched.rise('charonia_rejections_total{reason="queue_full"}') == 0


def test_gauges_show_what_runs_and_the_counters_its_cancellation(server: TritonServer) -> None:
    watched = Watched(server)
    with endless_request(server, [9] * 100):
        samples = wait_for(
            lambda: scrape(server), lambda samples: samples["charonia_requests_running"] == 1
        )
    assert samples["charonia_requests_running"] == 1
    assert samples["charonia_engine_up"] == 1
    ages = [samples[f'charonia_oldest_request_seconds{{place="{place}"}}'] for place in "12345"]
    assert 0 < ages[0] < WAIT_S
    assert ages[1:] == [0, 0, 0, 0]
    states = ("total", "used", "cached", "free")
    total, used, cached, free = (samples[f'charonia_kv_blocks{{state="{s}"}}'] for s in states)
    assert 100 / 16 <= used <= MAX_MODEL_LEN / 16
    assert used + cached + free == total == NUM_BLOCKS
    watched.settle()
    assert watched.rise("charonia_cancellations_total") == 1
    assert watched.rise('charonia_finished_total{reason="cancelled"}') == 1
    assert watched.after['charonia_kv_blocks{state="used"}'] == 0
    assert watched.after['charonia_oldest_request_seconds{place="1"}'] == 0


def test_blocks_are_shown_as_newer_servers_expect_them(samples: dict[str, float]) -> None:
    shown = {
        kind: samples[f'{BLOCKS}{{kv_cache_block_type="{kind}"}}']
        for kind in ("max", "free", "used", "tokens_per", "fraction")
    }
    sizes = {"tokens_per": 16, "fraction": 0}
    assert shown == {"max": NUM_BLOCKS, "free": NUM_BLOCKS, "used": 0, **sizes}


# ---------------------------------------------------------------------- vLLM's names


def test_vllms_names_come_only_when_asked_for(server: TritonServer) -> None:
    assert not [name for name in kinds(whole_page(server.metrics_url)) if name.startswith("vllm:")]


def test_vllms_names_add_up_as_well(narrow_server: TritonServer) -> None:
    server = narrow_server
    found = kinds(whole_page(server.metrics_url))
    expected = {f"vllm:{name}": "counter" for name in VLLM_COUNTERS}
    expected |= {f"vllm:{name}": "gauge" for name in VLLM_GAUGES}
    expected |= {f"vllm:{name}": "histogram" for name in VLLM_HISTOGRAMS}
    assert {name: kind for name, kind in found.items() if name.startswith("vllm:")} == expected
    for name, all_labels in labels(server, "vllm:").items():
        for one in all_labels:
            assert (one["model_name"], one["engine"]) == (one["model"], "0"), name
    watched = Watched(server)
    for _ in range(3):
        infer_grpc(server, request_inputs([7] * 20, {"max_tokens": 5, "ignore_eos": True}))
    watched.settle()
    rise = watched.rise
    assert rise("vllm:prompt_tokens_total") == 3 * 20
    assert rise("vllm:generation_tokens_total") == 3 * 5
    assert rise('vllm:request_success_total{finished_reason="length"}') == 3
    assert rise("vllm:prefix_cache_queries_total") == 3 * 20
    for name in VLLM_HISTOGRAMS:
        per_token = ("time_per_output_token_seconds", "inter_token_latency_seconds")
        num_tokens = 3 * 4 if name in per_token else 3
        assert rise(f"vllm:{name}_count") == num_tokens, name
        check_histogram(watched.after, f"vllm:{name}")
    assert rise("vllm:request_prompt_tokens_sum") == 3 * 20
    assert rise("vllm:request_generation_tokens_sum") == 3 * 5
    assert rise("vllm:request_params_n_sum") == 3
    watched = Watched(server)
    infer_grpc(server, request_inputs([8] * 20, {"max_tokens": 5, "n": 3}))
    watched.settle()
    assert watched.rise("vllm:request_params_n_count") == 1
    assert watched.rise("vllm:request_params_n_sum") == 3


def check_what_an_endpoint_picker_reads(samples: dict[str, float]) -> None:
    """Whether one request runs and two wait, in the words of vLLM and of TensorRT-LLM."""
    assert samples["vllm:num_requests_running"] == 1
    assert samples["vllm:num_requests_waiting"] == 2
    assert 0 < samples["vllm:kv_cache_usage_perc"] < 1
    (config,) = [name for name in samples if name.startswith("vllm:cache_config_info{")]
    block_size, num_blocks = map(int, re.findall(r'"(\d+)"', config))
    assert samples[config] == 1

    def of(name: str, kind: str, value: str) -> float:
        return samples[f'{name}{{{kind}="{value}"}}']

    requests = [of(REQUESTS, "request_type", one) for one in ("active", "scheduled", "waiting")]
    assert requests == [3, 1, 2]
    assert of(BLOCKS, "kv_cache_block_type", "max") == num_blocks
    assert of(BLOCKS, "kv_cache_block_type", "tokens_per") == block_size
    fraction = of(BLOCKS, "kv_cache_block_type", "fraction")
    assert fraction == pytest.approx(samples["vllm:kv_cache_usage_perc"])


def test_the_queue_is_shown_and_its_refusals_are_counted(narrow_server: TritonServer) -> None:
    server = narrow_server
    watched = Watched(server)
    inputs = request_inputs("abc", {"max_tokens": 1})
    with GrpcStream(server) as first, GrpcStream(server) as second:
        with endless_request(server):
            first.send(inputs)
            second.send(inputs)
            samples = wait_for(
                lambda: scrape(server), lambda samples: samples["charonia_requests_waiting"] == 2
            )
            assert samples["charonia_requests_running"] == 1
            assert samples["charonia_requests_waiting"] == 2
            check_what_an_endpoint_picker_reads(samples)
            error_of(lambda: infer_grpc(server, inputs))
        assert [len(list(stream)) for stream in (first, second)] == [1, 1]
    watched.settle()
    assert watched.rise('charonia_rejections_total{reason="queue_full"}') == 1
    assert watched.rise("charonia_queue_seconds_sum") > 0
