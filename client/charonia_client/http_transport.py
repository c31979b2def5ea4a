"""Requests over HTTP `generate_stream`, synchronous and asyncio.

Owns the connections of httpx and the reading of server-sent events with httpx-sse. Must not know
attempts, nor what the tensors mean.

Closing a response before its end closes its connection. That is how Triton learns that
nobody wants it any more. It never learns that for a plain `generate`, so that is not used.

The response's head comes with the first event. Until then a synchronous receive waits in httpx,
within `first_token_s` and `total_s`, and cannot be interrupted from another thread.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
from httpx_sse import EventSource, SSEError

from charonia_client import wire
from charonia_client.errors import (
    Cancelled,
    CharoniaClientError,
    ConnectionFailed,
    ConnectionLost,
    ServerError,
    Timeout,
    from_http_status,
    from_text,
)
from charonia_client.exchange import CLIENT_CLOSED, Limits
from charonia_client.proxies import mounts_of
from charonia_client.values import Chunk, Health

_CONNECT_S = 10.0
_HEALTH_S = 5.0
_FINISH_S = 1.0  # how long a stream may take to end after its last event
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)
_HEADERS = {"Accept": "text/event-stream", "Cache-Control": "no-store"}


class HttpTransport:
    """A pool of connections to one server. Its methods may be called from any thread.

    Args:
        url: `http://host:port` or `https://…`. headers: sent with every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._client = httpx.Client(
            base_url=url, headers=dict(headers), limits=_LIMITS, mounts=mounts_of(url)
        )
        self._running: set[HttpExchange] = set()
        # The collector of garbage may end a dropped stream while its thread is in here.
        self._lock = threading.RLock()

    def open(self, request: wire.Request, limits: Limits) -> "HttpExchange":
        """Prepare a request; the first `receive` sends it."""
        exchange = HttpExchange(self._client, request, limits, self._forget)
        with self._lock:
            self._running.add(exchange)
        return exchange

    def send(self, request: wire.Request, limits: Limits) -> None:
        """Send a request whose responses do not matter, and wait until it is done.

        Raises:
            CharoniaClientError: it failed.
        """
        exchange = self.open(request, limits)
        try:
            while exchange.receive_outputs() is not None:
                pass
        finally:
            exchange.finish()

    def health(self, models: tuple[str, ...]) -> Health:
        """Ask the server and each model whether it is ready."""
        try:
            answers = [
                self._client.get(path, timeout=_HEALTH_S).status_code == httpx.codes.OK
                for path in _health_paths(models)
            ]
        except httpx.TransportError:
            answers = [False] * (2 + len(models))
        return _health(models, answers)

    def close(self) -> None:
        """Close all connections; running requests end.

        Closing a connection would not wake a thread that reads from it.
        """
        with self._lock:
            running = [*self._running]
        for exchange in running:
            exchange.stop(CLIENT_CLOSED)
        self._client.close()

    def _forget(self, exchange: "HttpExchange") -> None:
        with self._lock:
            self._running.discard(exchange)


class HttpExchange:
    """One `generate_stream`. See `exchange.Exchange`.

    Args:
        on_end: called at its end, once or more often.
    """

    def __init__(
        self,
        client: httpx.Client,
        request: wire.Request,
        limits: Limits,
        on_end: Callable[["HttpExchange"], None],
    ) -> None:
        self._client = client
        self._limits = limits
        self._on_end = on_end
        self._request = _build(client, request, limits)
        self._response: httpx.Response | None = None
        self._events: Iterator[Any] = iter(())
        self._reader = wire.ResponseReader()
        self._has_begun = False
        self._end_reason: CharoniaClientError | None = None
        self._timer: threading.Timer | None = None
        if limits.left_s is not None:
            self._timer = threading.Timer(limits.left_s, self._expire, [limits.total_s])
            self._timer.daemon = True
            self._timer.start()

    def receive(self) -> Sequence[Chunk] | None:
        """See `exchange.Exchange`."""
        outputs = self.receive_outputs()
        return None if outputs is None else self._reader.read(outputs)

    def receive_outputs(self) -> wire.Outputs | None:
        """Return the next event's outputs; None at the end of the stream.

        Raises:
            CharoniaClientError: the request failed, was interrupted, or the event is an error.
        """
        try:
            if self._response is None:
                self._start()
            event = next(self._events, None)
        except httpx.TimeoutException as error:
            raise self._end_reason or _timeout(error, self._limits) from None
        except httpx.TransportError as error:
            raise self._end_reason or _connection_error(error) from None
        except (SSEError, httpx.DecodingError) as error:
            raise ServerError(str(error)) from None
        except RuntimeError:
            if not self._client.is_closed:
                raise
            raise self._end_reason or Cancelled(CLIENT_CLOSED) from None
        if self._end_reason is not None:
            raise self._end_reason
        if event is None:
            return None
        outputs = _outputs(event.data, self._has_begun)
        self._has_begun = True
        return outputs

    def finish(self) -> None:
        """See `exchange.Exchange`. Reads the end of the body, so that the connection is kept."""
        watchdog = threading.Timer(_FINISH_S, self.interrupt)
        watchdog.daemon = True
        watchdog.start()
        with contextlib.suppress(httpx.TransportError, httpx.DecodingError, SSEError):
            next(self._events, None)
        watchdog.cancel()
        self.abort()

    def abort(self) -> None:
        """See `exchange.Exchange`."""
        self._on_end(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._response is not None:
            self._response.close()

    def interrupt(self) -> None:
        """See `exchange.Exchange`."""
        self.stop("the stream was closed")

    def stop(self, why: str) -> None:
        """Make a `receive` that waits in another thread raise Cancelled with this text."""
        self._stop(Cancelled(why))

    def _start(self) -> None:
        self._response = self._client.send(self._request, stream=True)
        if self._response.status_code != httpx.codes.OK:
            raise _refusal(self._response.status_code, self._response.read())
        if self._end_reason is not None:
            raise self._end_reason
        # From here on the timeout of the first token does not count any more, and `_timer` watches
        # the total: httpx takes the read timeout when it begins to read the body.
        self._request.extensions["timeout"]["read"] = None
        self._events = EventSource(self._response).iter_sse()

    def _expire(self, total_s: float) -> None:
        self._stop(Timeout(f"no complete answer within {total_s:.3g} s"))

    def _stop(self, reason: CharoniaClientError) -> None:
        self._end_reason = self._end_reason or reason
        if self._response is None:
            return
        # Not `close`, which must not be called while another thread reads; `shutdown` wakes it.
        stream = self._response.extensions["network_stream"]
        with contextlib.suppress(OSError):
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class AsyncHttpTransport:
    """The same for asyncio; belongs to the event loop in which it was made."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._client = httpx.AsyncClient(
            base_url=url, headers=dict(headers), limits=_LIMITS, mounts=mounts_of(url)
        )

    async def open(self, request: wire.Request, limits: Limits) -> "AsyncHttpExchange":
        """Prepare a request; the first `receive` sends it."""
        return AsyncHttpExchange(self._client, request, limits)

    async def send(self, request: wire.Request, limits: Limits) -> None:
        """See `HttpTransport.send`."""
        exchange = await self.open(request, limits)
        try:
            while await exchange.receive_outputs() is not None:
                pass
        finally:
            await exchange.finish()

    async def health(self, models: tuple[str, ...]) -> Health:
        """See `HttpTransport.health`."""
        try:
            answers = [
                (await self._client.get(path, timeout=_HEALTH_S)).status_code == httpx.codes.OK
                for path in _health_paths(models)
            ]
        except httpx.TransportError:
            answers = [False] * (2 + len(models))
        return _health(models, answers)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


class AsyncHttpExchange:
    """One `generate_stream`. See `exchange.AsyncExchange`."""

    def __init__(self, client: httpx.AsyncClient, request: wire.Request, limits: Limits) -> None:
        self._client = client
        self._limits = limits
        self._request = _build(client, request, limits)
        self._response: httpx.Response | None = None
        self._events: AsyncIterator[Any] | None = None
        self._reader = wire.ResponseReader()
        self._has_begun = False
        left = limits.left_s
        self._deadline = None if left is None else asyncio.get_running_loop().time() + left

    async def receive(self) -> Sequence[Chunk] | None:
        """See `exchange.AsyncExchange`."""
        outputs = await self.receive_outputs()
        return None if outputs is None else self._reader.read(outputs)

    async def receive_outputs(self) -> wire.Outputs | None:
        """See `HttpExchange.receive_outputs`."""
        try:
            async with asyncio.timeout_at(self._deadline):
                if self._events is None:
                    self._events = await self._start()
                event = await anext(self._events, None)
        except TimeoutError:
            raise Timeout(f"no complete answer within {self._limits.total_s:.3g} s") from None
        except httpx.TimeoutException as error:
            raise _timeout(error, self._limits) from None
        except httpx.TransportError as error:
            raise _connection_error(error) from None
        except (SSEError, httpx.DecodingError) as error:
            raise ServerError(str(error)) from None
        except RuntimeError:
            if not self._client.is_closed:
                raise
            raise Cancelled(CLIENT_CLOSED) from None
        if event is None:
            return None
        outputs = _outputs(event.data, self._has_begun)
        self._has_begun = True
        return outputs

    async def finish(self) -> None:
        """See `exchange.AsyncExchange`."""
        if self._events is not None:
            with contextlib.suppress(
                httpx.TransportError, httpx.DecodingError, SSEError, TimeoutError
            ):
                async with asyncio.timeout(_FINISH_S):
                    await anext(self._events, None)
        await self.abort()

    async def abort(self) -> None:
        """See `exchange.AsyncExchange`."""
        if self._response is not None:
            await self._response.aclose()

    async def _start(self) -> AsyncIterator[Any]:
        self._response = await self._client.send(self._request, stream=True)
        if self._response.status_code != httpx.codes.OK:
            raise _refusal(self._response.status_code, await self._response.aread())
        self._request.extensions["timeout"]["read"] = None  # see HttpExchange._start
        return EventSource(self._response).aiter_sse()


def _first_wait(limits: Limits) -> float | None:
    """Timeout for the response's head, which comes with the first token."""
    waits = [limit for limit in (limits.left_s, limits.first_token_s) if limit is not None]
    return min(waits, default=None)


def _build(
    client: httpx.Client | httpx.AsyncClient, request: wire.Request, limits: Limits
) -> httpx.Request:
    first = _first_wait(limits)
    connect = _CONNECT_S if first is None else min(first, _CONNECT_S)
    return client.build_request(
        "POST",
        f"/v2/models/{request.model}/generate_stream",
        json=wire.to_http(request, limits.left_s),
        headers={**request.headers, **_HEADERS},
        timeout=httpx.Timeout(first, connect=connect, pool=None),
    )


def _outputs(data: str, has_begun: bool) -> wire.Outputs:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ServerError(f"an event must be a JSON object, but is {data[:200]!r}")
    if "error" in event:
        text = str(event["error"])
        raise from_text(text, default=ServerError) if has_begun else from_text(text)
    return wire.from_http(event)


def _refusal(status: int, body: bytes) -> CharoniaClientError:
    """Return Triton's error for a response that is not 200: JSON, plain or as one SSE event."""
    text = body.decode("utf-8", errors="replace").strip().removeprefix("data:").strip()
    with contextlib.suppress(ValueError):
        event = json.loads(text)
        if isinstance(event, dict) and "error" in event:
            text = str(event["error"])
    return from_http_status(status, text or f"HTTP status {status} without a text")


def _timeout(error: httpx.TimeoutException, limits: Limits) -> CharoniaClientError:
    first = _first_wait(limits)
    if isinstance(error, httpx.ConnectTimeout) and (first is None or first > _CONNECT_S):
        return ConnectionFailed(f"no connection within {_CONNECT_S:g} s")
    what = "first token" if first == limits.first_token_s else "complete answer"
    return Timeout(f"no {what} within {first:.3g} s")


def _connection_error(error: httpx.TransportError) -> CharoniaClientError:
    kind = ConnectionFailed if isinstance(error, httpx.ConnectError) else ConnectionLost
    return kind(f"{type(error).__name__}: {error}")


def _health_paths(models: tuple[str, ...]) -> list[str]:
    return ["/v2/health/live", "/v2/health/ready", *(f"/v2/models/{m}/ready" for m in models)]


def _health(models: tuple[str, ...], answers: list[bool]) -> Health:
    return Health(answers[0], answers[1], dict(zip(models, answers[2:], strict=True)))
