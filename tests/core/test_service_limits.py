"""The service refuses what exceeds its limits, and counts by tenant what it refuses."""

import json
import threading

import pytest

from charonia.errors import (
    LateRequestError,
    QueueFullError,
    RateLimitedError,
    UnavailableError,
    error_of,
)
from charonia.protocol import SamplingParams
from core.service_bench import Client, Gated, make_service, wait_until_up
from support.echo import EchoExecutor
from support.waiting import WAIT_S


def test_a_full_queue_is_refused_at_once():
    executor = Gated(max_num_seqs=2)
    service = make_service(executor, max_queue_size=3)
    wait_until_up(service)
    client = Client(service)
    for index in range(5):
        client.submit(f"r{index}", max_tokens=50)
    with pytest.raises(QueueFullError):
        client.submit("one too many")
    executor.may_step.set()
    assert service.metrics.counters["charonia_rejections_total", "queue_full"] == 1
    for index in range(5):
        assert client.wait(f"r{index}")[-1].finish_reason == "length"
    service.close()


def test_what_a_tenant_may_have_is_counted_from_coming_to_end(tmp_path):
    tenants = tmp_path / "tenants.json"
    tenants.write_text('{"tenants": {"a": {"max_concurrency": 2, "max_queue_size": 1}}}')
    executor = Gated(max_num_seqs=8)
    service = make_service(executor, tenants_file=str(tenants))
    wait_until_up(service)
    client = Client(service)
    client.submit("first", tenant="a")
    assert executor.is_asked.wait(WAIT_S)
    client.submit("second", tenant="a")
    with pytest.raises(RateLimitedError):
        client.submit("third", tenant="a")
    assert service.metrics.counters["charonia_rejections_total", "rate_limited"] == 1
    executor.may_step.set()
    for key in ("first", "second"):
        assert client.wait(key)[-1].finish_reason == "length"
    client.submit("third", tenant="a")
    assert client.wait("third")[-1].finish_reason == "length"
    service.close()


def test_whom_a_full_queue_refuses_has_missed_its_targets(tmp_path):
    tenants = tmp_path / "tenants.json"
    own = {"max_queue_size": 1, "ttft_target_ms": 1e6}
    targets = {"a": {"ttft_target_ms": 1e6}, "own": own}
    tenants.write_text(json.dumps({"tenants": targets}))
    executor = Gated(max_num_seqs=1)
    service = make_service(executor, tenants_file=str(tenants), max_queue_size=2)
    wait_until_up(service)
    client = Client(service)
    client.submit("first", tenant="a")
    assert executor.is_asked.wait(WAIT_S)
    client.submit("second", tenant="own")
    with pytest.raises(QueueFullError, match="of tenant 'own'"):
        client.submit("third", tenant="own", deadline_ms=10**6)
    client.submit("fourth", tenant="a")
    with pytest.raises(QueueFullError, match="Maximum queue size of 2 is"):
        client.submit("fifth", tenant="a", deadline_ms=10**6)
    executor.may_step.set()
    for key in ("first", "second", "fourth"):
        assert client.wait(key)[-1].finish_reason == "length"
    service.close()
    counters = service.metrics.counters
    for kind in ("tenant_queue_full", "queue_full"):
        assert counters["charonia_rejections_total", kind] == 1, kind
    for metric, tenant, num in (
        ("ttft_target_met", "a", 2),
        ("ttft_target_missed", "a", 1),
        ("deadline_missed", "a", 1),
        ("ttft_target_met", "own", 1),
        ("ttft_target_missed", "own", 0),
        ("deadline_missed", "own", 0),
    ):
        assert counters[f"charonia_{metric}_total", tenant] == num, (metric, tenant)


@pytest.mark.parametrize(
    ("kind", "num_missed"),
    [
        *[(kind, 1) for kind in ("queue_full", "late", "overloaded", "timeout", "internal")],
        *[(kind, 1) for kind in ("engine_down", "shutting_down", "unavailable")],
        *[(kind, 0) for kind in ("rate_limited", "invalid_request", "prompt_too_long")],
        *[(kind, 0) for kind in ("not_supported", "cancelled", "tenant_queue_full")],
    ],
)
def test_a_refusal_is_a_missed_deadline_unless_it_is_the_clients_own_doing(kind, num_missed):
    service = make_service(EchoExecutor())
    service.count_rejection(error_of("no", kind), SamplingParams(deadline_ms=1000))
    service.close()
    assert service.metrics.counters["charonia_deadline_missed_total", "other"] == num_missed


@pytest.mark.parametrize(
    ("kind", "num"),
    [
        *[(kind, 1) for kind in ("queue_full", "rate_limited", "overloaded", "late", "timeout")],
        *[(kind, 1) for kind in ("engine_down", "shutting_down", "unavailable")],
        ("tenant_queue_full", 1),
        *[(kind, 0) for kind in ("invalid_request", "prompt_too_long", "not_supported")],
    ],
)
def test_an_invalid_request_does_not_count_as_a_refusal_of_its_tenant(kind, num):
    service = make_service(EchoExecutor())
    service.count_rejection(error_of("no", kind), SamplingParams(tenant="a"))
    service.close()
    counters = service.metrics.counters
    assert counters["charonia_tenant_rejections_total", "other"] == num
    assert counters["charonia_rejections_total", kind if num else "invalid"] == 1


def test_who_would_be_late_is_counted_as_that():
    service = make_service(Gated(max_num_seqs=1))
    service.count_rejection(LateRequestError("it would wait", retry_after_s=1.5))
    service.count_rejection(UnavailableError("it is down"))
    rejections = service.metrics.counters
    assert rejections["charonia_rejections_total", "late"] == 1
    assert rejections["charonia_rejections_total", "unavailable"] == 1
    service.close()


def test_the_queue_takes_no_more_while_those_that_were_accepted_are_on_their_way(monkeypatch):
    service = make_service(EchoExecutor(max_num_seqs=2), max_queue_size=3)
    wait_until_up(service)
    client = Client(service)
    add = service._core.add
    is_taken = {key: threading.Event() for key in ("first", "second")}
    may_go_on = {key: threading.Event() for key in ("first", "second")}

    def add_slowly(request, events, arrived_at):
        if request.key in is_taken:
            is_taken[request.key].set()
            assert may_go_on[request.key].wait(WAIT_S)
        return add(request, events, arrived_at)

    monkeypatch.setattr(service._core, "add", add_slowly)
    client.submit("first")
    assert is_taken["first"].wait(WAIT_S)
    others = ("second", "third", "fourth", "fifth")
    for key in others:
        client.submit(key)
    may_go_on["first"].set()
    assert is_taken["second"].wait(WAIT_S)
    with pytest.raises(QueueFullError):
        client.submit("sixth")
    may_go_on["second"].set()
    for key in others:
        assert client.wait(key)[-1].finish_reason == "length"
    service.close()
