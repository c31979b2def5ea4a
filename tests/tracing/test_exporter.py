"""Traces as a collector gets them, over both protocols."""

import time

import pytest

from charonia.errors import ConfigError
from charonia.tracing.endpoint import check_endpoint, traces_url
from charonia.tracing.exporter import RequestTracer
from support.collector import running_collector
from support.e2e import wait_for

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_trace_arrives_as_a_tree_below_its_context(protocol: str) -> None:
    lines: list[str] = []
    with running_collector() as collector:
        endpoint = collector.http_endpoint if protocol == "http" else collector.grpc_endpoint
        tracer = RequestTracer(endpoint, log=lines.append)
        now = time.monotonic()
        trace = tracer.begin(f"00-{TRACE}-{PARENT}-01", now)
        assert trace is not None
        trace.note_tokenized(now, now + 1, 12)
        trace.attributes["charonia.tenant"] = "a"
        trace.end(now + 3, error=("no", "timeout"))
        tracer.close()
        spans = {span.name: span for span in collector.wait(TRACE, lambda found: len(found) == 3)}
    request = spans["request"]
    assert request.parent_id == PARENT
    assert request.attributes == {"charonia.tenant": "a", "error.type": "timeout"}
    assert request.is_error
    assert request.ended_ns - request.began_ns == pytest.approx(3e9, rel=1e-6)
    assert abs(request.began_ns / 1e9 - time.time()) < 60
    for name in ("tokenize", "queue"):
        assert spans[name].parent_id == request.span_id
        assert spans[name].via == protocol
        assert spans[name].service == "charonia"
    assert spans["tokenize"].attributes == {"charonia.tokens": 12}
    assert lines == []


@pytest.mark.parametrize("context", [None, "nonsense", f"00-{TRACE}-{PARENT}-00"])
def test_without_a_sampled_context_there_is_no_trace(context: str | None) -> None:
    tracer = RequestTracer("http://127.0.0.1:1", log=lambda line: None)
    assert tracer.begin(context, 0.0) is None
    tracer.close()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "grpc://127.0.0.1:1"])
def test_a_collector_that_is_away_is_logged_and_holds_nothing_up(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    lines: list[str] = []
    tracer = RequestTracer(endpoint, log=lines.append)
    trace = tracer.begin(f"00-{TRACE}-{PARENT}-01", 0.0)
    assert trace is not None
    trace.end(1.0)
    assert wait_for(lambda: lines, bool)
    assert all(line.startswith("traces_not_sent level=warning reason=") for line in lines)
    tracer.close()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://collector/own/path", "https://collector/own/path"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_an_endpoint_has_a_default_path(endpoint: str, url: str) -> None:
    check_endpoint(endpoint)
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint", ["", "collector:4318", "ftp://a:1", "http://", "grpc://a", "http://a:port"]
)
def test_another_endpoint_is_refused_with_its_value(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"must be an OTLP collector's http://HOST:PORT") as error:
        check_endpoint(endpoint)
    assert repr(endpoint) in str(error.value)
