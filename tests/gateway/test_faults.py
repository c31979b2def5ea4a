"""What breaks behind a gateway: streams go on, or end with an error that says so."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource
from openai import AsyncOpenAI

from charonia.gateway.progress import STEP_TIMEOUT_S
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ENDLESS,
    ENDLESS_BLOCKS,
    ONE_THREAD,
    one_torch_thread,
    scrape,
    wait_for,
    wait_idle,
)
from support.faults import make_faulty_repository, order_fault
from support.gateway import Gateway, running_gateway
from support.long import long
from support.stopping import stop_process

TEXT = "/v1/completions"
SETTINGS = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=16")
SAMPLED: dict[str, Any] = {"prompt": "def f(", "temperature": 1.2, "ignore_eos": True}


@pytest.fixture(scope="module")
def frail(model: Path) -> Iterator[TritonServer]:
    """A server whose engine may be killed."""
    with one_torch_thread(), running_server(model=model, settings=SETTINGS) as server:
        yield server


def events_of(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, which ends with `[DONE]`."""
    events = EventSource(reply).iter_sse()
    for event in events:
        if event.data == "[DONE]":
            assert next(events, None) is None
            return
        yield event.json()
    raise AssertionError("no [DONE]")


class Streams:
    """Streams of the SDK, all at once.

    Attributes:
        have_begun: set once each has had its first token.
    """

    def __init__(self, gateway: Gateway, count: int) -> None:
        self._sdk = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        self._count = count
        self._num_begun = 0
        self.have_begun = asyncio.Event()

    async def texts(self) -> list[str]:
        """The texts that came, to the end of each."""
        async with self._sdk:
            return await asyncio.gather(*map(self._text, range(self._count)))

    async def _text(self, seed: int) -> str:
        body = {"ignore_eos": True}
        stream = await self._sdk.completions.create(
            model="model",
            prompt="def f(",
            temperature=1.2,
            max_tokens=600,
            seed=seed,
            stream=True,
            extra_body=body,
        )
        parts = []
        async for chunk in stream:
            if not parts:
                self._num_begun += 1
                if self._num_begun == self._count:
                    self.have_begun.set()
            parts.append(chunk.choices[0].text)
        return "".join(parts)


@long
def test_sixteen_streams_go_on_where_the_engine_dies(frail: TritonServer, model: Path) -> None:
    async def disturbed(gateway: Gateway) -> tuple[list[str], set[int]]:
        streams, statuses = Streams(gateway, 16), set[int]()
        running = asyncio.create_task(streams.texts())
        await streams.have_begun.wait()
        os.kill(frail.pids("engine")[0], signal.SIGKILL)
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            while not running.done():
                statuses.add((await http.get("/health/ready")).status_code)
                await asyncio.sleep(0.02)
        return await running, statuses

    with running_gateway([frail.grpc_url], model, "--served-model-name", "model") as gateway:
        wanted = asyncio.run(Streams(gateway, 16).texts())
        assert gateway.http.get("/health/ready").status_code == 200
        (pid,) = frail.pids("engine")
        texts, statuses = asyncio.run(disturbed(gateway))
        assert texts == wanted
        assert 503 in statuses, "it said that it is not ready"
        assert statuses <= {200, 503}
        assert frail.pids("engine") != [pid]
        # The streams may end before it has asked its server again.
        status = wait_for(
            lambda: gateway.http.get("/health/ready").status_code, lambda code: code == 200, 10.0
        )
        assert status == 200
    wait_idle(frail)


@pytest.fixture(scope="module")
def hanging(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose engine hangs on order, which its scheduler does not notice."""
    source = make_faulty_repository(tmp_path_factory.mktemp("faulty") / "models", step_s=0.0)
    settings = (*SETTINGS, "scheduler.min_step_deadline_s=3600")
    with (
        one_torch_thread(),
        running_server(model=model, settings=settings, source=source) as server,
    ):
        yield server


def test_an_engine_whose_step_never_ends_is_not_ready_until_another_one_serves(
    hanging: TritonServer, model: Path
) -> None:
    with running_gateway([hanging.grpc_url], model) as gateway:
        assert wait_for(lambda: ready(gateway), all) == [True]
        (pid,) = hanging.pids("engine")
        order = order_fault(hanging.repository, "hang-in-step", 1)
        began_at = time.monotonic()
        assert wait_for(lambda: ready(gateway), lambda found: not any(found)) == [False]
        assert not order.exists(), "it hangs"
        assert time.monotonic() - began_at >= STEP_TIMEOUT_S - 1.0, "a step may take long"
        reply = gateway.http.get("/health/ready")
        assert (reply.status_code, reply.json()["status"]) == (503, "not ready")
        assert reply.json()["servers"][0]["reason"].startswith("the engine hangs: no step for")
        assert scrape(hanging)["charonia_engine_up"] == 1, "its scheduler has not noticed"
        os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: ready(gateway), all) == [True]
        assert hanging.pids("engine") != [pid]
        assert gateway.http.post(TEXT, json=SAMPLED | {"max_tokens": 2}).status_code == 200


def test_an_engine_that_is_stopped_is_not_ready_until_it_or_another_one_goes_on(
    hanging: TritonServer, model: Path
) -> None:
    with running_gateway([hanging.grpc_url], model) as gateway:
        assert wait_for(lambda: ready(gateway), all) == [True]
        (pid,) = hanging.pids("engine")
        stop_process(pid)
        try:
            assert wait_for(lambda: ready(gateway), lambda found: not any(found)) == [False]
            assert gateway.http.get("/health/ready").status_code == 503
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert wait_for(lambda: ready(gateway), all) == [True]
        assert gateway.http.get("/health/ready").status_code == 200


def test_a_server_that_dies_is_an_error_in_its_streams_and_no_other_request_sees_it(
    server: TritonServer, model: Path
) -> None:
    with (
        one_torch_thread(),
        running_server(model=model, settings=SETTINGS) as doomed,
        running_gateway([doomed.grpc_url, server.grpc_url], model) as gateway,
    ):
        assert wait_for(lambda: ready(gateway), all) == [True, True]
        body = SAMPLED | {"max_tokens": ENDLESS, "stream": True}
        with (
            gateway.http.stream("POST", TEXT, json=body) as first,
            gateway.http.stream("POST", TEXT, json=body) as second,
        ):
            streams = [events_of(first), events_of(second)]
            for stream in streams:
                next(stream)
            outstanding = [
                gateway.metrics()[f'charonia_gateway_server_requests{{server="{url}"}}']
                for url in (doomed.grpc_url, server.grpc_url)
            ]
            assert outstanding == [1, 1], "each got the one that the other had not"
            doomed.kill()
            (last,) = [event for event in streams[0] if "error" in event]
            assert last["error"]["code"] == "unavailable"
            for _ in range(20):
                assert "error" not in next(streams[1])
                reply = gateway.http.post(TEXT, json=SAMPLED | {"max_tokens": 2})
                assert reply.status_code == 200, reply.text
        expected = [False, True]
        assert wait_for(lambda: ready(gateway), lambda found: found == expected) == expected
        retries = f'charonia_gateway_retries_total{{server="{doomed.grpc_url}"}}'
        assert gateway.metrics().get(retries, 0) < 20, "not each one is tried in vain"
    wait_idle(server)


def ready(gateway: Gateway) -> list[bool]:
    """What it says of its servers."""
    return [one["ready"] for one in gateway.http.get("/health/ready").json()["servers"]]
