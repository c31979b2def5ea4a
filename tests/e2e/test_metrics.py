"""The metrics page of the real server: names, kinds and labels, when and by whom it is made."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from charonia.launch.server.tritonserver import TritonServer
from charonia.metrics.metric_table import ENGINE_STATES
from charonia.supervision.process_table import is_stopped
from support.e2e import (
    ENDLESS,
    HTTP,
    GrpcStream,
    error_of,
    infer_grpc,
    read_page,
    request_inputs,
    samples_of,
    scrape,
    wait_for,
    wait_idle,
    whole_page,
)
from support.hostile.target import Target
from support.metrics_page import (
    BLOCKS,
    REQUEST_HISTOGRAMS,
    REQUESTS,
    check_histogram,
    kinds,
    labels,
)
from support.serving import CHARONIA
from support.stopping import stop_process
from support.supervised import ALLOWED_S

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
PAGE_ALONE = {"charonia_scheduler_up", *(f"charonia_{name}" for name in STEP_HISTOGRAMS)}
VLLM_PAGE_ALONE = {
    "vllm:cache_config_info",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
}


def is_ours(name: str) -> bool:
    """Whether a metric is made here; the others are Triton's own."""
    return name.startswith(("charonia_", "vllm:", "nv_trt_llm_"))


def our_families(server: TritonServer) -> list[Metric]:
    """The families of ours, as a client of Prometheus reads them."""
    families = text_string_to_metric_families(whole_page(server.metrics_url))
    return [family for family in families if is_ours(family.name)]


@pytest.fixture(scope="module", autouse=True)
def samples(server: TritonServer) -> dict[str, float]:
    """The page after a request: from here on it is complete, and nothing runs but the tests'."""
    infer_grpc(server, request_inputs("abc", {"max_tokens": 4, "ignore_eos": True}))
    return wait_idle(server)


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
