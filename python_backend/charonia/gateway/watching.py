"""Runs a request's work and watches its connection.

Owns the task of each request, what ends it early, and how errors are answered. Must not know what
the work is.

::

    body read ─► work ─────────────────────────────► answer complete
                  │  ▲ cancelled at once, wherever it waits
    watcher ──────┼──┤ the client left                    499 in the log
    reply.send ───┼──┤ nothing was read for stall_s       the connection is aborted
    closing ──────┴──┘ the gateway is shutting down       503, in a stream an error event

Once a stream has begun, an error is an event, followed by `[DONE]`.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from charonia.errors import CharoniaError
from charonia.events import error_event
from charonia.gateway import errors
from charonia.gateway.connections import abort
from charonia.gateway.errors import ApiError
from charonia.gateway.observing import record_of
from charonia_client import CharoniaClientError

PIECE_BYTES = 2**14
"""A large answer is sent in pieces, so that a reader that stops is noticed."""
_GONE_S = 5.0
_LINE_ENDS = {character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Escapes of characters at which many client libraries split a stream, although they end no line in
JSON or server-sent events."""
_ESCAPES = [(character.encode(), text.encode()) for character, text in _LINE_ENDS.items()]
_encode = msgspec.json.Encoder().encode


class StalledError(Exception):
    """The client does not read its answer."""


class CutOffError(Exception):
    """A whole answer ends before all of it was sent; only the end of the connection can say so."""


class Reply:
    """The answer to one request, as far as it has been sent.

    Args:
        stall_s: timeout for the client to take what is sent.

    Attributes:
        has_begun: whether a part of an answer was sent. is_streaming: whether that is a stream.
        is_complete: whether nothing may follow.
    """

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self._has_lines = False
        self.has_begun = False
        self.is_streaming = False
        self.is_complete = False

    async def whole(self, value: Any, status: int = HTTPStatus.OK, **headers: str) -> None:
        """Send an answer that is not a stream, as JSON."""
        body = _encode(value)
        head = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        await self._start(status, head)
        for start in range(0, len(body), PIECE_BYTES):
            part = body[start : start + PIECE_BYTES]
            await self._part(part, is_last=start + PIECE_BYTES >= len(body))

    async def event(self, value: Any) -> None:
        """Send a server-sent event. The first one begins the stream."""
        await self._begin("text/event-stream; charset=utf-8")
        await self._part(b"data: " + _as_line(value) + b"\n\n")

    async def line(self, value: Any) -> None:
        """Send a line of JSON. The first one begins a stream of lines."""
        self._has_lines = True
        await self._begin("application/x-ndjson")
        await self._part(_as_line(value) + b"\n")

    async def done(self) -> None:
        """End a stream."""
        await self._part(b"" if self._has_lines else b"data: [DONE]\n\n", is_last=True)

    async def error(self, error: ApiError) -> None:
        """Answer with an error.

        Raises:
            CutOffError: a part of a whole answer was sent, which nothing may follow.
        """
        if self.is_complete:
            return
        if self.has_begun and not self.is_streaming:
            raise CutOffError
        if self.is_streaming:
            await (self.line if self._has_lines else self.event)(error.body)
            await self.done()
        else:
            headers = {name.replace("-", "_"): value for name, value in error.headers.items()}
            await self.whole(error.body, error.status, **headers)

    async def _begin(self, content_type: str) -> None:
        if self.is_streaming:
            return
        self.is_streaming = True
        headers = {
            "content-type": content_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await self._start(HTTPStatus.OK, headers)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.has_begun = True
        pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": pairs})

    async def _part(self, body: bytes, *, is_last: bool = False) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": not is_last})
        self.is_complete = is_last

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise StalledError from None


class Watch:
    """State and limits shared by all requests of a gateway.

    Args:
        max_body_bytes, max_held_bytes, read_timeout_s, stall_timeout_s, max_requests: see
            `GatewaySettings`.
        log: takes one line.

    Attributes:
        closing: set it to end all work. num_requests: running requests. num_bytes: of their bodies.
        is_draining: whether new work is refused.
    """

    def __init__(
        self,
        *,
        max_body_bytes: int,
        max_held_bytes: int,
        read_timeout_s: float,
        stall_timeout_s: float,
        max_requests: int,
        log: Callable[[str], None],
    ) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_held_bytes = max_held_bytes
        self.read_timeout_s = read_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.max_requests = max_requests
        self.log = log
        self.closing = asyncio.Event()
        self.num_requests = 0
        self.num_bytes = 0
        self.is_draining = False

    @contextlib.contextmanager
    def admitting(self) -> Iterator["Body"]:
        """Admit a request for the duration of this context; its body may be read.

        Raises:
            ApiError: no more requests are admitted.
        """
        if self.is_draining:
            raise errors.shutting_down()
        if self.num_requests >= self.max_requests:
            raise errors.unavailable(f"the gateway has {self.max_requests} requests, its most")
        self.num_requests += 1
        body = Body(self)
        try:
            yield body
        finally:
            self.num_requests -= 1
            self.num_bytes -= body.num_bytes


class Work(Response):
    """A response that is computed while its connection is watched.

    Args:
        run: gets the body and answers; it is cancelled when nobody wants the answer any more.
    """

    def __init__(
        self, watch: Watch, run: Callable[[bytes, Reply], Coroutine[Any, Any, None]]
    ) -> None:
        self.status_code = HTTPStatus.OK
        self.background = None
        self._watch = watch
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        reply = Reply(send, self._watch.stall_timeout_s)
        record = record_of(scope)
        try:
            try:
                with self._watch.admitting() as body:
                    await self._work(await body.read(scope, receive), receive, reply)
            except (ApiError, CharoniaClientError, CharoniaError) as error:
                await self._refuse(scope, reply, errors.of_any(error))
            except ClientLeft:
                record.status, record.reason = errors.CLIENT_LEFT, "the client left"
            except StalledError:
                raise
            except Exception:
                lines = traceback.format_exc()
                self._watch.log(error_event("fault", **record.log_fields, traceback=lines))
                await self._refuse(scope, reply, errors.internal())
        except StalledError:
            record.status, record.reason = errors.CLIENT_LEFT, "the client reads nothing"
            abort(scope)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GONE_S):
                    await _until_left(receive)

    async def _refuse(self, scope: Scope, reply: Reply, error: ApiError) -> None:
        record = record_of(scope)
        record.status, record.reason = error.status, error.message
        try:
            await reply.error(error)
        except CutOffError:
            abort(scope)

    async def _work(self, body: bytes, receive: Receive, reply: Reply) -> None:
        work = asyncio.create_task(self._run(body, reply))
        left = asyncio.create_task(_until_left(receive))
        closing = asyncio.create_task(self._watch.closing.wait())
        tasks = (work, left, closing)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            has_left = left.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if reply.is_complete:
            return None  # it ended at that very moment
        raise ClientLeft if has_left else errors.shutting_down()


class ClientLeft(Exception):
    """The client closed the connection."""


class Body:
    """A request's body.

    Attributes:
        num_bytes: received so far.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.num_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Read all of it.

        Raises:
            ApiError: it is too long, did not come in time, or there is no room for it.
            ClientLeft: the connection is closed.
        """
        announced = dict(scope["headers"]).get(b"content-length", b"")
        self._check(int(announced) if announced.isdigit() else 0)
        parts = []
        limit_s = self._watch.read_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    parts.append(message.get("body", b""))
                    self._hold(len(parts[-1]))
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request's body did not come within {limit_s:g} s",
                kind=errors.TIMEOUT,
                code="request_timeout",
            ) from None

    def _hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._watch.num_bytes += num_bytes
        self._check(self.num_bytes)
        if self._watch.num_bytes > self._watch.max_held_bytes:
            raise errors.unavailable("the gateway holds as many bytes of requests as it may")

    def _check(self, num_bytes: int) -> None:
        most = self._watch.max_body_bytes
        if num_bytes > most:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the request's body must have at most {most} bytes",
                code="request_too_large",
            )


def _as_line(value: Any) -> bytes:
    """Encode a value without anything that a client library may take for the end of a line."""
    data = _encode(value)
    for character, escape in _ESCAPES:
        data = data.replace(character, escape)
    return data


async def _until_left(receive: Receive) -> None:
    """Wait until the client has gone. Anything else that it sends is ignored."""
    while (await receive())["type"] != "http.disconnect":
        pass
