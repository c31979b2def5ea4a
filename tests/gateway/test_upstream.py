"""Which server is asked: the one with the least to do, whoever gave it that."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from charonia.gateway import upstream
from charonia.gateway.breaker import FIRST_PAUSE_S, MAX_FAILURES
from charonia.gateway.upstream import Upstream
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia_client import AsyncClient, Timeout, Timeouts, client
from support.e2e import ENDLESS, ENDLESS_BLOCKS, ONE_THREAD, one_torch_thread, wait_idle
from support.gateway import wait_metric
from support.held_back import held_back
from support.waiting import WAIT_S, Clock

SETTINGS = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=2")
RUNNING = "charonia_requests_running"


@pytest.fixture(scope="module")
def other(model: Path) -> Iterator[TritonServer]:
    with one_torch_thread(), running_server(model=model, settings=SETTINGS) as server:
        yield server


@contextlib.asynccontextmanager
async def opened(*servers: TritonServer) -> AsyncGenerator[Upstream, None]:
    found = Upstream([server.grpc_url for server in servers], "scheduler")
    try:
        yield found
    finally:
        await found.close()


async def busy_probes(found: Upstream) -> None:
    """Have each server probed just now."""
    await asyncio.gather(*(server.refreshed(0.0) for server in found.servers))


async def answered_by(found: Upstream) -> str:
    """The server that answers the next request."""
    before = [server.turn for server in found.servers]
    await found.complete([5, 6], {"max_tokens": 1}, "r", Timeouts())
    (url,) = [
        server.url
        for server, turn in zip(found.servers, before, strict=True)
        if server.turn != turn
    ]
    return url


def test_a_server_that_others_load_gets_fewer_requests(
    server: TritonServer, other: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "LOAD_AGE_S", 1e9)  # none but those that are asked for here

    async def main() -> None:
        async with opened(server, other) as found, AsyncClient(other.grpc_url) as somebody:
            await busy_probes(found)
            assert {await answered_by(found) for _ in range(2)} == {server.grpc_url, other.grpc_url}
            sampling = {"max_tokens": ENDLESS, "ignore_eos": True, "n": 2}
            async with somebody.stream([5, 6], sampling) as stream:  # type: ignore[arg-type]
                await anext(stream)
                await asyncio.to_thread(wait_metric, other, RUNNING, 2)
                await busy_probes(found)
                assert [one.num_others for one in found.servers] == [0, 2]
                assert [await answered_by(found) for _ in range(3)] == 3 * [server.grpc_url]
            await asyncio.to_thread(wait_idle, other)
            await busy_probes(found)
            assert {await answered_by(found) for _ in range(2)} == {server.grpc_url, other.grpc_url}

    asyncio.run(main())


def test_its_own_requests_are_not_counted_twice(server: TritonServer, other: TritonServer) -> None:
    async def main() -> None:
        async with opened(server, other) as found:
            sampling = {"max_tokens": ENDLESS, "ignore_eos": True, "n": 2}
            stream = found.stream([5, 6], sampling, "r", Timeouts())  # type: ignore[arg-type]
            async with contextlib.aclosing(stream):
                await anext(stream)
                await asyncio.to_thread(wait_metric, server, RUNNING, 2)
                await busy_probes(found)
                assert [one.num_samples for one in found.servers] == [2, 0]
                assert [one.num_others for one in found.servers] == [0, 0]
                assert await answered_by(found) == other.grpc_url

    asyncio.run(main())
    wait_idle(server)


def test_requests_that_come_while_a_probe_is_asked_do_not_hide_those_of_others(
    server: TritonServer,
) -> None:
    async def main() -> None:
        async with opened(server) as found, AsyncClient(server.grpc_url) as somebody:
            (only,) = found.servers
            sampling = {"max_tokens": ENDLESS, "ignore_eos": True, "n": 2}
            async with somebody.stream([5, 6], sampling) as stream:  # type: ignore[arg-type]
                await anext(stream)
                await asyncio.to_thread(wait_metric, server, RUNNING, 2)
                probe = only.refreshed(0.0)
                await asyncio.sleep(0)  # it is sent
                with only.taking(2):  # nothing of which has reached the server
                    await probe
                assert only.num_others == 2
                with only.taking(2):
                    probe = only.refreshed(0.0)
                    await asyncio.sleep(0)
                await probe
                assert only.num_others == 2

    asyncio.run(main())
    wait_idle(server)


def test_a_server_that_is_known_to_be_down_comes_last(server: TritonServer) -> None:
    async def main() -> None:
        found = Upstream(["127.0.0.1:1", server.grpc_url], "scheduler")
        await busy_probes(found)
        assert [one.is_known_down for one in found.servers] == [True, False]
        assert [await answered_by(found) for _ in range(3)] == 3 * [server.grpc_url]
        assert not found.servers[0].turn, "it was never tried"
        await found.close()

    asyncio.run(main())


def test_a_server_that_hangs_is_not_waited_for_while_another_one_is_up(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PROBE_S", 1e6)
    monkeypatch.setattr(upstream, "PROBE_TIMEOUT_S", 1e6)
    monkeypatch.setattr(upstream, "STATE_AGE_S", 0.0)

    async def main() -> None:
        async with held_back(server.grpc_url) as (url, passes), asyncio.timeout(WAIT_S):
            passes.set()
            found = Upstream([url, server.grpc_url], "scheduler")
            assert (known := await found.servers[0].refreshed(0.0)) is not None
            passes.clear()
            states = await found.states()
            assert states[0] is known
            assert states[1] is not None
            assert not found.servers[0].refreshed(0.0).done()
            await found.close()

    asyncio.run(main())


def test_a_server_that_does_not_answer_is_not_waited_for(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PROBE_S", 1e6)
    monkeypatch.setattr(upstream, "PROBE_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with held_back(server.grpc_url) as (url, _), asyncio.timeout(WAIT_S):
            found = Upstream([url], "scheduler")
            assert await found.states() == [None]
            await found.close()

    asyncio.run(main())


def test_a_trial_without_an_answer_in_time_does_not_close_the_breaker(server: TritonServer) -> None:
    clock = Clock()

    async def main() -> None:
        async with held_back(server.grpc_url) as (url, passes), asyncio.timeout(WAIT_S):
            found = Upstream([url], "scheduler", clock=clock.monotonic)
            (only,) = found.servers
            for _ in range(MAX_FAILURES):
                only.breaker.fail(only.breaker.begin())
            clock.now += FIRST_PAUSE_S
            with pytest.raises(Timeout):
                await found.complete([5, 6], {"max_tokens": 1}, "r", Timeouts(total_s=0.1))
            assert only.breaker.is_open
            passes.set()
            await found.complete([5, 6], {"max_tokens": 1}, "r", Timeouts())
            assert not only.breaker.is_open
            await found.close()

    asyncio.run(main())
