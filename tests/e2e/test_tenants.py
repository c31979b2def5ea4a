"""Tenants on the real server: shares and limits of a file that changes while it runs."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.core.recording.recorder import REQUESTS
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.traces import read_requests
from charonia_client import Client, RetryPolicy
from charonia_client.errors import RateLimited
from support.e2e import (
    ENDLESS,
    ENDLESS_BLOCKS,
    HTTP,
    ONE_THREAD,
    GrpcStream,
    error_of,
    generate,
    generate_url,
    infer_grpc,
    infer_http,
    one_torch_thread,
    request_inputs,
    scrape,
    stream_grpc,
    wait_for,
    wait_idle,
)
from support.live_stream import LiveStream

PROMPT = [5, 6, 7]
NUM_EACH = 8
ODD_NAME = 'a "name", \\ = {odd}'
TENANTS = {"tenants": {"heavy": {"weight": 3}, "single": {"max_concurrency": 1}}}


@pytest.fixture(scope="module")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.json"
    path.write_text(json.dumps(TENANTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shared_server(endless_checkpoint: Path, tenants_file: Path) -> Iterator[TritonServer]:
    """It runs two requests at a time, and records all beside the tenants' file."""
    settings = (
        ONE_THREAD,
        ENDLESS_BLOCKS,
        "max_num_seqs=2",
        "scheduler.fair_share=true",
        f"scheduler.tenants_file={tenants_file}",
        f"scheduler.record_dir={tenants_file.parent}",
    )
    with (
        one_torch_thread(),
        running_server(model=endless_checkpoint, settings=settings) as server,
    ):
        yield server


def replace(path: Path, content: object) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content), encoding="utf-8")
    os.replace(draft, path)


def test_tenants_that_wait_are_served_by_their_weights(
    shared_server: TritonServer, tenants_file: Path
) -> None:
    """Two requests of a third one keep both rows, until all others wait."""
    url, others = shared_server.grpc_url, 2 * NUM_EACH
    endless = {"max_tokens": ENDLESS, "ignore_eos": True}
    holders = [LiveStream(url, PROMPT, tenant="x", **endless) for _ in range(2)]
    for holder in holders:
        holder.wait_tokens(1)
    sampling = {"max_tokens": 32, "ignore_eos": True}
    streams = [
        LiveStream(url, PROMPT, tenant=tenant, **sampling)
        for tenant in ("heavy", "light")
        for _ in range(NUM_EACH)
    ]
    waiting = "charonia_requests_waiting"
    assert wait_for(lambda: scrape(shared_server)[waiting], lambda count: count == others) == others
    for holder in holders:
        holder.leave()
    assert {stream.wait_over().error for stream in streams} == {None}

    record = tenants_file.parent / REQUESTS  # clients' threads see ends in another order

    def num_written() -> int:
        return len(re.findall(r'"(?:heavy|light)"', record.read_text()))

    assert wait_for(num_written, lambda count: count == others) == others
    requests = [one for one in read_requests(record) if one.tenant in ("heavy", "light")]
    requests.sort(key=lambda one: one.timestamp + one.queue_ms)
    num_heavy = sum(one.tenant == "heavy" for one in requests[:NUM_EACH])
    assert 5 <= num_heavy <= 7, "it is 6 of 8 by weight"


def test_what_a_tenant_may_not_have_is_refused_at_once_through_every_way_in(
    shared_server: TritonServer,
) -> None:
    before = wait_idle(shared_server)
    endless = {"tenant": "single", "max_tokens": ENDLESS, "ignore_eos": True}
    running = LiveStream(shared_server.grpc_url, PROMPT, **endless)
    running.wait_tokens(1)
    sampling = {"tenant": "single", "max_tokens": 2}
    inputs = request_inputs(PROMPT, sampling)
    unary = error_of(lambda: infer_grpc(shared_server, inputs))
    text = "tenant 'single' has 1 requests here, as many as it may have at once"
    assert text in unary.message()
    assert unary.status() == "StatusCode.UNAVAILABLE"
    for model in ("scheduler", "llm"):
        ask = partial(stream_grpc, shared_server, request_inputs("a", sampling), model=model)
        assert error_of(ask).message().endswith("[charonia:rate_limited]")
    over_http = generate(shared_server, {"text_input": "a", **sampling})
    assert text in over_http.json()["error"]
    assert stream_grpc(
        shared_server, request_inputs(PROMPT, {"tenant": "other", "max_tokens": 2})
    ), "others do not notice"
    running.leave()
    after = wait_idle(shared_server)
    for refused in (
        'charonia_rejections_total{reason="rate_limited"}',
        'charonia_tenant_rejections_total{tenant="single"}',
    ):
        assert after[refused] - before.get(refused, 0) == 4, refused


def test_the_file_may_change_while_the_server_runs(
    shared_server: TritonServer, tenants_file: Path
) -> None:
    url = shared_server.grpc_url
    with Client(url, retry=RetryPolicy(max_attempts=1)) as client:

        def refusal() -> RateLimited | None:
            try:
                client.generate("a", max_tokens=1, tenant="slow")
            except RateLimited as error:
                return error
            return None

        assert refusal() is None
        replace(tenants_file, {"tenants": {"slow": {"requests_per_s": 0.001}}})
        error = wait_for(refusal, bool)
        assert error is not None
        assert "tenant 'slow' may send 0.001 requests per second" in error.message
        assert error.retry_after_s is not None
        assert 0 < error.retry_after_s <= 1000
        replace(tenants_file, TENANTS)
        assert wait_for(refusal, lambda found: found is None) is None


@pytest.fixture(scope="module")
def header_server(
    small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Whose a request is says a header; two tenants are served, of whom one has an odd name."""
    path = tmp_path_factory.mktemp("tenants") / "tenants.json"
    targets = {"ttft_target_ms": 1e6, "inter_token_target_ms": 1e-6}
    replace(path, {"unknown": "refuse", "tenants": {"search": targets, ODD_NAME: {}}})
    settings = (
        ONE_THREAD,
        "scheduler.tenant_header=X-Tenant",
        f"scheduler.tenants_file={path}",
        "max_num_seqs=auto",
        "max_num_batched_tokens=auto",
        "scheduler.capacity_scheduler_policy=expected_peak",
    )
    patterns = ("--http-header-forward-pattern=(?i)x-.*", "--grpc-header-forward-pattern=x-.*")
    with (
        one_torch_thread(),
        running_server(
            model=small_checkpoint,
            settings=settings,
            facades=("tensorrt-llm",),
            tritonserver=patterns,
        ) as server,
    ):
        yield server


WAYS: dict[str, dict[str, Any]] = {
    "scheduler": {"text_input": "a", "sampling_parameters": {"max_tokens": 3, "ignore_eos": True}},
    "llm": {"text_input": "a", "sampling_parameters": {"max_tokens": 3, "ignore_eos": True}},
    "generate": {"text_input": "a", "sampling_parameters": {"max_tokens": 3, "ignore_eos": True}},
    "ensemble": {
        "text_input": np.array([[b"a"]], dtype=object),
        "max_tokens": np.array([[3]], dtype=np.int32),
    },
}


def ask(
    server: TritonServer,
    way: str,
    headers: dict[str, str],
    parameters: dict[str, Any] | None = None,
) -> None:
    """One request over gRPC.

    Raises:
        InferenceServerException: it is refused.
    """
    with GrpcStream(server, way, headers) as stream:
        list(stream.send(WAYS[way], parameters=parameters))


@pytest.mark.parametrize("way", WAYS)
def test_a_header_says_whose_a_request_is_on_every_way_in(
    header_server: TritonServer, way: str
) -> None:
    before = wait_idle(header_server)
    ask(header_server, way, {"x-tenant": "search", "x-other": "7"})
    name = 'charonia_tenant_requests_total{tenant="search"}'
    assert wait_idle(header_server)[name] - before.get(name, 0) == 1
    for headers in ({}, {"x-tenant": "thief"}):
        error = error_of(partial(ask, header_server, way, headers))
        assert f"tenant '{headers.get('x-tenant', '')}' is not known here" in error.message()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["tenant", "x-tenant", "X-Tenant"])
def test_a_request_cannot_say_that_it_is_another_ones(
    header_server: TritonServer, way: str, name: str
) -> None:
    headers, own = {"x-tenant": "stranger"}, {name: "search"}
    error = error_of(partial(ask, header_server, way, headers, own))
    assert "more than once" in error.message() or "not what the header" in error.message()


def test_over_http_the_header_counts_in_any_case(header_server: TritonServer) -> None:
    """But for `generate`, to which Triton gives no header, so that it is nobody's."""
    for header in ("X-Tenant", "x-tenant"):
        infer_http(header_server, WAYS["generate"], headers={header: "search"})
    error = error_of(
        lambda: infer_http(header_server, WAYS["generate"], headers={"X-Tenant": "thief"})
    )
    assert "tenant 'thief' is not known here" in error.message()
    body = {"text_input": "a", "max_tokens": 3}
    answer = HTTP.post(
        generate_url(header_server, "generate"), json=body, headers={"X-Tenant": "search"}
    )
    assert "tenant '' is not known here" in answer.text


def test_rows_and_tokens_of_a_step_may_be_chosen_by_the_scheduler(
    header_server: TritonServer,
) -> None:
    headers = {"x-tenant": "search"}
    with ThreadPoolExecutor(40) as pool:
        ends = [pool.submit(ask, header_server, way, headers) for way in ("llm", "scheduler") * 20]
        assert [end.result() for end in ends] == [None] * 40
    after = wait_idle(header_server)
    assert 16 <= after["charonia_max_rows"] <= 256
    assert 64 <= after["charonia_max_step_tokens"] < 4096


def test_the_page_of_metrics_knows_what_tenants_got(header_server: TritonServer) -> None:
    before = wait_idle(header_server)
    for tenant in ("search", ODD_NAME):
        ask(header_server, "generate", {"x-tenant": tenant})
    error_of(partial(ask, header_server, "generate", {"x-tenant": "thief"}))
    after = wait_idle(header_server)
    grown = {name: after[name] - before.get(name, 0) for name in after if "tenant=" in name}
    for metric, tenant, value in (
        ("tenant_requests_total", "search", 1),
        ("tenant_generation_tokens_total", "search", 3),
        ("ttft_target_met_total", "search", 1),
        ("inter_token_target_missed_total", "search", 1),
        ("tenant_rejections_total", "other", 0),  # an unknown tenant is an invalid request
    ):
        assert grown[f'charonia_{metric}{{tenant="{tenant}"}}'] == value, metric
    running = 'charonia_tenant_requests_running{tenant="search"}'
    assert wait_for(lambda: scrape(header_server)[running], lambda value: value == 0) == 0
    assert grown[f'charonia_tenant_requests_total{{tenant="{ODD_NAME}"}}'] == 1


@pytest.fixture(scope="module")
def pressed_server(small_checkpoint: Path) -> Iterator[TritonServer]:
    """It runs one request at a time, and soon finds that others wait for too long."""
    settings = (
        ONE_THREAD,
        "max_num_seqs=1",
        "scheduling_policy=priority",
        "scheduler.degradation_wait_s=0.001",
        "scheduler.degradation_ladder=max_tokens,rejection",
        "scheduler.degradation_max_tokens=8",
    )
    with (
        one_torch_thread(),
        running_server(model=small_checkpoint, settings=settings) as server,
    ):
        yield server


def test_under_pressure_answers_become_shorter_and_then_are_refused(
    pressed_server: TritonServer,
) -> None:
    def level() -> float:
        return scrape(pressed_server)["charonia_degradation_level"]

    sampling = {"max_tokens": 100, "ignore_eos": True}
    low = request_inputs(PROMPT, sampling | {"priority": 1}, return_num_output_tokens=True)
    assert level() == 0
    streams: list[LiveStream] = []

    def press() -> float:
        streams.extend(LiveStream(pressed_server.grpc_url, PROMPT, **sampling) for _ in range(4))
        return level()

    assert wait_for(press, lambda found: found == 2) == 2
    refused = error_of(lambda: infer_grpc(pressed_server, low))
    assert refused.status() == "StatusCode.UNAVAILABLE"
    assert "takes no requests of low priority; retry after" in refused.message()
    assert "[charonia:overloaded]" in refused.message()
    for stream in streams:
        assert stream.wait_over().error is None
        assert len(stream.token_ids) == sampling["max_tokens"], "those of others are what they were"
    assert wait_for(level, lambda found: found == 1) == 1
    answer = infer_grpc(pressed_server, low)
    assert answer.outputs["num_output_tokens"] == [8]
    after = wait_idle(pressed_server)
    assert after["charonia_capped_requests_total"] == 1
    assert after['charonia_rejections_total{reason="overloaded"}'] == 1
