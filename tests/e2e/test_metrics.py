"""The metrics page of the real server: names, kinds, labels, and sums that add up.

What is asserted of counters is by how much they rise, because other tests share the server.
"""

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from charonia.launch.commands.health import examine
from charonia.launch.server.tritonserver import TritonServer
from charonia.metrics.metric_table import ENGINE_STATES
from charonia.supervision.process_table import is_stopped
from support.e2e import (
    ENDLESS,
    HTTP,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    GrpcStream,
    at_once,
    endless_request,
    error_of,
    infer_grpc,
    infer_http,
    read_page,
    request_inputs,
    samples_of,
    scrape,
    stream_grpc,
    wait_for,
    wait_idle,
    whole_page,
)
from support.hostile.target import Target
from support.serving import CHARONIA
from support.stopping import stop_process
from support.supervised import ALLOWED_S
from support.waiting import WAIT_S

REQUEST_HISTOGRAMS = ("queue_seconds", "time_to_first_token_seconds", "request_seconds")
STEP_HISTOGRAMS = ("inter_token_seconds", "step_seconds", "plan_seconds")
HISTOGRAMS = (*REQUEST_HISTOGRAMS, *STEP_HISTOGRAMS, "recovery_seconds")
OPERATIONS = ("operation", {"all_reduce", "all_gather", "broadcast", "reduce_scatter"})
COUNTERS = {
    "prompt_tokens_total": ("source", {"computed", "cached"}),
    "finished_total": (
        "reason",
        {
            "stop",
            "length",
            "internal",
            "invalid_request",
            "prompt_too_long",
            "not_supported",
            "unavailable",
            "queue_full",
            "rate_limited",
            "overloaded",
            "engine_down",
            "shutting_down",
            "timeout",
            "late",
            "cancelled",
            "quarantined",
        },
    ),
    "collective_calls_total": OPERATIONS,
    "collective_bytes_total": OPERATIONS,
    "collective_seconds_total": OPERATIONS,
    "step_phase_seconds_total": ("phase", {"deliver", "transit", "apply", "draft", "verify"}),
    "rejections_total": (
        "reason",
        {
            "invalid",
            "unavailable",
            "queue_full",
            "tenant_queue_full",
            "rate_limited",
            "overloaded",
            "engine_down",
            "shutting_down",
            "timeout",
            "late",
        },
    ),
    "generation_tokens_total": None,
    "cancellations_total": None,
    "preemptions_total": None,
    "kv_blocks_evicted_total": None,
    "kv_blocks_saved_total": None,
    "kv_blocks_loaded_total": None,
    "kv_loads_failed_total": None,
    "kv_event_batches_dropped_total": None,
    "prefix_waits_total": None,
    "prefix_cache_queried_tokens_total": None,
    "prefix_cache_hit_tokens_total": None,
    "answer_cache_hits_total": ("kind", {"exact", "joined", "semantic"}),
    "answer_cache_misses_total": None,
    "answer_cache_evicted_total": ("why", {"bytes", "age"}),
    "draft_rounds_total": None,
    "draft_tokens_total": None,
    "accepted_tokens_total": None,
    "engine_restarts_total": None,
    "engine_reloads_total": None,
    "engine_failures_total": ("kind", {"step_failed", "died", "hung", "load_failed"}),
    "requests_quarantined_total": None,
    "requests_recomputed_total": None,
    "capped_requests_total": None,
    "tenant_requests_total": ("tenant", {"other"}),
    "tenant_rejections_total": ("tenant", {"other"}),
    "tenant_prompt_tokens_total": ("tenant", {"other"}),
    "tenant_generation_tokens_total": ("tenant", {"other"}),
    "ttft_target_met_total": ("tenant", {"other"}),
    "ttft_target_missed_total": ("tenant", {"other"}),
    "inter_token_target_met_total": ("tenant", {"other"}),
    "inter_token_target_missed_total": ("tenant", {"other"}),
    "deadline_met_total": ("tenant", {"other"}),
    "deadline_missed_total": ("tenant", {"other"}),
}
GAUGES = {
    "scheduler_up": None,
    "requests_running": None,
    "requests_waiting": None,
    "oldest_request_seconds": ("place", {"1", "2", "3", "4", "5"}),
    "engine_up": None,
    "engine_state": ("state", set(ENGINE_STATES)),
    "draft_depth": None,
    "degradation_level": None,
    "max_rows": None,
    "max_step_tokens": None,
    "tenant_requests_running": ("tenant", {"other"}),
    "tenant_requests_waiting": ("tenant", {"other"}),
    "kv_blocks": ("state", {"total", "used", "cached", "free", "aside"}),
    "kv_retained_blocks": None,
    "kv_tier_blocks": ("tier", {"host", "file"}),
    "engine_memory_bytes": ("part", {"weights", "step", "kv_cache", "left"}),
    "answer_cache_answers": None,
    "answer_cache_bytes": None,
}
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
PAGE_ALONE = {"charonia_scheduler_up", *(f"charonia_{name}" for name in STEP_HISTOGRAMS)}
VLLM_PAGE_ALONE = {
    "vllm:cache_config_info",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
}
FINISHED = "charonia_finished_total"
BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
REQUESTS = "nv_trt_llm_request_metrics"


def kinds(page: str) -> dict[str, str]:
    """The kind of every family, as the page says."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def is_ours(name: str) -> bool:
    """Whether a metric is made here; the others are Triton's own."""
    return name.startswith(("charonia_", "vllm:", "nv_trt_llm_"))


def our_families(server: TritonServer) -> list[Metric]:
    """The families of ours, as a client of Prometheus reads them."""
    families = text_string_to_metric_families(whole_page(server.metrics_url))
    return [family for family in families if is_ours(family.name)]


def labels(server: TritonServer, prefix: str) -> dict[str, list[dict[str, str]]]:
    """The labels of every series whose name begins so, by name."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(whole_page(server.metrics_url)):
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
    page = whole_page(server.metrics_url)
    ours = {name: kind for name, kind in kinds(page).items() if name.startswith("charonia_")}
    assert ours == expected
    assert kinds(page)[BLOCKS] == kinds(page)[REQUESTS] == "gauge"


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


@pytest.mark.parametrize("name", [*REQUEST_HISTOGRAMS, *STEP_HISTOGRAMS])
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


@pytest.fixture(params=["server", "narrow_server"])
def any_server(request: pytest.FixtureRequest) -> TritonServer:
    """Without vLLM's names, and with them; something has run on it."""
    server: TritonServer = request.getfixturevalue(request.param)
    infer_grpc(server, request_inputs("abc", {"max_tokens": 4, "ignore_eos": True}))
    return server


def test_the_page_keeps_to_prometheus_conventions(any_server: TritonServer) -> None:
    families = our_families(any_server)
    assert len(families) >= 30
    assert len({family.name for family in families}) == len(families)
    page = whole_page(any_server.metrics_url)
    for family in families:
        assert re.fullmatch(r"[A-Z].{15,}\.", family.documentation), family.name
        # The parser takes `_total` from a counter's name.
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert page.count(f"# TYPE {name} ") == page.count(f"# HELP {name} ") == 1
        assert not re.search(r"_(ms|us|milliseconds|microseconds|minutes|kilobytes)(_|$)", name)
        if family.type != "histogram":
            assert {sample.name for sample in family.samples} == {name}
            assert not any("le" in sample.labels for sample in family.samples)
            continue
        values = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
        assert values[f"{name}_bucket", "+Inf"] == values[f"{name}_count", None]
        last = [sample for sample in family.samples if sample.name == f"{name}_bucket"][-1]
        assert last.labels["le"] == "+Inf"


PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, on PATH or named by PROMTOOL")
def test_prometheus_own_linter_finds_nothing_of_ours(any_server: TritonServer) -> None:
    page = whole_page(any_server.metrics_url).encode()
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(command, input=page, capture_output=True, timeout=60, check=False)
    said = done.stderr.decode().splitlines()
    assert done.returncode in (0, 3), said  # 3: it has something to say of names
    ours = [line for line in said if is_ours(line.split()[0]) or not line.startswith("nv_")]
    # vLLM's names have a colon, which is for recording rules.
    assert [line for line in ours if not re.match(r"vllm:\S+ .*should not contain ':'", line)] == []


# ---------------------------------------------------------------------- when it is there


def test_a_request_is_on_the_page_when_its_last_response_is_here(server: TritonServer) -> None:
    """Nothing waits here: one scrape, at once."""
    num_tokens = 5
    sampling = {"max_tokens": num_tokens, "ignore_eos": True}
    for number, door in enumerate(("scheduler", "llm", "generate") * 4):
        before = wait_idle(server)
        inputs = request_inputs([3 + number] * 8, sampling | {"cache_salt": f"once {number}"})
        if door == "generate":
            infer_grpc(server, inputs)
            after = scrape(server)
        else:
            with GrpcStream(server, door) as stream:
                list(stream.send(inputs | {"stream": True}))
                after = scrape(server)
        expected = {
            'charonia_finished_total{reason="length"}': 1,
            'charonia_prompt_tokens_total{source="computed"}': 8,
            "charonia_generation_tokens_total": num_tokens,
            "charonia_inter_token_seconds_count": num_tokens - 1,
            "charonia_step_seconds_count": num_tokens,
            "charonia_plan_seconds_count": num_tokens,
            **{f"charonia_{name}_count": 1 for name in REQUEST_HISTOGRAMS},
        }
        assert {name: after[name] - before[name] for name in expected} == expected, door


def test_so_is_one_that_ends_with_an_error(server: TritonServer) -> None:
    for model in ("scheduler", "llm"):
        before = wait_idle(server)
        with GrpcStream(server, model) as stream:
            stream.send(request_inputs("abc", {"max_tokens": 0}))
            error_of(lambda stream=stream: list(stream))
            after = scrape(server)
        rejected = 'charonia_rejections_total{reason="invalid"}'
        assert after[rejected] - before[rejected] == 1, model
    name = 'charonia_finished_total{reason="cancelled"}'
    with GrpcStream(server) as stream:
        inputs = request_inputs("abc", {"max_tokens": ENDLESS, "ignore_eos": True}, stream=True)
        stream.send(inputs, request_id="at once").next()
        infer_grpc(server, {"cancel": True}, request_id="at once")
        error_of(lambda: list(stream))
        ended = scrape(server)
    assert ended["charonia_cancellations_total"] - after["charonia_cancellations_total"] == 1
    assert ended[name] - after.get(name, 0.0) == 1


# ---------------------------------------------------------------------- who makes the page


def test_triton_s_own_page_has_all_but_what_is_observed_per_token_or_step(
    any_server: TritonServer,
) -> None:
    own_url = any_server._triton_metrics_url()
    assert own_url is not None
    whole = kinds(whole_page(any_server.metrics_url))

    def missing() -> set[str]:
        own = kinds(HTTP.get(own_url).raise_for_status().text)
        assert own.items() <= whole.items()
        return set(whole) - set(own) - VLLM_PAGE_ALONE

    # Gauges are there once the scheduler has told Triton of them.
    assert wait_for(missing, lambda names: names == PAGE_ALONE) == PAGE_ALONE


def test_the_page_can_be_had_beside_a_server_that_was_started_by_hand(
    server: TritonServer,
) -> None:
    own_url = server._triton_metrics_url()
    arguments = ["--model-repository", server.repository, "--triton", own_url, "--port", "0"]
    command = [*CHARONIA, "metrics", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            pages = [whole_page(url) for url in (said.split()[-1], server.metrics_url)]
            assert kinds(pages[0]) == kinds(pages[1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(ALLOWED_S) == 0
        finally:
            process.kill()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process meanwhile."""
    stop_process(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stopped_scheduler_does_not_hold_the_page(server: TritonServer) -> None:
    (pid,) = server.pids("scheduler")
    with stopped(pid):
        samples = samples_of(wait_for(lambda: read_page(server.metrics_url), bool))
        assert is_stopped(pid)
    assert samples["charonia_scheduler_up"] == 0
    assert "charonia_generation_tokens_total" in samples
    assert "charonia_step_seconds_count" not in samples
    infer_grpc(server, request_inputs("abc", {"max_tokens": 2}))
    samples = scrape(server)
    assert samples["charonia_scheduler_up"] == 1
    assert samples["charonia_step_seconds_count"] > 0


def test_nonsense_at_its_port_does_not_hold_the_page(server: TritonServer) -> None:
    with contextlib.ExitStack() as stack:
        for data in (b"", b"GET /metr", b"\0" * 10**5, b"GET /metrics HTTP/1.1\r\nX: ") * 50:
            connection = stack.enter_context(Target.of(server).connect(server.metrics_port))
            with contextlib.suppress(OSError):
                connection.sendall(data)
        assert scrape(server)["charonia_scheduler_up"] == 1


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
    assert "second" not in {one["model"] for one in labels(server, "charonia_")[FINISHED]}
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
