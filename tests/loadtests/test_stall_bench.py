"""When the streams of the benchmark have begun, and what becomes of one that fails."""

import asyncio
import socket

import grpc
import pytest
import tritonclient.grpc.aio as grpc_aio

from stall_bench import wait_until_begun
from systems_under_test import SideError, Trace
from triton_side import complete


async def note(trace: Trace, *arrivals: float) -> Trace:
    await asyncio.sleep(0)
    trace.arrivals += arrivals
    return trace


async def wait(*makers) -> None:
    traces = [Trace() for _ in makers]
    pairs = zip(makers, traces, strict=True)
    streams = [asyncio.create_task(make(trace)) for make, trace in pairs]
    try:
        await asyncio.wait_for(wait_until_begun(streams, traces), timeout=60)
    finally:
        await asyncio.gather(*streams, return_exceptions=True)


def test_streams_have_begun_when_each_has_a_token():
    asyncio.run(wait(lambda trace: note(trace, 0.1), lambda trace: note(trace, 0.2, 0.3)))


def test_a_stream_that_fails_before_its_first_token_ends_the_benchmark_with_its_own_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"127.0.0.1:{server.getsockname()[1]}"

    async def ask_nobody(trace: Trace) -> Trace:
        async with grpc_aio.InferenceServerClient(url) as client:
            return await complete(client, [1], 1, {}, 0.0, trace)

    with pytest.raises(grpc.RpcError, match="Failed to connect"):
        asyncio.run(wait(ask_nobody, lambda trace: note(trace, 0.1)))


def test_a_stream_that_ends_without_a_token_ends_the_benchmark():
    with pytest.raises(SideError, match="without a token"):
        asyncio.run(wait(note, lambda trace: note(trace, 0.1)))
