"""One record per request: its id, its log line, and the gateway's own metrics.

Owns what is measured and logged, and the middleware that sees each request begin and end. Must not
know what requests ask for.

The middleware is plain ASGI. One that wraps responses would buffer streams and hide that a
client has left.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia.events import Log, debug_event, event, request_fields, warning_event
from charonia.gateway.connections import abort
from charonia.gateway.figures import Figures
from charonia.protocol.sampling_params import MAX_CHARACTERS
from charonia.tracing.traceparent import parse_traceparent, trace_id_of

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
UNKNOWN_ROUTE = "other"
MAX_PATH = 200
"""Limit for a path in the log, in characters."""
MAX_TENANT = MAX_CHARACTERS["tenant"]
"""Limit for a tenant in the log, in characters; one that is longer is refused by the scheduler."""
MAX_REASON = 500
"""Limit for a reason in the log, in characters."""


class RequestSpan(Protocol):
    """The span of one request."""

    @property
    def traceparent(self) -> str | None:
        """W3C trace context of what is done for it; None if it is not sampled."""
        ...

    def end(self, scope: Scope, record: "Record") -> None:
        """End it, with what is known of its answer."""
        ...


BeginSpan = Callable[[Scope, str | None], RequestSpan]
"""Begins the span of a scope's request, which came with this `traceparent`, or without one."""


class Metrics:
    """Metrics of one gateway.

    Attributes:
        registry: holds all of them but `figures`.
    """

    def __init__(self) -> None:
        self.figures = Figures()
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "charonia_gateway_requests",
            "Requests that have ended, by their status; 499: the client left.",
            ["route", "status"],
        )
        self.batch_entries = counter(
            "charonia_gateway_batch_entries",
            "Entries of batches that were answered, by the status that each would have alone.",
            ["status"],
        )
        self.in_flight = gauge(
            "charonia_gateway_requests_in_flight", "Requests that are being answered."
        )
        self.seconds = histogram(
            "charonia_gateway_request_seconds",
            "From the first byte of a request to the last one of its answer.",
            ["route"],
            buckets=_SECONDS,
        )
        self.first_token_seconds = histogram(
            "charonia_gateway_time_to_first_token_seconds",
            "From the first byte of a request to the first token of its stream.",
            buckets=_SECONDS,
        )
        self.inter_token_seconds = histogram(
            "charonia_gateway_inter_token_seconds",
            "Between a token of a stream and the next one, of each sample.",
            buckets=_TOKEN_SECONDS,
        )
        self.prompt_tokens = counter(
            "charonia_gateway_prompt_tokens", "Of requests with an answer."
        )
        self.completion_tokens = counter(
            "charonia_gateway_completion_tokens", "That were sent to clients."
        )
        self.retries = counter(
            "charonia_gateway_retries",
            "Requests that a server did not take, and another one was asked.",
            ["server"],
        )
        self.fallbacks = counter(
            "charonia_gateway_fallbacks",
            "Requests, or entries of a batch, that the fallback model was asked to answer.",
        )
        self.tasks = gauge(
            "charonia_gateway_tasks",
            "Tasks of the event loop: a few, and some per request that is being answered.",
        )
        self.outstanding = gauge(
            "charonia_gateway_server_requests",
            "Requests of this gateway that a server has.",
            ["server"],
        )
        self.breaker_open = gauge(
            "charonia_gateway_server_resting",
            "Whether a server is not asked because it failed.",
            ["server"],
        )


@dataclass
class Record:
    """The record of one request.

    Attributes:
        started_at: on the monotonic clock. status: None until an answer begins.
        reason: why it ended early, or why an entry of its batch failed first; None without either.
        num_entries: entries of its batch that were answered. num_failed: those with an error.
        key_tenant: the tenant of its API key. named_tenant: the tenant that its body names; of a
            batch, the one that all entries name.
        fallback: the model that was asked instead of the one that is served.
        trace_id: of its trace; None if it came without and is not traced here.
        traceparent: W3C trace context of what is asked for it; None if it is not traced.
    """

    request_id: str
    started_at: float
    metrics: Metrics
    status: int | None = None
    reason: str | None = None
    num_entries: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    key_tenant: str | None = None
    named_tenant: str | None = None
    fallback: str | None = None
    trace_id: str | None = None
    traceparent: str | None = None

    @property
    def tenant(self) -> str | None:
        """The tenant that it counts for, or is refused for; None if it names none."""
        return self.key_tenant or (self.named_tenant or "")[:MAX_TENANT] or None

    @property
    def log_fields(self) -> dict[str, str | None]:
        """The fields of lines that concern it."""
        return request_fields(
            request_id=self.request_id, tenant=self.tenant, trace_id=self.trace_id
        )

    @property
    def trace_headers(self) -> Mapping[str, str]:
        """Headers that make the servers' spans part of its trace."""
        return {} if self.traceparent is None else {"traceparent": self.traceparent}

    @property
    def seconds(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self.started_at

    def first_token(self) -> None:
        """Note the first token."""
        if self.first_token_s is None:
            self.first_token_s = self.seconds
            self.metrics.figures.note_first_token(self.first_token_s)

    def count_tokens(self, count: int) -> None:
        """Note tokens that came."""
        self.completion_tokens += count
        self.metrics.figures.note_tokens(count)

    def note_gap(self, seconds: float, count: int) -> None:
        """Note that so many tokens came so long after the token before them."""
        for _ in range(count):
            self.metrics.inter_token_seconds.observe(seconds / count)

    def note_fallback(self, model: str) -> None:
        """Note that the fallback model is asked for an answer."""
        self.fallback = model
        self.metrics.fallbacks.inc()

    def note_entry(self, status: int, reason: str | None) -> None:
        """Note the answer to an entry of a batch.

        Args:
            reason: why it failed; None if it did not.
        """
        self.metrics.batch_entries.labels(str(int(status))).inc()
        self.num_entries += 1
        if reason is not None:
            self.num_failed += 1
            self.reason = self.reason or reason

    def note_answer(self, num_tokens: int, seconds: float) -> None:
        """Note that a prompt was answered, so many seconds after the request came."""
        self.metrics.figures.note_answer(num_tokens, seconds)


def record_of(scope: Scope) -> Record:
    """Return the record of a scope's request."""
    record = scope["state"]["record"]
    assert isinstance(record, Record)
    return record


class Observed:
    """Middleware that keeps the records.

    Args:
        log: takes the lines.
        quiet: paths that are polled; they are logged only on failure.
        send_s: timeout for the client to take a part of an answer; then the connection is aborted.
        begin_span: returns the span of a request that is not quiet; None if there are no traces.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        log: Log,
        quiet: frozenset[str],
        send_s: float,
        begin_span: BeginSpan | None = None,
    ) -> None:
        self._send_s = send_s
        self._begin_span = begin_span
        self._app = app
        self._metrics = metrics
        self._log = log
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(16)
        record = Record(request_id, time.monotonic(), self._metrics)
        scope.setdefault("state", {})["record"] = record
        span = self._span(scope, record)
        record.trace_id = trace_id_of(record.traceparent or headers.get("traceparent"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            try:
                async with asyncio.timeout(self._send_s):
                    await send(message)
            except TimeoutError:
                abort(scope)

        if self._log.shows("debug") and scope["path"] not in self._quiet:
            self._log(debug_event("request_received", **record.log_fields, **_asked(scope)))
        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            record.status = HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            self._metrics.in_flight.dec()
            self._note(scope, record)
            if span is not None:
                span.end(scope, record)

    def _span(self, scope: Scope, record: Record) -> "RequestSpan | None":
        """Begin the span of a request, if it is traced here, and continue its trace anyway."""
        context = parse_traceparent(Headers(scope=scope).get("traceparent"))
        # Written anew: gRPC refuses some headers that HTTP takes.
        given = None if context is None else context.traceparent
        if self._begin_span is not None and scope["path"] not in self._quiet:
            span = self._begin_span(scope, given)
            record.traceparent = span.traceparent
            return span
        # Triton traces whatever comes with a context, sampled or not.
        record.traceparent = given if context is not None and context.is_sampled else None
        return None

    def _note(self, scope: Scope, record: Record) -> None:
        seconds = record.seconds
        status = record.status or 0
        metrics = self._metrics
        route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
        metrics.requests.labels(route, str(int(status))).inc()
        metrics.seconds.labels(route).observe(seconds)
        if record.first_token_s is not None:
            metrics.first_token_seconds.observe(record.first_token_s)
        metrics.prompt_tokens.inc(record.prompt_tokens)
        metrics.completion_tokens.inc(record.completion_tokens)
        if scope["path"] in self._quiet and status < 400:
            return
        make = warning_event if status >= HTTPStatus.INTERNAL_SERVER_ERROR else event
        self._log(
            make(
                "request",
                **record.log_fields,
                **_asked(scope),
                status=int(status),
                seconds=seconds,
                entries=record.num_entries or None,
                failed=record.num_failed or None,
                prompt_tokens=record.prompt_tokens or None,
                completion_tokens=record.completion_tokens or None,
                fallback=record.fallback,
                reason=record.reason and record.reason[:MAX_REASON],
            )
        )


def _asked(scope: Scope) -> dict[str, str]:
    return {"method": scope["method"], "path": scope["path"][:MAX_PATH]}
