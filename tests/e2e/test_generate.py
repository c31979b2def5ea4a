"""Unary requests: many at once, clients that leave, the end of their process."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ENDLESS,
    ENDLESS_BLOCKS,
    ONE_THREAD,
    request_inputs,
    scrape,
    tensors,
    wait_for,
    wait_idle,
)
from support.live_stream import LiveStream
from support.long import long

NUM_CLIENTS = 24
NUM_REQUESTS = 6000


@pytest.fixture
def client(server: TritonServer) -> Iterator[grpc.InferenceServerClient]:
    with grpc.InferenceServerClient(server.grpc_url) as made:
        yield made


@long
def test_thousands_of_requests_of_many_clients_are_all_answered_by_the_same_processes(
    server: TritonServer,
) -> None:
    """With tensors in BLS answers, `generate` died of a corrupt heap after some thousand."""
    models = ("generate", "scheduler", "engine")
    wait_idle(server)
    before = {model: server.pids(model) for model in models}
    url = f"http://{server.http_url}/v2/models/generate/generate"

    def ask(first: int) -> int:
        num_tokens = 0
        with httpx.Client(timeout=60) as http:
            for index in range(first, NUM_REQUESTS, NUM_CLIENTS):
                wanted = 1 + index % 5
                parameters = {"max_tokens": wanted, "ignore_eos": True}
                reply = http.post(
                    url,
                    json={
                        "input_ids": [1 + index % 300, 2, 3],
                        "sampling_parameters": json.dumps(parameters),
                        "return_num_output_tokens": True,
                    },
                )
                assert reply.status_code == 200, reply.text
                assert reply.json()["num_output_tokens"] == wanted
                num_tokens += wanted
        return num_tokens

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        assert sum(pool.map(ask, range(NUM_CLIENTS))) == sum(
            1 + index % 5 for index in range(NUM_REQUESTS)
        )
    assert {model: server.pids(model) for model in models} == before


def test_a_client_that_goes_away_ends_its_request(
    server: TritonServer, client: grpc.InferenceServerClient
) -> None:
    counter = "charonia_cancellations_total"
    before = wait_idle(server)[counter]
    inputs = request_inputs([5, 6, 7], {"max_tokens": ENDLESS, "ignore_eos": True})
    call = client.async_infer("generate", tensors(inputs), lambda result, error: None)
    name = "charonia_requests_running"
    assert wait_for(lambda: scrape(server)[name], lambda number: number == 1) == 1
    call.cancel()
    assert wait_idle(server)[counter] == before + 1


def test_a_probe_without_a_wish_for_its_text_is_answered_without_tensors(
    client: grpc.InferenceServerClient,
) -> None:
    """So it comes over BLS, which makes the tensors of an answer without Python's lock."""
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(error or result))
    wish = [grpc.InferRequestedOutput("timing")]
    client.async_stream_infer("scheduler", tensors({"probe": np.array([True])}), outputs=wish)
    client.stop_stream()
    (answer,) = answers
    assert list(answer.get_response().outputs) == []


@long
def test_the_end_of_generate_cancels_its_requests_and_disturbs_no_other(
    endless_checkpoint: Path,
) -> None:
    settings = (ONE_THREAD, ENDLESS_BLOCKS, "max_num_seqs=16")
    with running_server(model=endless_checkpoint, settings=settings) as server:
        sampling = {"max_tokens": ENDLESS, "ignore_eos": True}
        stream = LiveStream(server.grpc_url, [1, 2, 3], temperature=0.0, **sampling)
        stream.wait_tokens(1)
        running, cancelled = "charonia_requests_running", "charonia_cancellations_total"
        with grpc.InferenceServerClient(server.grpc_url) as client:
            calls = [
                client.async_infer(
                    "generate",
                    tensors(request_inputs([5, 6, n], sampling)),
                    lambda result, error: None,
                )
                for n in range(8)
            ]
            assert wait_for(lambda: scrape(server)[running], lambda number: number == 9) == 9
            (pid,) = server.pids("generate")
            os.kill(pid, signal.SIGKILL)
            assert wait_for(lambda: scrape(server)[cancelled], lambda number: number == 8) == 8
            for call in calls:
                call.cancel()
        stream.wait_tokens(len(stream.token_ids) + 100)
        assert not stream.is_over, stream.error
        stream.leave()
        stream.wait_over()
