"""Where the real server says no or stops: a full queue, time, length, a wrong configuration."""

import contextlib
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import tritonclient.grpc as grpc

from charonia.errors import ConfigError, LaunchError
from charonia.launch.server.repository import RepositoryOptions
from charonia.launch.server.run import prepared_server, running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.serving.hosts.engine import check_instance_kind
from charonia.serving.requests.tokenizing import INLINE_CHARACTERS
from support.bystander import Bystander
from support.e2e import (
    ANSWER_TIMEOUT_S,
    ENDLESS,
    ONE_THREAD,
    GrpcStream,
    endless_request,
    error_of,
    generate,
    infer_grpc,
    one_response,
    request_inputs,
    scrape,
    stream_grpc,
    tensors,
    wait_for,
    wait_idle,
)
from support.long import long

TIMEOUT = "Request timeout expired [charonia:timeout]"
PROMPT = "def größer(queue: list[str]) -> int:"
IN_ENSEMBLE = "in ensemble 'llm', "


def test_output_that_reaches_the_longest_length_ends(small_checkpoint: Path) -> None:
    inputs = request_inputs([5] * 460, {"max_tokens": 999, "ignore_eos": True})
    inputs |= {"return_finish_reason": True, "return_num_output_tokens": True}
    settings = (ONE_THREAD, "max_model_len=496")
    with running_server(model=small_checkpoint, settings=settings) as server:
        response = infer_grpc(server, inputs)
    assert response.one("num_output_tokens") == 496 - 460
    assert response.one("finish_reason") == "length"


def test_a_prompt_that_is_tokenized_in_a_thread_is_answered_by_every_way_in(
    server: TritonServer,
) -> None:
    prompt = "A request waits in the queue. " * 140
    assert len(prompt) > INLINE_CHARACTERS
    inputs = request_inputs(prompt, {"max_tokens": 4, "temperature": 0, "ignore_eos": True})
    texts = [
        one_response(stream_grpc(server, inputs)).text,
        one_response(stream_grpc(server, inputs, "llm")).text,
        infer_grpc(server, inputs).text,
    ]
    assert texts[0].startswith(prompt)
    assert len(set(texts)) == 1


# ---------------------------------------------------------------------- much at once


def test_a_dozen_huge_prompts_disturb_neither_a_stream_nor_a_probe(server: TritonServer) -> None:
    wait_idle(server)
    huge = {"text_input": b"x" * 2**22, "sampling_parameters": {"max_tokens": 1}}
    sends = [
        lambda: stream_grpc(server, huge),
        lambda: stream_grpc(server, huge, "llm"),
        lambda: infer_grpc(server, huge),
    ]
    errors: list[str] = []
    senders = [
        threading.Thread(target=lambda send=send: errors.append(error_of(send).message()))
        for send in sends * 4
    ]
    with Bystander(server, seed=11) as bystander:
        for sender in senders:
            sender.start()
        states = []
        while not states or any(sender.is_alive() for sender in senders):
            reply = generate(server, {"probe": True})
            states.append(json.loads(reply.json()["text_output"]))
        bystander.wait_tokens(10)
    assert all(state["engine_up"] and state["step_age_s"] is not None for state in states)
    assert len(errors) == 12
    assert all(text.endswith("[charonia:prompt_too_long]") for text in errors), errors
    assert bystander.token_ids == bystander.undisturbed()


@long
def test_a_thousand_unary_requests_are_each_answered_or_refused(
    narrow_server: TritonServer,
) -> None:
    before = wait_idle(narrow_server)
    inputs = tensors(request_inputs(PROMPT, {"max_tokens": 1, "ignore_eos": True}))
    outcomes: SimpleQueue[str] = SimpleQueue()

    def note(result: Any, error: Any) -> None:
        outcomes.put("" if error is None else error.message())

    with contextlib.closing(grpc.InferenceServerClient(narrow_server.grpc_url)) as client:
        for _ in range(1000):
            client.async_infer("generate", inputs, note)
        texts = [outcomes.get(timeout=ANSWER_TIMEOUT_S) for _ in range(1000)]
    refused = [text for text in texts if text]
    assert all(text.endswith("[charonia:queue_full]") for text in refused), set(refused)
    assert len(refused) < 1000
    after = wait_idle(narrow_server)
    ended = 'charonia_finished_total{reason="length"}'
    assert after[ended] - before[ended] == 1000 - len(refused)


# ---------------------------------------------------------------------- requests in time


@pytest.fixture
def idle_server(narrow_server: TritonServer) -> TritonServer:
    """The narrow server with nothing running and nothing waiting."""
    wait_idle(narrow_server)
    return narrow_server


def test_a_full_queue_refuses_at_once_with_the_exact_text(idle_server: TritonServer) -> None:
    server = idle_server
    with endless_request(server):
        waiting = [GrpcStream(server) for _ in range(2)]
        for stream in waiting:
            stream.send(request_inputs(PROMPT, {"max_tokens": 1}))
        samples = wait_for(
            lambda: scrape(server), lambda samples: samples["charonia_requests_waiting"] == 2
        )
        assert samples["charonia_requests_waiting"] == 2
        inputs = request_inputs(PROMPT, {"max_tokens": 1})
        for error in (
            error_of(lambda: stream_grpc(server, inputs)),
            error_of(lambda: stream_grpc(server, inputs, "llm")),
            error_of(lambda: infer_grpc(server, inputs)),
        ):
            assert "Exceeds maximum queue size" in error.message()
            assert "Maximum queue size of 2" in error.message()
            if error.status() is not None:  # a stream's errors have no code of their own
                assert error.status() == "StatusCode.UNAVAILABLE"
        reply = generate(server, {"text_input": PROMPT, "max_tokens": 1})
        assert reply.status_code >= 400
        assert "Exceeds maximum queue size" in reply.json()["error"]
    for stream in waiting:  # who waited is served
        assert one_response(list(stream)).text.startswith(PROMPT)
        stream.close()


def test_a_timeout_in_the_queue_has_the_exact_text(idle_server: TritonServer) -> None:
    server = idle_server
    inputs = request_inputs(PROMPT, {"max_tokens": 1})
    with endless_request(server):
        unary = error_of(lambda: infer_grpc(server, inputs, timeout=100_000))
        assert unary.message() == TIMEOUT
        assert unary.status() == "StatusCode.UNAVAILABLE"
        stream = error_of(lambda: stream_grpc(server, inputs, timeout=100_000))
        assert stream.message() == TIMEOUT
        llm = error_of(lambda: stream_grpc(server, inputs, "llm", timeout=100_000))
        assert llm.message() == IN_ENSEMBLE + TIMEOUT
        reply = generate(server, {"text_input": PROMPT, "max_tokens": 1, "timeout": 100_000})
        assert reply.json() == {"error": TIMEOUT}


def test_a_negative_timeout_is_refused(server: TritonServer) -> None:
    inputs = request_inputs(PROMPT, {"max_tokens": 1})
    refusal = "timeout must be microseconds, at least 0, but is -1"
    for call in (stream_grpc, infer_grpc):
        assert refusal in error_of(partial(call, server, inputs, timeout=-1)).message()


def test_a_deadline_ends_a_request_that_runs(server: TritonServer) -> None:
    num_received = 0

    def receive(stream: GrpcStream) -> None:
        nonlocal num_received
        for _ in stream:
            num_received += 1

    for deadline_ms in (200, 800, 3200, 12800):  # on a busy machine it may not run by the first
        sampling = {"max_tokens": ENDLESS, "ignore_eos": True, "deadline_ms": deadline_ms}
        with GrpcStream(server) as stream:
            stream.send(request_inputs(PROMPT, sampling, stream=True))
            error = error_of(partial(receive, stream))
        assert "deadline" in error.message() or "timeout" in error.message()
        if num_received:
            break
    assert num_received


# ---------------------------------------------------------------------- configuration


def load_error(checkpoint: Path, change: Callable[[Path], None]) -> str:
    """Why tritonserver does not load a repository whose engine was changed by `change`."""
    log: list[str] = []
    options = RepositoryOptions(model=checkpoint)
    with prepared_server(options, on_log=log.append) as (server, prepared):
        change(prepared.path / "engine")
        server.start()
        with pytest.raises(LaunchError):
            server.wait_ready()
    return "\n".join(log)


def set_engine_argument(engine: Path, **values: Any) -> None:
    path = engine / "1" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values), encoding="utf-8")


def test_an_unknown_key_in_model_json_fails_the_load_and_is_named(small_checkpoint: Path) -> None:
    log = load_error(small_checkpoint, partial(set_engine_argument, max_batch=4))
    assert "unknown engine argument 'max_batch'; accepted are model, tokenizer, dtype" in log


def test_tensor_parallelism_with_one_instance_per_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"tensor_parallel_size": 2, "model": "m"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="please specify KIND_MODEL"):
        check_instance_kind(path, "GPU")
    check_instance_kind(path, "MODEL")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton refuses KIND_GPU without one")
def test_triton_says_to_specify_kind_model(small_checkpoint: Path) -> None:
    def change(engine: Path) -> None:
        set_engine_argument(engine, tensor_parallel_size=2)
        path = engine / "config.pbtxt"
        config = path.read_text(encoding="utf-8")
        path.write_text(config.replace("KIND_MODEL", "KIND_GPU"), encoding="utf-8")

    assert "please specify KIND_MODEL" in load_error(small_checkpoint, change)
