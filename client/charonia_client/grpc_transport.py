"""Requests over gRPC, synchronous and asyncio.

Owns the channel and the calls. Must not know attempts, nor what the tensors mean.

There is one `ModelStreamInfer` call per request, many at a time on one channel, so one TCP
connection. tritonclient's own client keeps one stream per object, each with a channel and a thread.
The stub beneath it, generated from Triton's protobuf, has no such limit and costs less (see
README.md for the numbers).

Two defects of Triton 2.51.0 shape this file:

- With the header `triton_grpc_error` errors would have a status code, but concurrent errors then
  crash the server. So errors are texts.
- Cancelling a call at the moment in which the server completes it can also crash the
  server. So `finish` waits for the end of the call, and never cancels one that is about to end.
"""

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from charonia_client import wire
from charonia_client.errors import (
    Cancelled,
    CharoniaClientError,
    ServerError,
    Timeout,
    from_grpc_status,
    from_text,
)
from charonia_client.exchange import CLIENT_CLOSED, Limits
from charonia_client.proxies import is_local
from charonia_client.values import Chunk, Health

_FINISH_S = 1.0  # how long a call may take to end after its last response
_HEALTH_S = 5.0
PING_S = 320
"""An idle connection with calls is tested so often. By default tritonserver closes a connection on
which several pings come within 300 s without any data of its own."""
PING_TIMEOUT_S = 20
"""A connection is lost if the server does not answer a ping, or the kernel has no acknowledgement
of what was sent, for so long."""
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Without these a channel that lost its server reconnects only after seconds, and
    # every attempt until then fails with the old error. The second is the connection timeout.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each stream buffers 64 KB before it is read, HTTP/2's default. gRPC would measure the line
    # and buffer megabytes for each stream whose reader has stopped.
    ("grpc.http2.bdp_probe", 0),
    # Otherwise gRPC stops after two pings that no data of this client followed.
    ("grpc.http2.max_pings_without_data", 0),
]


class GrpcTransport:
    """A channel to one server. Its methods may be called from any thread.

    Args:
        url: `host:port`. credentials: for TLS; None is plain text.
        headers: sent as metadata with every call.
    """

    def __init__(
        self, url: str, credentials: grpc.ChannelCredentials | None, headers: Mapping[str, str]
    ) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(url, options=_options(url))
        else:
            self._channel = grpc.secure_channel(url, credentials, options=_options(url))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = _metadata(headers)
        self._is_closed = False

    def open(self, request: wire.Request, limits: Limits) -> "GrpcExchange":
        """Send a request.

        Raises:
            Cancelled: the transport is closed.
        """
        message = wire.to_grpc(request)
        try:
            call = self._stub.ModelStreamInfer(
                iter([message]),
                timeout=limits.left_s,
                metadata=self._metadata + _metadata(request.headers),
            )
        except ValueError:
            if not self._is_closed:
                raise
            raise Cancelled(CLIENT_CLOSED) from None
        return GrpcExchange(call, limits)

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
        ask = {"timeout": _HEALTH_S, "metadata": self._metadata}
        try:
            return Health(
                is_live=self._stub.ServerLive(service_pb2.ServerLiveRequest(), **ask).live,
                is_ready=self._stub.ServerReady(service_pb2.ServerReadyRequest(), **ask).ready,
                models={
                    name: self._stub.ModelReady(
                        service_pb2.ModelReadyRequest(name=name), **ask
                    ).ready
                    for name in models
                },
            )
        except grpc.RpcError:
            return Health(False, False, dict.fromkeys(models, False))

    def close(self) -> None:
        """Close the channel; running calls end."""
        self._is_closed = True
        self._channel.close()


class GrpcExchange:
    """One call. See `exchange.Exchange`."""

    def __init__(self, call: Any, limits: Limits) -> None:
        self._call = call
        self._limits = limits
        self._reader = wire.ResponseReader()
        self._has_begun = False
        self._end_reason: CharoniaClientError | None = None
        self._timer: threading.Timer | None = None
        if limits.first_token_s is not None:
            self._timer = threading.Timer(
                limits.first_token_s, self._expire, [limits.first_token_s]
            )
            self._timer.daemon = True
            self._timer.start()

    def receive(self) -> Sequence[Chunk] | None:
        """See `exchange.Exchange`."""
        outputs = self.receive_outputs()
        return None if outputs is None else self._reader.read(outputs)

    def receive_outputs(self) -> wire.Outputs | None:
        """Return the next response's outputs; None at the end of the call.

        Raises:
            CharoniaClientError: the call failed, was interrupted, or the response is an error.
        """
        try:
            response = next(self._call, None)
        except grpc.RpcError as error:
            raise self._end_reason or _status_error(error, self._limits) from None
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if response is None:
            return None
        outputs = _outputs(response, self._has_begun)
        self._has_begun = True
        return outputs

    def finish(self) -> None:
        """See `exchange.Exchange`. An error response ends a call just as a final one."""
        ended = threading.Event()
        if self._call.add_callback(ended.set) and not ended.wait(_FINISH_S):
            self.abort()

    def abort(self) -> None:
        """See `exchange.Exchange`."""
        if self._timer is not None:
            self._timer.cancel()
        self._call.cancel()

    def interrupt(self) -> None:
        """See `exchange.Exchange`."""
        self._stop(Cancelled("the stream was closed"))

    def _expire(self, first_token_s: float) -> None:
        self._stop(Timeout(f"no first token within {first_token_s:.3g} s"))

    def _stop(self, reason: CharoniaClientError) -> None:
        self._end_reason = self._end_reason or reason
        self._call.cancel()


class AsyncGrpcTransport:
    """The same for asyncio; belongs to the event loop in which it was made."""

    def __init__(
        self, url: str, credentials: grpc.ChannelCredentials | None, headers: Mapping[str, str]
    ) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(url, options=_options(url))
        else:
            self._channel = grpc.aio.secure_channel(url, credentials, options=_options(url))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = _metadata(headers)

    async def open(self, request: wire.Request, limits: Limits) -> "AsyncGrpcExchange":
        """Send a request.

        Raises:
            Cancelled: the transport is closed.
        """
        try:
            call = self._stub.ModelStreamInfer(
                iter([wire.to_grpc(request)]),
                timeout=limits.left_s,
                metadata=self._metadata + _metadata(request.headers),
            )
        except grpc.aio.UsageError:
            raise Cancelled(CLIENT_CLOSED) from None
        return AsyncGrpcExchange(call, limits)

    async def send(self, request: wire.Request, limits: Limits) -> None:
        """See `GrpcTransport.send`."""
        exchange = await self.open(request, limits)
        try:
            while await exchange.receive_outputs() is not None:
                pass
        finally:
            await exchange.finish()

    async def health(self, models: tuple[str, ...]) -> Health:
        """See `GrpcTransport.health`."""
        ask = {"timeout": _HEALTH_S, "metadata": self._metadata}
        stub = self._stub
        try:
            live = await stub.ServerLive(service_pb2.ServerLiveRequest(), **ask)
            ready = await stub.ServerReady(service_pb2.ServerReadyRequest(), **ask)
            states = {
                name: (await stub.ModelReady(service_pb2.ModelReadyRequest(name=name), **ask)).ready
                for name in models
            }
        except grpc.RpcError:
            return Health(False, False, dict.fromkeys(models, False))
        return Health(live.live, ready.ready, states)

    async def close(self) -> None:
        """Close the channel; running calls end."""
        await self._channel.close()


class AsyncGrpcExchange:
    """One call. See `exchange.AsyncExchange`."""

    def __init__(self, call: Any, limits: Limits) -> None:
        self._call = call
        self._limits = limits
        self._reader = wire.ResponseReader()
        self._has_begun = False

    async def receive(self) -> Sequence[Chunk] | None:
        """See `exchange.AsyncExchange`."""
        outputs = await self.receive_outputs()
        return None if outputs is None else self._reader.read(outputs)

    async def receive_outputs(self) -> wire.Outputs | None:
        """See `GrpcExchange.receive_outputs`."""
        try:
            if self._has_begun or self._limits.first_token_s is None:
                response = await self._call.read()
            else:
                async with asyncio.timeout(self._limits.first_token_s):
                    response = await self._call.read()
        except TimeoutError:
            raise Timeout(f"no first token within {self._limits.first_token_s:.3g} s") from None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            # gRPC raises it for calls whose channel was closed, too.
            raise Cancelled(CLIENT_CLOSED) from None
        except grpc.RpcError as error:
            raise _status_error(error, self._limits) from None
        if response is grpc.aio.EOF:
            # The status tells how it ended: read() gives EOF for a broken stream as well.
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise _ended(code, await self._call.details(), self._limits)
            return None
        outputs = _outputs(response, self._has_begun)
        self._has_begun = True
        return outputs

    async def finish(self) -> None:
        """See `exchange.AsyncExchange`."""
        ended = asyncio.Event()
        self._call.add_done_callback(lambda call: ended.set())
        if not self._call.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _FINISH_S)
        await self.abort()

    async def abort(self) -> None:
        """See `exchange.AsyncExchange`."""
        self._call.cancel()


def _is_cancelled() -> bool:
    """Return whether the task that runs is being cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _options(url: str) -> list[tuple[str, int]]:
    """Options of a channel to `host:port`.

    gRPC sets TCP_USER_TIMEOUT to the keep-alive timeout, if there is a keep-alive time. For pings
    grpcio 1.85 uses the ping timeout alone, whose default is a minute.
    """
    times = {
        "grpc.keepalive_time_ms": PING_S,
        "grpc.keepalive_timeout_ms": PING_TIMEOUT_S,
        "grpc.http2.ping_timeout_ms": PING_TIMEOUT_S,
    }
    in_ms = [(name, int(1000 * seconds)) for name, seconds in times.items()]
    return [*_OPTIONS, ("grpc.enable_http_proxy", int(not is_local(url))), *in_ms]


def _metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in headers.items())


def _outputs(response: service_pb2.ModelStreamInferResponse, has_begun: bool) -> wire.Outputs:
    if response.error_message:
        if has_begun:
            raise from_text(response.error_message, default=ServerError)
        raise from_text(response.error_message)
    return wire.from_grpc(response.infer_response)


def _status_error(error: grpc.RpcError, limits: Limits) -> CharoniaClientError:
    return _ended(error.code(), error.details(), limits)


def _ended(code: grpc.StatusCode, details: str | None, limits: Limits) -> CharoniaClientError:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and limits.total_s is not None:
        return Timeout(f"no complete answer within {limits.total_s:.3g} s")
    return from_grpc_status(code.name, details or f"the call ended with {code.name}")
