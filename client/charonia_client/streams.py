"""A stream of chunks for the user: attempts, timeouts, and closing.

Owns the life of one call over all its attempts. Must not know gRPC or HTTP: a function that
opens an `Exchange` is passed in.

The chunks come from a generator that holds no reference to the stream object. So a stream
that is dropped early is closed at once, and its request is cancelled.
"""

import asyncio
import contextlib
import copy
import random
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from types import TracebackType

from charonia_client.errors import Cancelled, CharoniaClientError, ServerError, Timeout
from charonia_client.exchange import AsyncExchange, Exchange, Limits
from charonia_client.retry import Attempts, RetryPolicy
from charonia_client.values import Chunk, Timeouts

_TRUNCATED = "the stream ended before its last chunk"
_LONGEST_S = 1e9
"""A longer timeout is as none: timers and gRPC take no time that is beyond their clocks."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Settings of one call."""

    request_id: str
    timeouts: Timeouts
    retry: RetryPolicy

    def start(self) -> "Call":
        """Start the call's clock."""
        total = self.timeouts.total_s
        deadline = None if total is None else time.monotonic() + total
        attempts = Attempts(self.retry, deadline, clock=time.monotonic, chance=random.random)
        return Call(self, deadline, attempts)


class Call:
    """The attempts of one call, and whether anything was received yet."""

    def __init__(self, settings: CallSettings, deadline: float | None, attempts: Attempts) -> None:
        self._settings = settings
        self._deadline = deadline
        self._attempts = attempts
        self._last_error: CharoniaClientError | None = None
        self.last: Chunk | None = None

    @property
    def is_complete(self) -> bool:
        """True if the last chunk was received."""
        return self.last is not None and self.last.is_final

    def limits(self) -> Limits:
        """Return what is left of the timeouts for the next attempt.

        Raises:
            Timeout: nothing is left; its cause is the last attempt's error.
        """
        timeouts = self._settings.timeouts
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left <= 0:
            error = Timeout(f"no complete answer within {timeouts.total_s:.3g} s")
            raise error from self._last_error
        return Limits(timeouts.total_s, _limit(left), _limit(timeouts.first_token_s))

    def took(self, chunks: Sequence[Chunk] | None) -> Sequence[Chunk]:
        """Note a response.

        Raises:
            ServerError: the stream ended before its last chunk.
        """
        if chunks is None:
            raise ServerError(_TRUNCATED)
        if chunks:
            self.last = chunks[-1]
        return chunks

    def wait_after(self, error: CharoniaClientError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            CharoniaClientError: `error`, if there is no further attempt.
        """
        error.request_id = self._settings.request_id
        self._last_error = error
        wait = self._attempts.wait_after(error) if self.last is None else None
        if wait is None:
            raise error
        return wait


def _limit(seconds: float | None) -> float | None:
    return None if seconds is None or seconds > _LONGEST_S else seconds


class _End:
    """The end of a stream, which each further read repeats.

    So an answer that failed or was closed cannot be taken for a complete one by who reads on.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._is_complete = False
        self._error: CharoniaClientError | None = None

    def took(self, chunk: Chunk) -> Chunk:
        """Note a chunk that was read."""
        self._is_complete = chunk.is_final
        return chunk

    def failed(self, error: CharoniaClientError) -> None:
        """Note an error. A copy is kept: the error itself refers to the stream by its traceback."""
        self._error = copy.copy(error)

    def check(self) -> None:
        """Raises CharoniaClientError: the stream ended, but not with its last chunk."""
        if self._is_complete:
            return
        error = copy.copy(self._error) or Cancelled("the stream was closed")
        error.request_id = self._request_id
        raise error from None


class CompletionStream(Iterator[Chunk]):
    """The chunks of one request, as an iterator and a context manager.

    The request is sent when the first chunk is requested. Leaving `with`, `close`, or dropping
    the stream before its last chunk cancels the request on the server. One thread iterates; any
    thread may close, and the one that iterates then gets `Cancelled` in place of the next chunk.

    Attributes:
        request_id: the id for `Client.cancel`.
    """

    def __init__(self, settings: CallSettings, open_exchange: Callable[[Limits], Exchange]) -> None:
        self.request_id = settings.request_id
        self._control = _Control()
        self._chunks = _chunks(settings, open_exchange, self._control)
        self._end = _End(settings.request_id)

    def __next__(self) -> Chunk:
        """Wait for the next chunk.

        Raises:
            CharoniaClientError: the request failed, was cancelled or timed out, or the server
                went away; or the stream was closed. A stream never just ends before its last
                chunk, and who reads on after an error gets it again.
        """
        try:
            return self._end.took(next(self._chunks))
        except CharoniaClientError as error:
            self._end.failed(error)
            raise
        except StopIteration:
            self._end.check()
            raise

    def close(self) -> None:
        """Cancel the request if it is not complete. May be called again."""
        self._control.close()
        # A running generator belongs to another thread, which ends it itself.
        with contextlib.suppress(ValueError):
            self._chunks.close()

    def __enter__(self) -> "CompletionStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Control:
    """Lets another thread stop the running attempt, or the wait before the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._exchange: Exchange | None = None
        self._is_receiving = False

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._exchange is not None and self._is_receiving:
                self._exchange.interrupt()

    def receive(self, exchange: Exchange) -> Sequence[Chunk] | None:
        """Call `exchange.receive()`; `close` interrupts it."""
        with self._lock:
            self._raise_if_closed()
            self._exchange, self._is_receiving = exchange, True
        try:
            return exchange.receive()
        finally:
            with self._lock:
                self._is_receiving = False

    def sleep(self, seconds: float) -> None:
        """Wait, at most until `close`."""
        self._closed.wait(seconds)
        self._raise_if_closed()

    def _raise_if_closed(self) -> None:
        if self.is_closed:
            raise Cancelled("the stream was closed")


def _chunks(
    settings: CallSettings, open_exchange: Callable[[Limits], Exchange], control: _Control
) -> Generator[Chunk, None, None]:
    call = settings.start()
    while not call.is_complete:
        try:
            yield from _attempt(call, open_exchange(call.limits()), control)
        except CharoniaClientError as error:
            control.sleep(call.wait_after(error))


def _attempt(call: Call, exchange: Exchange, control: _Control) -> Generator[Chunk, None, None]:
    ends_by_itself = False
    try:
        while not call.is_complete:
            yield from call.took(control.receive(exchange))
    except CharoniaClientError:
        ends_by_itself = not control.is_closed
        raise
    finally:
        if ends_by_itself or call.is_complete:
            exchange.finish()
        else:
            exchange.abort()


class AsyncCompletionStream(AsyncIterator[Chunk]):
    """The same for asyncio. Cancelling the task that waits for a chunk cancels the request.

    Attributes:
        request_id: the id for `AsyncClient.cancel`.
    """

    def __init__(
        self,
        settings: CallSettings,
        open_exchange: Callable[[Limits], Awaitable[AsyncExchange]],
    ) -> None:
        self.request_id = settings.request_id
        self._chunks = _async_chunks(settings, open_exchange)
        self._end = _End(settings.request_id)

    async def __anext__(self) -> Chunk:
        """Wait for the next chunk. Raises as `CompletionStream.__next__` does."""
        try:
            return self._end.took(await anext(self._chunks))
        except CharoniaClientError as error:
            self._end.failed(error)
            raise
        except StopAsyncIteration:
            self._end.check()
            raise

    async def aclose(self) -> None:
        """Cancel the request if it is not complete. May be called again.

        Raises:
            RuntimeError: another task waits for a chunk; cancel that task instead.
        """
        await self._chunks.aclose()

    async def __aenter__(self) -> "AsyncCompletionStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


async def _async_chunks(
    settings: CallSettings, open_exchange: Callable[[Limits], Awaitable[AsyncExchange]]
) -> AsyncGenerator[Chunk, None]:
    call = settings.start()
    while not call.is_complete:
        try:
            async with contextlib.aclosing(
                _async_attempt(call, await open_exchange(call.limits()))
            ) as chunks:
                async for chunk in chunks:
                    yield chunk
        except CharoniaClientError as error:
            await asyncio.sleep(call.wait_after(error))


async def _async_attempt(call: Call, exchange: AsyncExchange) -> AsyncGenerator[Chunk, None]:
    ends_by_itself = False
    try:
        while not call.is_complete:
            for chunk in call.took(await exchange.receive()):
                yield chunk
    except CharoniaClientError:
        ends_by_itself = True
        raise
    finally:
        if ends_by_itself or call.is_complete:
            await exchange.finish()
        else:
            await exchange.abort()
