"""`Client` and `AsyncClient`: the classes that users of the package work with.

Owns a client's settings and the choice of the transport. Must not know how requests travel
(see the transports) nor how attempts are made (see `streams`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Unpack
from urllib.parse import urlsplit

import httpx

from charonia_client import wire
from charonia_client.errors import (
    CharoniaClientError,
    ConnectionFailed,
    ServerError,
    from_http_status,
)
from charonia_client.exchange import Limits
from charonia_client.grpc_transport import AsyncGrpcTransport, GrpcTransport
from charonia_client.http_transport import AsyncHttpTransport, HttpTransport
from charonia_client.metrics import MetricsSnapshot, parse_metrics
from charonia_client.proxies import mounts_of
from charonia_client.retry import RetryPolicy
from charonia_client.streams import AsyncCompletionStream, CallSettings, CompletionStream
from charonia_client.values import (
    DEFAULT_INCLUDE,
    Chunk,
    Completion,
    EngineState,
    Health,
    Include,
    Protocol,
    Sampling,
    Timeouts,
    join,
)

_PORTS: Mapping[Protocol, int] = {"grpc": 8001, "http": 8000}
_METRICS_PORT = 8002
_CANCEL_S = 10.0
_PROBE_S = 5.0
_METRICS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Settings of both clients; see `Client` for their meaning."""

    url: str
    protocol: Protocol
    model: str
    metrics_url: str
    timeouts: Timeouts
    retry: RetryPolicy
    headers: Mapping[str, str] = field(default_factory=dict)
    credentials: Any = None

    @classmethod
    def make(
        cls,
        url: str | None,
        protocol: Protocol,
        model: str,
        metrics_url: str | None,
        timeouts: Timeouts | None,
        retry: RetryPolicy | None,
        headers: Mapping[str, str] | None,
        credentials: Any,
    ) -> "_Settings":
        if protocol not in _PORTS:
            raise ValueError(f"protocol must be 'grpc' or 'http', but is {protocol!r}")
        address = url or f"127.0.0.1:{_PORTS[protocol]}"
        has_scheme = "://" in address
        if protocol == "http" and not has_scheme:
            address = f"http://{address}"
        try:
            parts = urlsplit(address if "://" in address else f"//{address}")
            host = parts.hostname or "127.0.0.1"
            if protocol == "http":  # gRPC knows further forms
                _ = parts.port, httpx.URL(address)
        except (ValueError, httpx.InvalidURL) as error:
            raise ValueError(f"url must be host:port, but is {url!r}: {error}") from None
        host = f"[{host}]" if ":" in host else host
        return cls(
            url=address,
            protocol=protocol,
            model=model,
            metrics_url=metrics_url or f"http://{host}:{_METRICS_PORT}/metrics",
            timeouts=timeouts or Timeouts(),
            retry=retry or RetryPolicy(),
            headers=dict(headers or {}),
            credentials=credentials,
        )

    def generation(
        self,
        prompt: wire.Prompt,
        params: Sampling | None,
        sampling: Sampling,
        request_id: str | None,
        include: Collection[Include],
        timeouts: Timeouts | None,
        headers: Mapping[str, str] | None,
        *,
        wants_chunks: bool,
    ) -> tuple[wire.Request, CallSettings]:
        """Return a request for text, and the settings of its call.

        A completion is requested as one response where this loses nothing. It is streamed over
        HTTP, where Triton would not notice that its client has gone, and with a timeout to the
        first token. But the server does not stream `best_of`.
        """
        timeouts = timeouts or self.timeouts
        all_sampling: Sampling = {**(params or {}), **sampling}
        needs_chunks = self.protocol == "http" or timeouts.first_token_s is not None
        needs_chunks = needs_chunks and all_sampling.get("best_of") is None
        request = wire.generation_request(
            self.model,
            prompt,
            all_sampling,
            request_id=request_id,
            include=include,
            is_streaming=wants_chunks or needs_chunks,
            headers=headers,
        )
        return request, CallSettings(request.request_id, timeouts, self.retry)


class Client:
    """A client of one server. Its methods may be called from any thread, many at a time.

    Args:
        url: `host:port`, default 127.0.0.1 and Triton's port of the protocol. For HTTP also
            `http://…` or `https://…`.
        protocol: "grpc" has the least work per token, and cancels at once; "http" streams
            server-sent events.
        model: "scheduler", "llm" (the ensemble), or their names on the server.
        metrics_url: Triton's metrics page, default port 8002 of the same host.
        timeouts: of calls without their own.
        retry: `RetryPolicy(max_attempts=1)` never retries.
        headers: sent with every request; as metadata over gRPC.
        credentials: `grpc.ChannelCredentials` for TLS over gRPC.

    Methods raise the errors of `charonia_client.errors`.

    Raises:
        ValueError: the protocol is unknown, or the URL is none.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        protocol: Protocol = "grpc",
        model: str = "scheduler",
        metrics_url: str | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        headers: Mapping[str, str] | None = None,
        credentials: Any = None,
    ) -> None:
        self._settings = _Settings.make(
            url, protocol, model, metrics_url, timeouts, retry, headers, credentials
        )
        settings = self._settings
        self._transport: GrpcTransport | HttpTransport
        if protocol == "grpc":
            self._transport = GrpcTransport(settings.url, credentials, settings.headers)
        else:
            self._transport = HttpTransport(settings.url, settings.headers)

    def stream(
        self,
        prompt: wire.Prompt,
        params: Sampling | None = None,
        *,
        request_id: str | None = None,
        include: Collection[Include] = DEFAULT_INCLUDE,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        **sampling: Unpack[Sampling],
    ) -> CompletionStream:
        """Stream the answer to a prompt; with `n` above 1 the chunks of all samples as they come.

        Args:
            prompt: a text or token ids.
            params: sampling parameters; keyword arguments take precedence.
            request_id: default a random one. It need not be unique; `cancel` uses it.
            include: what chunks have beside text and finish reason. The sampling parameter
                `logprobs` adds log-probabilities.
            timeouts: instead of the client's.
            headers: sent beside the client's, such as a `traceparent`.

        Raises:
            InvalidRequest: the request cannot be encoded. The stream raises everything else.
        """
        request, call = self._settings.generation(
            prompt, params, sampling, request_id, include, timeouts, headers, wants_chunks=True
        )
        return self._open(request, call)

    def generate(
        self,
        prompt: wire.Prompt,
        params: Sampling | None = None,
        *,
        request_id: str | None = None,
        include: Collection[Include] = DEFAULT_INCLUDE,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """Generate the answer to a prompt, with all of its samples. Arguments as for `stream`.

        Raises:
            CharoniaClientError: it failed. Leaving early (KeyboardInterrupt) cancels the request.
        """
        request, call = self._settings.generation(
            prompt, params, sampling, request_id, include, timeouts, headers, wants_chunks=False
        )
        with self._open(request, call) as stream:
            return join(request.request_id, stream)

    def cancel(
        self, request_id: str, *, tenant: str = "", samples: Sequence[int] | None = None
    ) -> None:
        """Cancel all live requests of this id and tenant. Unknown ones are not an error.

        Args:
            samples: only the samples with these indexes. They end with the finish reason
                "cancelled", and the others go on; ended samples are not an error. None cancels
                the whole request, which ends with `Cancelled`.

        Raises:
            InvalidRequest: an index is out of range. CharoniaClientError: it failed.
        """
        request = wire.cancel_request(self._settings.model, request_id, tenant, samples)
        try:
            self._transport.send(request, Limits(_CANCEL_S, _CANCEL_S, None))
        except CharoniaClientError as error:
            error.request_id = request_id
            raise

    def health(self, models: Sequence[str] | None = None) -> Health:
        """Ask whether the server and these models are ready. Does not raise if they are not.

        Args:
            models: default the client's model.
        """
        return self._transport.health(self._models(models))

    def probe(self) -> EngineState:
        """Ask the scheduler for its state and its engine's. It answers while the engine is down.

        A probe takes no place in the queue. `health` asks only Triton, which knows less. The
        client's model must be the scheduler; other models have no probe.

        Raises:
            CharoniaClientError: it does not answer.
        """
        request = wire.probe_request(self._settings.model)
        exchange = self._transport.open(request, Limits(_PROBE_S, _PROBE_S, None))
        try:
            chunks = exchange.receive()
        finally:
            exchange.finish()
        return _read_state(chunks)

    def metrics(self) -> MetricsSnapshot:
        """Return all current metrics of the server."""
        url = self._settings.metrics_url
        with httpx.Client(timeout=_METRICS_S, mounts=mounts_of(url)) as http:
            try:
                page = http.get(url)
            except httpx.TransportError as error:
                raise ConnectionFailed(f"{url}: {error}") from None
        return _read_metrics(page)

    def close(self) -> None:
        """Close all connections; running streams end with an error."""
        self._transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, request: wire.Request, call: CallSettings) -> CompletionStream:
        transport = self._transport
        return CompletionStream(call, lambda limits: transport.open(request, limits))

    def _models(self, models: Sequence[str] | None) -> tuple[str, ...]:
        return (self._settings.model,) if models is None else tuple(models)


class AsyncClient:
    """The asyncio client; arguments as for `Client`. Belongs to one event loop."""

    def __init__(
        self,
        url: str | None = None,
        *,
        protocol: Protocol = "grpc",
        model: str = "scheduler",
        metrics_url: str | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        headers: Mapping[str, str] | None = None,
        credentials: Any = None,
    ) -> None:
        self._settings = _Settings.make(
            url, protocol, model, metrics_url, timeouts, retry, headers, credentials
        )
        # Made on first use, in the event loop that it then belongs to.
        self._made: AsyncGrpcTransport | AsyncHttpTransport | None = None

    def stream(
        self,
        prompt: wire.Prompt,
        params: Sampling | None = None,
        *,
        request_id: str | None = None,
        include: Collection[Include] = DEFAULT_INCLUDE,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncCompletionStream:
        """See `Client.stream`."""
        request, call = self._settings.generation(
            prompt, params, sampling, request_id, include, timeouts, headers, wants_chunks=True
        )
        return self._open(request, call)

    async def generate(
        self,
        prompt: wire.Prompt,
        params: Sampling | None = None,
        *,
        request_id: str | None = None,
        include: Collection[Include] = DEFAULT_INCLUDE,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """See `Client.generate`; cancelling the task cancels the request."""
        request, call = self._settings.generation(
            prompt, params, sampling, request_id, include, timeouts, headers, wants_chunks=False
        )
        chunks: list[Chunk] = []
        async with self._open(request, call) as stream:
            async for chunk in stream:
                chunks.append(chunk)  # noqa: PERF401
        return join(request.request_id, chunks)

    async def cancel(
        self, request_id: str, *, tenant: str = "", samples: Sequence[int] | None = None
    ) -> None:
        """See `Client.cancel`."""
        request = wire.cancel_request(self._settings.model, request_id, tenant, samples)
        try:
            await self._transport.send(request, Limits(_CANCEL_S, _CANCEL_S, None))
        except CharoniaClientError as error:
            error.request_id = request_id
            raise

    async def health(self, models: Sequence[str] | None = None) -> Health:
        """See `Client.health`."""
        wanted = (self._settings.model,) if models is None else tuple(models)
        return await self._transport.health(wanted)

    async def probe(self) -> EngineState:
        """See `Client.probe`."""
        request = wire.probe_request(self._settings.model)
        exchange = await self._transport.open(request, Limits(_PROBE_S, _PROBE_S, None))
        try:
            chunks = await exchange.receive()
        finally:
            await exchange.finish()
        return _read_state(chunks)

    async def metrics(self) -> MetricsSnapshot:
        """See `Client.metrics`."""
        url = self._settings.metrics_url
        async with httpx.AsyncClient(timeout=_METRICS_S, mounts=mounts_of(url)) as http:
            try:
                page = await http.get(url)
            except httpx.TransportError as error:
                raise ConnectionFailed(f"{url}: {error}") from None
        return _read_metrics(page)

    async def close(self) -> None:
        """Close all connections; running streams end with an error."""
        if self._made is not None:
            await self._made.close()
            self._made = None

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def _transport(self) -> AsyncGrpcTransport | AsyncHttpTransport:
        settings = self._settings
        if self._made is None and settings.protocol == "grpc":
            self._made = AsyncGrpcTransport(settings.url, settings.credentials, settings.headers)
        elif self._made is None:
            self._made = AsyncHttpTransport(settings.url, settings.headers)
        return self._made

    def _open(self, request: wire.Request, call: CallSettings) -> AsyncCompletionStream:
        transport = self._transport
        return AsyncCompletionStream(call, lambda limits: transport.open(request, limits))


def _read_state(chunks: Sequence[Chunk] | None) -> EngineState:
    if not chunks:
        raise ServerError("a probe has no answer")
    return wire.read_state(chunks[0].text)


def _read_metrics(page: httpx.Response) -> MetricsSnapshot:
    if page.status_code != httpx.codes.OK:
        raise from_http_status(page.status_code, f"{page.url}: HTTP status {page.status_code}")
    return parse_metrics(page.text)
