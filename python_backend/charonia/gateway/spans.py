"""The gateway's spans: one per request, in which the servers' spans are.

Owns their names and attributes: those of OpenTelemetry's conventions for HTTP servers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from charonia.gateway.observing import MAX_PATH, MAX_REASON, UNKNOWN_ROUTE, Record
from charonia.tracing.exporter import TraceProvider

_FORM = TraceContextTextMapPropagator()


class Spans:
    """Makes the spans of one gateway.

    Args:
        endpoint, rate, log: see `TraceProvider`.

    Raises:
        ConfigError: the endpoint is wrong.
    """

    def __init__(self, endpoint: str, rate: int, *, log: Callable[[str], None]) -> None:
        self._provider = TraceProvider(endpoint, rate=rate, log=log)
        self._tracer = self._provider.tracer

    def begin(self, scope: Scope, traceparent: str | None) -> "HttpSpan":
        """Begin the span of a request. A `traceparent` that is not valid begins a new trace."""
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        span = self._tracer.start_span(
            scope["method"],
            context=_FORM.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"][:MAX_PATH],
                "url.scheme": scope["scheme"],
            },
        )
        own: dict[str, str] = {}
        _FORM.inject(own, set_span_in_context(span))
        return HttpSpan(span, own["traceparent"] if span.is_recording() else None)

    def close(self) -> None:
        """Send what is left, within a second."""
        self._provider.close()


@dataclass(frozen=True)
class HttpSpan:
    """Implements `RequestSpan`."""

    span: Span
    traceparent: str | None

    def end(self, scope: Scope, record: Record) -> None:
        """See `RequestSpan`. A client that left is no error of the server's."""
        span, status = self.span, int(record.status or 0)
        route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("charonia.request_id", record.request_id)
        if record.tenant is not None:
            span.set_attribute("charonia.tenant", record.tenant)
        if record.prompt_tokens:
            span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", record.completion_tokens)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            reason = record.reason and record.reason[:MAX_REASON]
            span.set_status(Status(StatusCode.ERROR, reason))
            span.set_attribute("error.type", str(status))
        span.end()
