"""`AsyncClient` against a real tritonserver, over both protocols."""

import asyncio
import contextlib
import gc
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from charonia.launch.server.tritonserver import TritonServer
from charonia_client import (
    AsyncClient,
    Cancelled,
    CharoniaClientError,
    ConnectionFailed,
    InvalidRequest,
    RetryPolicy,
    ServerError,
    Timeout,
    Timeouts,
    Unavailable,
)
from charonia_client.values import Protocol
from client.conftest import LATE_S, endless, script, settings

Run = Callable[[Callable[[AsyncClient], Coroutine[Any, Any, Any]]], Any]

FULL = "[charonia:queue_full]"


@pytest.fixture
def run(scripted: TritonServer, protocol: Protocol) -> Run:
    """Runs a coroutine function with a client in an event loop of its own."""

    def call(body: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            retry = RetryPolicy(max_attempts=3, initial_backoff_s=0.01)
            async with AsyncClient(**settings(scripted, protocol), retry=retry) as client:
                return await body(client)

        return asyncio.run(main())

    return call


def test_many_streams_run_side_by_side(run: Run) -> None:
    async def body(client: AsyncClient) -> list[str]:
        async def one(index: int) -> str:
            stream = client.stream(script(chunks=[f"{index} ", "a\u2028", "b"], delay_s=0.01))
            return "".join([chunk.text async for chunk in stream])

        return await asyncio.gather(*(one(index) for index in range(64)))

    assert run(body) == [f"{index} a\u2028b" for index in range(64)]


def test_a_completion_is_the_sum_of_its_chunks(run: Run) -> None:
    async def body(client: AsyncClient) -> Any:
        return await client.generate(script(chunks=["a", "b"], token_ids=[[1], [2, 3]]))

    completion = run(body)
    assert (completion.text, completion.token_ids) == ("ab", (1, 2, 3))
    assert completion.finish_reason == "stop"


def test_cancelling_the_task_cancels_the_request(run: Run, outcome: Callable[[str], str]) -> None:
    request_id = uuid.uuid4().hex

    async def body(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate(endless(), request_id=request_id))
        while (await client.generate(script(report=request_id))).text != "running":
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(body)
    assert outcome(request_id) == "cancelled"


def test_leaving_with_cancels_the_request(run: Run, outcome: Callable[[str], str]) -> None:
    async def body(client: AsyncClient) -> str:
        async with client.stream(endless()) as stream:
            await anext(stream)
        with pytest.raises(Cancelled, match="the stream was closed"):
            await anext(stream)
        return stream.request_id

    assert outcome(run(body)) == "cancelled"


def test_dropping_a_stream_cancels_the_request(run: Run, outcome: Callable[[str], str]) -> None:
    async def body(client: AsyncClient) -> str:
        stream = client.stream(endless())
        await anext(stream)
        request_id = stream.request_id
        del stream
        gc.collect()
        await asyncio.sleep(0.3)
        return request_id

    assert outcome(run(body)) == "cancelled"


def test_cancel_ends_a_request_by_its_id(run: Run) -> None:
    async def body(client: AsyncClient) -> None:
        async with client.stream(endless()) as stream:
            await anext(stream)
            await client.cancel(stream.request_id)
            with pytest.raises(Cancelled, match="the request was cancelled"):
                async for _ in stream:
                    pass

    run(body)


@pytest.mark.parametrize(
    ("prompt", "kind", "text"),
    [
        (script(error="no such thing"), InvalidRequest, "no such thing"),
        (script(chunks=["a"], error="boom"), ServerError, "boom"),
        (script(chunks=["a"], finish=None), ServerError, "ended before its last chunk"),
    ],
)
def test_errors_have_their_type_and_text(
    run: Run, prompt: str, kind: type[Exception], text: str
) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(kind, match=text):
            await client.generate(prompt)

    run(body)


def test_closing_the_client_ends_its_streams_with_an_error(run: Run) -> None:
    async def body(client: AsyncClient) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.stream(script(chunks=["a", "b"], delays_s=[0, LATE_S])):
                begun.set()

        reading = asyncio.create_task(read())
        await begun.wait()
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(CharoniaClientError):
            await asyncio.wait_for(reading, LATE_S / 2)

    run(body)


def test_a_stream_of_a_closed_client_says_so(run: Run) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.stream(script(chunks=["a"]))
        await client.close()
        with pytest.raises(Cancelled, match="the client was closed"):
            await anext(stream)

    run(body)


def test_cancelling_the_task_is_no_error_of_the_client(run: Run) -> None:
    async def body(client: AsyncClient) -> None:
        reading = asyncio.create_task(client.generate(endless()))
        await asyncio.sleep(0.1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    run(body)


def test_reading_on_after_an_error_raises_it_again(run: Run) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.stream(script(chunks=["a"], error="boom"))
        await anext(stream)
        for _ in range(2):
            with pytest.raises(ServerError, match="boom"):
                await anext(stream)

    run(body)


@pytest.mark.parametrize(
    ("timeouts", "text"),
    [
        (Timeouts(total_s=0.3), "no complete answer within 0.3 s"),
        (Timeouts(first_token_s=0.3), "no first token within 0.3 s"),
    ],
)
def test_timeouts_are_kept(run: Run, timeouts: Timeouts, text: str) -> None:
    async def body(client: AsyncClient) -> float:
        started = time.monotonic()
        with pytest.raises(Timeout, match=text):
            await client.generate(script(chunks=["a"], delay_s=LATE_S), timeouts=timeouts)
        return time.monotonic() - started

    assert 0.28 < run(body) < LATE_S / 2


def test_the_first_token_timeout_ends_with_the_first_token(run: Run) -> None:
    async def body(client: AsyncClient) -> str:
        for first_token_s in (0.5, 2.0, 8.0, 32.0):  # a slow machine may take longer to the first
            prompt = script(chunks=["a"] * 3, delays_s=[0, 0, 2 * first_token_s])
            with contextlib.suppress(Timeout):
                timeouts = Timeouts(first_token_s=first_token_s)
                return (await client.generate(prompt, timeouts=timeouts)).text
        return "it holds for the other tokens, too"

    assert run(body) == "aaa"


def test_a_full_queue_is_tried_again_until_it_takes_the_request(run: Run) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(ServerError, match="ended before"):  # what the third attempt says
            await client.generate(script(chunks=[], error=f"no {FULL}", failures=2))

    run(body)


def test_health_and_metrics_are_the_servers(run: Run) -> None:
    async def body(client: AsyncClient) -> None:
        while not (await client.health()).is_serving:  # a slow machine may answer too late
            await asyncio.sleep(0.1)
        assert (await client.health(["nope"])).models == {"nope": False}
        while True:
            with contextlib.suppress(Unavailable):
                metrics = await client.metrics()
                break
            await asyncio.sleep(0.1)
        assert "nv_inference_request_success" in metrics.families

    run(body)


def test_without_a_server_there_is_a_connection_error_and_no_health(protocol: Protocol) -> None:
    async def main() -> None:
        retry = RetryPolicy(max_attempts=2, initial_backoff_s=0.01)
        url = "127.0.0.1:9"  # the port "discard", where nothing listens
        async with AsyncClient(
            url, protocol=protocol, retry=retry, metrics_url=f"http://{url}/metrics"
        ) as client:
            assert (await client.health()).is_live is False
            with pytest.raises(ConnectionFailed):
                await client.generate("hi")
            with pytest.raises(ConnectionFailed):
                await client.metrics()
            with contextlib.suppress(ConnectionFailed):
                await client.cancel("nobody")

    asyncio.run(main())
