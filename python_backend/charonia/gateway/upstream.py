"""The servers behind a gateway: which one gets a request, and when another one is tried.

Owns how many requests each server has, and what failures mean for the choice. Must not know HTTP,
nor what is asked for.

A request goes to the server with the least load, in samples that run or wait there::

    load = samples of this gateway's requests
           + what the server's last probe had beyond those: the requests of others

A server whose last probe failed, or found no engine or one that hangs, comes last. A probe begins
with a request once the last one is a second old, and that request does not wait for it. A single
server is probed so only if there is a fallback model. Then no request is sent while no server takes
any: one that is silent would hold it.

A request moves to another server only while nothing of an answer has come, and only if that may
help: the connection failed, or the server cannot take it now.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from charonia.gateway.breaker import Breaker
from charonia.gateway.errors import unavailable
from charonia.gateway.progress import Progress
from charonia_client import (
    AsyncClient,
    CharoniaClientError,
    Chunk,
    Completion,
    ConnectionFailed,
    EngineState,
    Overloaded,
    QueueFull,
    RateLimited,
    RetryPolicy,
    Sampling,
    ServerError,
    Timeout,
    Timeouts,
    Unavailable,
)
from charonia_client.values import Include

MAX_ATTEMPTS = 3
STATE_AGE_S = 0.2
"""Time for which the answer to a probe is reused, in seconds."""
PROBE_TIMEOUT_S = 2.0
"""Readiness waits so long for a server that is up."""
OTHERS_S = 0.1
"""The answers of servers that may be down are waited for so long, once another one can answer."""
LOAD_AGE_S = 1.0
"""Time after which a server's load, and whether it takes requests, is asked again, in seconds."""
LENGTH_AGE_S = 5.0
"""A known length limit is refreshed after this time: the server may have another model."""
_BUSY = (QueueFull, Overloaded, RateLimited)
_INCLUDE: tuple[Include, ...] = ("token_ids", "num_tokens", "timing")
T = TypeVar("T")


class Server:
    """One server.

    Attributes:
        num_requests: this gateway's running requests there. num_samples: of these.
        num_others: samples of others that run or wait there, by the last probe.
        progress: of its engine, by the probes.
        is_known_down: whether the last probe found no engine or one that hangs, or had no answer.
            An engine may be starting, for which requests wait.
        last_state: by the last probe that has ended; None if it had no answer.
        turn: when it was chosen last. max_model_len: as it last reported.
    """

    def __init__(self, url: str, model: str, clock: Callable[[], float]) -> None:
        self.url = url
        self.client = AsyncClient(url, model=model, retry=RetryPolicy(max_attempts=1))
        self.breaker = Breaker(clock)
        self.progress = Progress()
        self.num_requests = 0
        self.num_samples = 0
        self.num_others = 0
        self.is_known_down = False
        self.last_state: EngineState | None = None
        self.turn = 0
        self.max_model_len: int | None = None
        self._clock = clock
        self._probe: asyncio.Task[EngineState | None] | None = None
        self._probed_at = 0.0

    @property
    def takes_none(self) -> bool:
        """True if the last probe had no answer, or said that requests are refused."""
        state = self.last_state
        return self.is_known_down and (state is None or state.reason is not None)

    def trouble(self, state: EngineState | None) -> str | None:
        """Explain, by what is known, why the server would not take a request now; None if it would.

        Args:
            state: answer to the last probe; None if it had no answer.
        """
        if state is None:
            return "no answer"
        if not state.is_up:
            return state.reason or "the engine is being brought back"
        if self.progress.hangs:
            return f"the engine hangs: no step for {self.progress.missed_s:.0f} s"
        return None

    def refreshed(self, age_s: float) -> "asyncio.Task[EngineState | None]":
        """Return the last probe, or start a new one if that is older; it may still be running."""
        is_old = self._clock() - self._probed_at > age_s
        if self._probe is None or (self._probe.done() and is_old):
            self._probe = asyncio.create_task(self._ask())
        return self._probe

    async def _ask(self) -> EngineState | None:
        state = None
        asked_at = self._clock()
        num_before = self.num_samples
        with contextlib.suppress(CharoniaClientError):
            state = await self.client.probe()
            self.progress.note(state, asked_at, self._clock())
            self.max_model_len = state.max_model_len or self.max_model_len
            if state.load is not None:
                # The server counted at some time in between. What it may have missed is not
                # subtracted: it would hide requests of others. A sample that is counted twice
                # only sends requests elsewhere, until the next probe.
                num_own = min(num_before, self.num_samples)
                known = state.load.num_running + state.load.num_waiting
                self.num_others = max(0, known - num_own)
        self.is_known_down = self.trouble(state) is not None
        if not self.is_known_down:
            self.breaker.note_up()
        self._probed_at = self._clock()
        self.last_state = state
        return state

    @contextlib.contextmanager
    def taking(self, num_samples: int) -> Iterator[None]:
        """Count a request for the duration of this context, and judge the server by its end."""
        self.num_requests += 1
        self.num_samples += num_samples
        request = self.breaker.begin()
        try:
            yield
        except CharoniaClientError as error:
            self._judge(request, error)
            raise
        except BaseException:  # the client left: not the server's fault
            self.breaker.abandon(request)
            raise
        finally:
            self.num_requests -= 1
            self.num_samples -= num_samples

    def _judge(self, request: int, error: CharoniaClientError) -> None:
        is_fault = isinstance(error, ServerError | Unavailable | ConnectionFailed)
        if isinstance(error, Timeout) and error.kind is None:
            self.breaker.abandon(request)  # it answered nothing in the gateway's own time limit
        elif is_fault and not isinstance(error, _BUSY) and error.kind != "quarantined":
            self.breaker.fail(request)
        else:
            self.breaker.succeed()  # it answered, although it refused


class Upstream:
    """All servers. Belongs to one event loop.

    Args:
        urls: gRPC `host:port`. model: name of their schedulers' model.
        has_fallback: whether requests that no server takes have another model to go to.
        on_retry: called with the URL of a server whose request moves to another one.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        has_fallback: bool = False,
        on_retry: Callable[[str], None] = lambda url: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = [Server(url, model, clock) for url in urls]
        self._has_fallback = has_fallback
        self._on_retry = on_retry
        self._num_turns = 0

    async def stream(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        request_id: str,
        timeouts: Timeouts,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream an answer. Closing the generator cancels the request.

        Args:
            headers: sent with it, as metadata.

        Raises:
            CharoniaClientError: as `AsyncClient.stream`. ApiError: no server admits a request.
        """

        async def chunks(client: AsyncClient) -> AsyncGenerator[Chunk, None]:
            async with client.stream(
                prompt,
                sampling,
                request_id=request_id,
                include=_INCLUDE,
                timeouts=timeouts,
                headers=headers,
            ) as stream:
                async for chunk in stream:
                    yield chunk

        async with contextlib.aclosing(self._ask(chunks, _num_samples(sampling))) as answer:
            async for chunk in answer:
                yield chunk

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        request_id: str,
        timeouts: Timeouts,
        headers: Mapping[str, str] | None = None,
    ) -> Completion:
        """Return a whole answer. Cancelling the task cancels the request.

        Arguments and errors as for `stream`.
        """

        async def whole(client: AsyncClient) -> AsyncGenerator[Completion, None]:
            yield await client.generate(
                prompt,
                sampling,
                request_id=request_id,
                include=_INCLUDE,
                timeouts=timeouts,
                headers=headers,
            )

        async with contextlib.aclosing(self._ask(whole, _num_samples(sampling))) as answer:
            return await anext(answer)

    async def states(self) -> list[EngineState | None]:
        """Return the state of each server, see `states_of`."""
        return await states_of(self.servers)

    async def max_model_len(self) -> int | None:
        """The longest request that every server accepts, as far as they have reported it."""
        if all(server.max_model_len is None for server in self.servers):
            await self.states()
        for server in self.servers:
            server.refreshed(LENGTH_AGE_S)  # for later callers
        known = [server.max_model_len for server in self.servers]
        return min((length for length in known if length is not None), default=None)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(server.client.close() for server in self.servers))

    async def _ask(
        self, call: Callable[[AsyncClient], AsyncGenerator[T, None]], num_samples: int
    ) -> AsyncGenerator[T, None]:
        if self._has_fallback and await self._takes_none():
            raise unavailable("no server answers, or takes requests")
        tried: set[Server] = set()
        while True:
            server = self._choose(tried)
            tried.add(server)
            has_begun = False
            try:
                with server.taking(num_samples):
                    async with contextlib.aclosing(call(server.client)) as answer:
                        async for part in answer:
                            if not has_begun:
                                server.breaker.succeed()
                            has_begun = True
                            yield part
                return
            except CharoniaClientError as error:
                if has_begun or not may_do_better(error) or not self._has_another(tried):
                    raise
                self._on_retry(server.url)

    async def _takes_none(self) -> bool:
        """Return whether no server takes requests, by their last probes.

        Probes that are a second old are made again. If no server took requests before, their
        answers are waited for, but not for long.
        """
        probes = [server.refreshed(LOAD_AGE_S) for server in self.servers]
        if all(server.takes_none for server in self.servers):
            await asyncio.wait(probes, timeout=OTHERS_S)
        return all(server.takes_none for server in self.servers)

    def _choose(self, tried: set[Server]) -> Server:
        if len(self.servers) > 1:
            for server in self.servers:
                server.refreshed(LOAD_AGE_S)  # for later requests
        free = [one for one in self.servers if one not in tried and one.breaker.admits]
        if not free:
            wait_s = min(server.breaker.wait_s for server in self.servers)
            raise unavailable("no server can be reached", max(wait_s, 1.0))
        server = min(free, key=_order)
        self._num_turns += 1
        server.turn = self._num_turns
        return server

    def _has_another(self, tried: set[Server]) -> bool:
        if len(tried) >= MAX_ATTEMPTS:
            return False
        return any(server not in tried and server.breaker.admits for server in self.servers)


async def states_of(servers: Sequence[Server]) -> list[EngineState | None]:
    """Return the state of each server; None for one that does not answer.

    A server that hangs is not waited for if another one is up: it has its last state here.
    """
    probes = [server.refreshed(STATE_AGE_S) for server in servers]
    is_one_up = await _wait_one_up(servers, probes)
    if is_one_up:
        await asyncio.wait(probes, timeout=OTHERS_S)
    return [
        probe.result() if probe.done() else server.last_state if is_one_up else None
        for probe, server in zip(probes, servers, strict=True)
    ]


async def _wait_one_up(
    servers: Sequence[Server], probes: Sequence["asyncio.Task[EngineState | None]"]
) -> bool:
    """Wait for the first server that is up. Returns whether one was found in time."""
    server_of = dict(zip(probes, servers, strict=True))
    waiting = set(probes)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(server_of[probe].trouble(probe.result()) is None for probe in done):
                    return True
    return False


def _order(server: Server) -> tuple[bool, bool, int, int]:
    """The least is chosen; of equal ones that which was chosen longest ago."""
    load = server.num_samples + server.num_others
    return server.takes_none, server.is_known_down, load, server.turn


def _num_samples(sampling: Sampling) -> int:
    return max(sampling.get("best_of") or 1, sampling.get("n") or 1)


def may_do_better(error: CharoniaClientError) -> bool:
    """Return whether another server may succeed."""
    return isinstance(error, Unavailable | ConnectionFailed) and not isinstance(error, RateLimited)


async def all_of(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Run calls concurrently and return their results. The first failure cancels the others."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
