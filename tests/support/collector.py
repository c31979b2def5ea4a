"""A collector of OpenTelemetry spans: takes OTLP over HTTP and over gRPC, and keeps what it got.

Owns both servers, and the messages' forms: protobuf, and the JSON that tritonserver sends.
"""

import base64
import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.e2e import wait_for

_IDS = ("traceId", "spanId", "parentSpanId")


@dataclass(frozen=True)
class Span:
    """One span. Ids are hexadecimal; `parent_id` is empty for the first of a trace."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    is_error: bool
    via: str


class Collector:
    """Servers for both protocols, on free ports of this machine.

    Attributes:
        http_endpoint, grpc_endpoint: as exporters want them. paths: of the HTTP requests.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._errors: list[Exception] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.add(self.path)
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                is_json = self.headers["content-type"].startswith("application/json")
                collector._take(_from_json(body) if is_json else _from_bytes(body), "http")
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 128

        self._http = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        self.http_endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(self), self._grpc)
        self.grpc_endpoint = f"grpc://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()

    def spans(self, trace_id: str) -> list[Span]:
        """Return the spans of this trace so far."""
        with self._lock:
            return [span for span in self._spans if span.trace_id == trace_id]

    def traces(self) -> set[str]:
        """Ids of all traces so far."""
        with self._lock:
            return {span.trace_id for span in self._spans}

    def wait(self, trace_id: str, is_enough: Callable[[list[Span]], bool]) -> list[Span]:
        """Wait until the spans of this trace are enough: exporters send every few seconds."""
        return wait_for(lambda: self.spans(trace_id), is_enough)

    def close(self) -> None:
        """Stop both. Raises what could not be understood."""
        self._grpc.stop(None)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        if self._errors:
            raise ExceptionGroup("spans that could not be understood", self._errors)

    def _take(self, request: ExportTraceServiceRequest, via: str) -> None:
        with self._lock:
            try:
                self._spans += list(_spans_of(request, via))
            except Exception as error:
                self._errors.append(error)
                raise


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector for the duration of this context."""
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        self._collector._take(request, "grpc")
        return ExportTraceServiceResponse()


def _spans_of(request: ExportTraceServiceRequest, via: str) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    via,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _from_bytes(body: bytes) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(body)


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    """Parse OTLP's JSON, which has hexadecimal ids instead of protobuf's own base64."""
    return ParseDict(
        _with_base64(json.loads(body)), ExportTraceServiceRequest(), ignore_unknown_fields=True
    )


def _with_base64(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_base64(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: base64.b64encode(bytes.fromhex(one)).decode()
        if name in _IDS and isinstance(one, str)
        else _with_base64(one)
        for name, one in value.items()
    }
