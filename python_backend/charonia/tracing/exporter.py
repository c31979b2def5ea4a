"""Sends traces by OTLP, with the opentelemetry packages.

Owns the spans' form. Must not know what is traced.

The packages read the usual environment: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_MAX_QUEUE_SIZE and the like. Spans that a collector does not
take in time are dropped; requests never wait for one.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from charonia.events import RareLog, warning_event
from charonia.tracing.endpoint import check_endpoint, traces_url
from charonia.tracing.request_trace import RequestTrace
from charonia.tracing.traceparent import TraceContext, parse_traceparent

SERVICE = "charonia"
CLOSE_S = 1.0
"""Time for which the end of a process waits for the collector, in seconds."""
_NANOSECONDS = 1e9


class TraceProvider:
    """Spans of one process and their way to a collector.

    Args:
        endpoint: `http://host:port` or https, with the path of a collector's OTLP/HTTP or without
            (then `/v1/traces`); or `grpc://host:port` or grpcs.
        rate: of requests that come without a context one in `rate` is traced; 0 is none.
        log: takes one line, from any thread.

    Raises:
        ConfigError: the endpoint is none of these.
    """

    def __init__(self, endpoint: str, *, rate: int = 1, log: Callable[[str], None]) -> None:
        exporter = _exporter(endpoint)
        _log_warnings(log)
        has_name = "OTEL_SERVICE_NAME" in os.environ or f"{SERVICE_NAME}=" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        self._provider = TracerProvider(
            resource=Resource.create({} if has_name else {SERVICE_NAME: SERVICE}),
            sampler=ParentBased(TraceIdRatioBased(1 / rate if rate else 0.0)),
            shutdown_on_exit=False,
        )
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)

    @property
    def tracer(self) -> Tracer:
        """Makes spans."""
        return self._provider.get_tracer(SERVICE)

    def close(self) -> None:
        """Send what is left, within `CLOSE_S`."""
        # The packages' own limits are of many seconds.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_S)


class RequestTracer:
    """Makes the traces of the scheduler's requests, and exports them. For all threads.

    Args:
        endpoint, log: see `TraceProvider`.

    Raises:
        ConfigError: the endpoint is wrong.
    """

    def __init__(self, endpoint: str, *, log: Callable[[str], None]) -> None:
        self._provider = TraceProvider(endpoint, log=log)
        self._tracer = self._provider.tracer

    def begin(self, traceparent: str | None, arrived_at: float) -> RequestTrace | None:
        """Begin the trace of a request; None if its context is not sampled, or it has none.

        Args:
            arrived_at: by the monotonic clock.
        """
        context = parse_traceparent(traceparent)
        if context is None or not context.is_sampled:
            return None
        return RequestTrace(context, arrived_at, self._export)

    def close(self) -> None:
        """Send what is left, within `CLOSE_S`."""
        self._provider.close()

    def _export(self, trace: RequestTrace) -> None:
        offset = time.time() - time.monotonic()

        def epoch(at: float) -> int:
            return int((at + offset) * _NANOSECONDS)

        assert trace.ended_at is not None
        request = self._tracer.start_span(
            "request",
            context=set_span_in_context(_remote(trace.context)),
            start_time=epoch(trace.arrived_at),
            attributes=trace.attributes,
        )
        if trace.error is not None:
            text, kind = trace.error
            request.set_status(Status(StatusCode.ERROR, text))
            request.set_attribute("error.type", kind)
        below = set_span_in_context(request)
        for part in list(trace.spans):
            span = self._tracer.start_span(
                part.name,
                context=below,
                start_time=epoch(part.began_at),
                attributes=dict(part.attributes),
            )
            span.end(epoch(part.ended_at))
        request.end(epoch(trace.ended_at))


def _remote(context: TraceContext) -> NonRecordingSpan:
    flags = TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT)
    return NonRecordingSpan(
        SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags)
    )


def _exporter(endpoint: str) -> SpanExporter:
    check_endpoint(endpoint)
    parts = urlsplit(endpoint)
    if parts.scheme in ("grpc", "grpcs"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=parts.netloc, insecure=parts.scheme == "grpc")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=traces_url(endpoint))


class _ToLog(logging.Handler):
    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._log = RareLog(log)

    def emit(self, record: logging.LogRecord) -> None:
        self._log(warning_event("traces_not_sent", reason=record.getMessage()))


def _log_warnings(log: Callable[[str], None]) -> None:
    """Log the packages' warnings, such as of a collector that does not answer."""
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_ToLog(log)]
    logger.propagate = False
