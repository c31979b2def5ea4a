"""Calls to servers on this machine: past the proxy of the environment, without keeping anything."""

import contextlib
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from tritonclient.grpc import InferenceServerClient, service_pb2, service_pb2_grpc

from charonia.local_calls import GRPC_OPTIONS, http_client


class Echo(BaseHTTPRequestHandler):
    """Answers with the request's header `Connection`."""

    def do_GET(self) -> None:
        body = self.headers["Connection"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class Live(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Says that it is live."""

    def ServerLive(self, request: object, context: object) -> service_pb2.ServerLiveResponse:
        return service_pb2.ServerLiveResponse(live=True)


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("behind_proxy")
def test_http_goes_past_a_proxy_and_closes_its_connection(url: str) -> None:
    with http_client() as client:
        assert client.get(url).text == "close"
    with http_client(base_url=f"{url}/v2/") as client:
        assert client.get("health").text == "close"


def test_a_client_reads_no_certificates(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it takes as long as 20 calls")

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", refuse)
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", refuse)
    with http_client() as client:
        assert client.get(url).status_code == 200


@pytest.mark.usefixtures("behind_proxy")
def test_grpc_goes_past_a_proxy() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Live(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        url = f"127.0.0.1:{port}"
        client = InferenceServerClient(url, channel_args=list(GRPC_OPTIONS))
        with contextlib.closing(client):
            assert client.is_server_live(client_timeout=10.0)
    finally:
        server.stop(None).wait()
