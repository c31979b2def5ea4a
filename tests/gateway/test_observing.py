"""What an operator sees of a gateway: its metrics, its log, its state."""

from prometheus_client.parser import text_string_to_metric_families

from charonia.launch.server.tritonserver import TritonServer
from support.gateway import Gateway

TEXT = "/v1/completions"


def test_requests_and_tokens_are_counted(gateway: Gateway, server: TritonServer) -> None:
    before = gateway.metrics()
    body = {"prompt": "def f(", "max_tokens": 7, "ignore_eos": True}
    gateway.http.post(TEXT, json=body)
    gateway.http.post(TEXT, json=body | {"stream": True})
    gateway.http.post(TEXT, json=body | {"top_p": 9})
    gateway.http.get("/no/such/path")
    after = gateway.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    route = "charonia_gateway_requests_total{route="
    assert grown(route + '"/v1/completions",status="200"}') == 2
    assert grown(route + '"/v1/completions",status="400"}') == 1
    assert grown(route + '"other",status="404"}') == 1, "no label of a stranger's choice"
    assert grown("charonia_gateway_completion_tokens_total") == 14
    assert grown("charonia_gateway_prompt_tokens_total") == 2 * 5
    assert grown("charonia_gateway_time_to_first_token_seconds_count") == 1
    assert grown('charonia_gateway_request_seconds_count{route="/v1/completions"}') == 3
    assert after["charonia_gateway_requests_in_flight"] == 1
    assert after[f'charonia_gateway_server_requests{{server="{server.grpc_url}"}}'] == 0


def test_the_page_of_metrics_is_one(gateway: Gateway) -> None:
    page = gateway.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(page.text)}
    assert all(name.startswith("charonia_gateway_") for name in names)
    head = gateway.http.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == page.headers["content-type"]


def test_health_may_be_asked_for_without_a_body(gateway: Gateway) -> None:
    """Some load balancers probe with HEAD."""
    for path in ("/health/live", "/health/ready", "/v1/health"):
        head = gateway.http.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-length"] == gateway.http.get(path).headers["content-length"]


def test_a_request_is_known_by_the_id_that_its_client_gave(gateway: Gateway) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    reply = gateway.http.post(TEXT, json=body, headers={"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.json()["id"] == "cmpl-mine-1"
    line = gateway.wait_line("request request_id=mine-1")
    assert "status=200" in line
    assert "completion_tokens=1" in line
    for strange in (b"a b", b"x" * 200, b'a"', "ä".encode()):
        reply = gateway.http.post(TEXT, json=body, headers=[(b"x-request-id", strange)])
        assert len(reply.headers["x-request-id"]) == 32


def test_a_trace_context_that_grpc_would_refuse_harms_nobody(gateway: Gateway) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for end in (b"-\xe9", b"-\xa0", b"\xa0", b"-" + b"x" * 20_000):
        header = b"01-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01" + end
        reply = gateway.http.post(TEXT, json=body, headers=[(b"traceparent", header)])
        assert reply.status_code == 200, (end[:9], reply.text)


def test_health_is_asked_without_a_line_in_the_log(gateway: Gateway) -> None:
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert gateway.http.get(path, headers={"x-request-id": "quiet"}).status_code == 200
    gateway.http.get("/v1/models", headers={"x-request-id": "loud"})
    gateway.wait_line("request request_id=loud")
    assert not any("request_id=quiet" in line for line in gateway.lines)
