"""Triton's own model control: models that are loaded again while they are loaded and used."""

import os
import signal
from collections.abc import Callable
from functools import partial

import httpx
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from charonia.core.replica.recovery import NOT_READY
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ANSWER_TIMEOUT_S,
    ENDLESS,
    ids_of,
    infer_grpc,
    request_inputs,
    stream_grpc,
    wait_for,
    wait_idle,
    wait_running,
)
from support.live_stream import LiveStream
from support.long import long

PROMPT = [1, 2, 3]
SAMPLING = {"seed": 1, "ignore_eos": True}
LONG, SHORT = 3000, 8
NUM_HTTP_THREADS = 8  # of tritonserver's, by default


def load(server: TritonServer, model: str) -> None:
    """Have Triton load a model that is loaded; it does so only where a file has changed."""
    for path in (server.repository / model).glob("*/model.py"):
        path.touch()
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.load_model(server.control_name(model), headers=server.api_headers)


def unload(server: TritonServer, model: str) -> None:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.unload_model(server.control_name(model), headers=server.api_headers)


def start(
    server: TritonServer, model: str, request_id: str = "", max_tokens: int = ENDLESS
) -> LiveStream:
    """A stream that has begun, and goes on."""
    sampling = SAMPLING | {"max_tokens": max_tokens}
    stream = LiveStream(server.grpc_url, PROMPT, model=model, request_id=request_id, **sampling)
    stream.wait_tokens(3)
    return stream


def short_answers(server: TritonServer) -> list[list[int]]:
    """What each way in makes of the same prompt now.

    On a busy machine a scheduler may take longer to find its engine than a request waits for that.
    """
    inputs = request_inputs(PROMPT, SAMPLING | {"max_tokens": SHORT})
    inputs |= {"return_token_ids": True}
    calls: list[Callable[[], list[int]]] = [
        lambda: ids_of(stream_grpc(server, inputs | {"stream": True})),
        lambda: ids_of(stream_grpc(server, inputs | {"stream": True}, "llm")),
        lambda: infer_grpc(server, inputs).outputs["output_ids"],
    ]
    answers = []
    for call in calls:
        answer = wait_for(partial(unless_not_ready, call), lambda answer: answer is not None)
        assert answer is not None, NOT_READY
        answers.append(answer)
    return answers


def unless_not_ready(call: Callable[[], list[int]]) -> list[int] | None:
    """What a call gives; None where it is refused because the engine is not ready yet."""
    try:
        return call()
    except InferenceServerException as error:
        if NOT_READY not in error.message():
            raise
        return None


def wait_alone(server: TritonServer, model: str, num_processes: int = 1) -> None:
    """Wait until Triton has let the processes go that it has replaced."""
    pids = wait_for(lambda: server.pids(model), lambda pids: len(pids) == num_processes)
    assert len(pids) == num_processes, f"{len(pids)} processes of {model}"


@long
def test_a_scheduler_loaded_over_another_takes_over_and_ends_its_requests(
    server: TritonServer,
) -> None:
    expected = short_answers(server)
    before = wait_idle(server)
    for _ in range(3):
        streams = [start(server, model) for model in ("scheduler", "llm")]
        load(server, "scheduler")
        assert short_answers(server) == expected
        for stream in streams:
            assert "shutting_down" in (stream.wait_over().error or "")
        wait_alone(server, "scheduler")
    after = wait_idle(server)
    failures = [name for name in after if name.startswith("charonia_engine_failures")]
    assert [after[name] for name in failures] == [before[name] for name in failures]
    assert after["charonia_engine_up"] == 1
    assert server.is_running


@long
def test_loading_the_ensemble_again_and_again_leaves_the_server_whole(server: TritonServer) -> None:
    expected = short_answers(server)
    for _ in range(3):
        load(server, "llm")
        assert short_answers(server) == expected
        wait_alone(server, "scheduler")
    assert server.is_running


def test_streams_outlive_the_models_around_the_scheduler(server: TritonServer) -> None:
    expected = short_answers(server)
    undisturbed = start(server, "scheduler", max_tokens=LONG).wait_over().token_ids
    streams = []
    for loaded in ("tokenizer", "postprocessor", "generate"):
        streams += [start(server, model, max_tokens=LONG) for model in ("scheduler", "llm")]
        load(server, loaded)
    for stream in streams:
        stream.wait_over()
        assert (stream.error, stream.token_ids) == (None, undisturbed)
    assert short_answers(server) == expected


@long
def test_http_streams_whose_thread_carries_out_a_load_come_to_their_ends(
    server: TritonServer,
) -> None:
    # It is late for more responses than Triton's queue of such a thread holds.
    undisturbed = start(server, "scheduler", max_tokens=LONG).wait_over().token_ids
    sampling = SAMPLING | {"max_tokens": LONG}
    streams = [
        LiveStream(server.http_url, PROMPT, protocol="http", **sampling)
        for _ in range(2 * NUM_HTTP_THREADS)
    ]
    for stream in streams:
        stream.wait_tokens(3)
    (server.repository / "generate" / "1" / "model.py").touch()
    name = server.control_name("generate")
    url = f"http://{server.http_url}/v2/repository/models/{name}/load"
    assert httpx.post(url, json={}, timeout=ANSWER_TIMEOUT_S).status_code == 200
    for stream in streams:
        stream.wait_over()
        assert (stream.error, stream.token_ids) == (None, undisturbed)
    wait_alone(server, "generate")


def test_a_scheduler_that_was_unloaded_serves_again_once_it_is_loaded(server: TritonServer) -> None:
    expected = short_answers(server)
    stream = start(server, "scheduler", max_tokens=LONG)  # to whose end Triton waits
    unload(server, "scheduler")
    stream.wait_over()
    load(server, "scheduler")
    assert short_answers(server) == expected
    wait_alone(server, "scheduler")


@long
def test_a_scheduler_is_unloaded_and_loaded_over_while_only_a_proxy_has_requests(
    server: TritonServer,
) -> None:
    """Triton counts none of them at the scheduler, so it does not wait for their end."""
    expected = short_answers(server)
    sampling = SAMPLING | {"max_tokens": ENDLESS}
    for change in (unload, load):
        requests = [
            LiveStream(server.grpc_url, PROMPT, protocol="unary", model="generate", **sampling)
            for _ in range(3)
        ]
        wait_running(server, len(requests))
        change(server, "scheduler")
        for request in requests:
            assert "[charonia:" in (request.wait_over().error or ""), request.error
        if change is unload:
            wait_alone(server, "scheduler", num_processes=0)
            load(server, "scheduler")
        assert short_answers(server) == expected
        wait_alone(server, "scheduler")


def test_a_scheduler_that_finds_its_engine_dead_has_it_replaced(server: TritonServer) -> None:
    """Nobody saw the engine die, and Triton takes it for loaded."""
    expected = short_answers(server)
    unload(server, "scheduler")
    wait_alone(server, "scheduler", num_processes=0)
    (engine,) = server.pids("engine")
    os.kill(engine, signal.SIGKILL)
    load(server, "scheduler")
    refusal = wait_for(lambda: refusal_of(server), lambda refusal: refusal is None, timeout=60.0)
    assert refusal is None
    assert short_answers(server) == expected
    assert server.pids("engine") != [engine]


def refusal_of(server: TritonServer) -> str | None:
    """Why a request is refused now; None when it is served."""
    try:
        infer_grpc(server, request_inputs(PROMPT, SAMPLING | {"max_tokens": 1}))
    except InferenceServerException as error:
        return str(error)
    return None


def test_streams_that_end_with_an_error_hold_no_model_that_was_replaced(
    server: TritonServer,
) -> None:
    """Triton 2.51.0 never ends an ensemble that fails while its last step has a response."""
    streams = [start(server, "llm", request_id="to be cancelled") for _ in range(6)]
    infer_grpc(server, {"cancel": True}, request_id="to be cancelled")
    assert all("cancelled" in (stream.wait_over().error or "") for stream in streams)
    load(server, "postprocessor")
    wait_alone(server, "postprocessor")


def test_no_process_keeps_the_connections_that_clients_had_when_it_was_started(
    server: TritonServer,
) -> None:
    url = f"http://{server.http_url}"
    with httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S) as client:
        client.get("/v2/health/live").raise_for_status()  # and stays connected
        unload(server, "tokenizer")
        load(server, "tokenizer")
        wait_alone(server, "tokenizer", 2)
        kept = {
            model: [
                connection
                for process in stubs
                for connection in process.net_connections()
                if connection.laddr.port in (server.http_port, server.grpc_port)
            ]
            for model, stubs in server.stubs().items()
        }
    assert kept == {model: [] for model in kept}
