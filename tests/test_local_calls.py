"""Calls to servers on this machine: past the proxy of the environment, without keeping anything."""

import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from charonia.local_calls import grpc_client, http_client

NUM_MODELS = 50_000
"""With names that take more than gRPC's own limit of 4 MiB."""


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


class Index(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with an index of many models."""

    def RepositoryIndex(
        self, request: object, context: object
    ) -> service_pb2.RepositoryIndexResponse:
        model = service_pb2.RepositoryIndexResponse.ModelIndex(name="x" * 100)
        return service_pb2.RepositoryIndexResponse(models=[model] * NUM_MODELS)


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
def test_grpc_goes_past_a_proxy_and_takes_long_answers() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Index(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc_client(f"127.0.0.1:{port}") as client:
            index = client.get_model_repository_index(client_timeout=60.0)
            assert len(index.models) == NUM_MODELS
    finally:
        server.stop(None).wait()
