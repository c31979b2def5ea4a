"""Tenants on the real server: shares and limits of a file that changes while it runs."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from charonia.launch.run import running_server
from charonia.launch.server import TritonServer
from charonia_client import Client, RetryPolicy
from charonia_client.errors import RateLimited
from support.e2e import (
    ENDLESS,
    ENDLESS_BLOCKS,
    ONE_THREAD,
    error_of,
    generate,
    infer_grpc,
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
TENANTS = {"tenants": {"heavy": {"weight": 3}, "single": {"max_concurrency": 1}}}


@pytest.fixture(scope="module")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.json"
    path.write_text(json.dumps(TENANTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shared_server(endless_checkpoint: Path, tenants_file: Path) -> Iterator[TritonServer]:
    """It runs two requests at a time."""
    settings = (
        ONE_THREAD,
        ENDLESS_BLOCKS,
        "max_num_seqs=2",
        "scheduler.fair_share=true",
        f"scheduler.tenants_file={tenants_file}",
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


def test_tenants_that_wait_are_served_by_their_weights(shared_server: TritonServer) -> None:
    """Two requests of a third one keep both rows, until all others wait."""
    url, others = shared_server.grpc_url, 2 * NUM_EACH
    endless = {"max_tokens": ENDLESS, "ignore_eos": True}
    holders = [LiveStream(url, PROMPT, tenant="x", **endless) for _ in range(2)]
    for holder in holders:
        holder.wait_tokens(1)
    sampling = {"max_tokens": 16, "ignore_eos": True}
    streams = {
        tenant: [LiveStream(url, PROMPT, tenant=tenant, **sampling) for _ in range(NUM_EACH)]
        for tenant in ("heavy", "light")
    }
    waiting = "charonia_requests_waiting"
    assert wait_for(lambda: scrape(shared_server)[waiting], lambda count: count == others) == others
    for holder in holders:
        holder.leave()
    ends = sorted(
        (stream.wait_over().ended_at, tenant, stream.error)
        for tenant, of_tenant in streams.items()
        for stream in of_tenant
    )
    assert {error for _, _, error in ends} == {None}
    # By weight it is 6 of 8; clients may see the ends of neighbours the other way round.
    num_heavy = sum(tenant == "heavy" for _, tenant, _ in ends[:NUM_EACH])
    assert 5 <= num_heavy <= 7


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
    refused = 'charonia_rejections_total{reason="rate_limited"}'
    assert after[refused] - before[refused] == 4


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
