"""What breaks behind a gateway: streams go on, or end with an error that says so."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ENDLESS, ENDLESS_BLOCKS, ONE_THREAD, one_torch_thread, wait_for, wait_idle
from support.gateway import Gateway, running_gateway
from support.long import long

TEXT = "/v1/completions"
SETTINGS = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=8")
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


@long
def test_a_stream_goes_on_where_the_engine_dies(frail: TritonServer, model: Path) -> None:
    body = SAMPLED | {"seed": 5, "max_tokens": 1500, "stream": True}
    with running_gateway([frail.grpc_url], model) as gateway:
        with gateway.http.stream("POST", TEXT, json=body) as reply:
            wanted = "".join(event["choices"][0]["text"] for event in events_of(reply))
        assert gateway.http.get("/health/ready").status_code == 200
        with gateway.http.stream("POST", TEXT, json=body) as reply:
            events = events_of(reply)
            text = next(events)["choices"][0]["text"]
            (pid,) = frail.pids("engine")
            os.kill(pid, signal.SIGKILL)
            text += "".join(event["choices"][0]["text"] for event in events)
        assert text == wanted
        (new_pid,) = frail.pids("engine")
        assert new_pid != pid, "it was not killed in mid-stream"
        ready = wait_for(
            lambda: gateway.http.get("/health/ready"), lambda reply: reply.status_code == 200
        )
        assert ready.json()["status"] == "ready"
    wait_idle(frail)


def test_a_server_that_dies_is_an_error_in_its_streams_and_no_other_request_sees_it(
    server: TritonServer, model: Path
) -> None:
    with (
        one_torch_thread(),
        running_server(model=model, settings=SETTINGS) as doomed,
        running_gateway([doomed.grpc_url, server.grpc_url], model) as gateway,
    ):
        assert [one["ready"] for one in readiness(gateway)["servers"]] == [True, True]
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
        assert [one["ready"] for one in readiness(gateway)["servers"]] == [False, True]
        metrics = gateway.metrics()
        assert metrics[f'charonia_gateway_server_resting{{server="{doomed.grpc_url}"}}'] == 1
        retries = metrics.get(f'charonia_gateway_retries_total{{server="{doomed.grpc_url}"}}', 0)
        assert 1 <= retries < 20, "not each one is tried in vain"
    wait_idle(server)


def readiness(gateway: Gateway) -> dict[str, Any]:
    """What it says of its servers."""
    answer: dict[str, Any] = gateway.http.get("/health/ready").json()
    return answer
