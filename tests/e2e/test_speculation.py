"""Speculation on the real server: streams with drafts equal streams without, whatever happens.

The bundled demo pair in float32. A request that asks for no drafts runs on the same server, so
that each stream has its reference there.
"""

import contextlib
import inspect
import json
import os
import signal
import tokenize
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from charonia.config import DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT
from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from charonia.text.tokenizer import Tokenizer
from support.e2e import (
    Response,
    infer_grpc,
    one_response,
    one_torch_thread,
    request_inputs,
    stream_grpc,
    tensors,
    wait_idle,
)
from support.faults import SLOW_STEP_S, paced
from support.live_stream import LiveStream
from support.long import long, one_in

NUM_STREAMS, NUM_TOKENS = 24, 60
WAYS_IN = [("grpc", "scheduler"), ("grpc", "llm"), ("http", "scheduler")]
CONFIGS: dict[str, dict[str, Any]] = {
    "draft_model": {
        "model": str(DEMO_DRAFT_CHECKPOINT),
        "num_speculative_tokens": 4,
        "adaptive": False,
    },
    "ngram": {"method": "ngram", "num_speculative_tokens": 6, "adaptive": False},
    "suffix": {"method": "suffix"},
    "as served without arguments": {"model": str(DEMO_DRAFT_CHECKPOINT)},
}


@pytest.fixture(scope="module", params=one_in(4, ((name,) for name in CONFIGS)))
def drafting_server(
    request: pytest.FixtureRequest, faulty_repository: Path
) -> Iterator[TritonServer]:
    """Its steps take no longer than they must, unless a test says so."""
    settings = (
        "dtype=float32",
        "max_num_seqs=16",
        "num_gpu_blocks_override=150",  # too few for all, so that some are preempted
        f"speculative_config={json.dumps(CONFIGS[request.param])}",
    )
    with (
        one_torch_thread(),
        running_server(
            model=DEMO_CHECKPOINT,
            settings=settings,
            source=faulty_repository,
            facades=("tensorrt-llm",),
        ) as server,
        paced(server.repository, 0),
    ):
        yield server


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    token_ids = Tokenizer.from_dir(DEMO_CHECKPOINT).encode(inspect.getsource(tokenize))
    return [token_ids[index * 50 :][: 30 + 9 * index % 130] for index in range(NUM_STREAMS)]


def test_a_clients_guess_changes_no_token_and_is_accepted_where_it_is_right(
    drafting_server: TritonServer, prompts: list[list[int]]
) -> None:
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 3, "top_p": 0.9}
    for index, prompt in enumerate(prompts[:6]):
        whole = {"return_token_ids": True, "return_timing": True}
        plain = infer_grpc(
            drafting_server, request_inputs(prompt, sampling | {"speculation": False}, **whole)
        )
        tokens = plain.outputs["output_ids"]
        guess = list(tokens)
        if index % 2:
            guess[20] += 1
        for model in ("generate", "llm", "scheduler"):
            inputs = request_inputs(prompt, sampling, **whole) | {"draft_input_ids": guess}
            ask = infer_grpc if model == "generate" else stream_one
            answer = ask(drafting_server, inputs, model)
            assert answer.outputs["output_ids"] == tokens
            assert json.loads(answer.one("timing"))["accepted_tokens"] >= 12


def test_a_guess_in_tensorrt_llms_convention_is_accepted_too(
    drafting_server: TritonServer, prompts: list[list[int]]
) -> None:
    prompt, length = prompts[0], np.array([[len(prompts[0])]], dtype=np.int32)
    request = {
        "input_ids": np.array([prompt], dtype=np.int32),
        "input_lengths": length,
        "request_output_len": np.array([[NUM_TOKENS]], dtype=np.int32),
        "exclude_input_in_output": np.array([[True]]),
    }
    plain = infer_one(drafting_server, request)
    before = wait_idle(drafting_server)["charonia_accepted_tokens_total"]
    again = infer_one(drafting_server, request | {"draft_input_ids": plain[0]})
    assert again.tolist() == plain.tolist()
    assert wait_idle(drafting_server)["charonia_accepted_tokens_total"] >= before + NUM_TOKENS // 2


def infer_one(server: TritonServer, inputs: dict[str, Any]) -> Any:
    """The `output_ids` of `tensorrt_llm`."""
    results: SimpleQueue[Any] = SimpleQueue()
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        client.start_stream(lambda result, error: results.put(error or result))
        client.async_stream_infer("tensorrt_llm", tensors(inputs))
        client.stop_stream()
    return results.get().as_numpy("output_ids")


def stream_one(server: TritonServer, inputs: dict[str, Any], model: str) -> Response:
    return one_response(stream_grpc(server, inputs, model))


def start_streams(
    server: TritonServer, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, **options: Any
) -> list[LiveStream]:
    """One stream per prompt, by all ways in turn; every other one samples with a seed."""
    urls = {"grpc": server.grpc_url, "http": server.http_url}
    streams = []
    for index, prompt in enumerate(prompts):
        protocol, model = WAYS_IN[index % len(WAYS_IN)]
        sampling = {"temperature": 0.0} if index % 2 else {"top_p": 0.9, "presence_penalty": 0.3}
        sampling |= {"max_tokens": num_tokens, "ignore_eos": True, "seed": index} | options
        streams.append(
            LiveStream(urls[protocol], prompt, protocol=protocol, model=model, **sampling)
        )
    return streams


def tokens_of(streams: list[LiveStream]) -> list[list[int]]:
    for stream in streams:
        stream.wait_over()
        assert (stream.error, stream.finish_reason) == (None, "length")
    return [stream.token_ids for stream in streams]


@pytest.fixture(scope="module")
def undrafted(drafting_server: TritonServer, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of each stream without drafts."""
    streams = start_streams(drafting_server, prompts, speculation=False)
    token_ids = tokens_of(streams)
    assert [stream.timing["drafted_tokens"] for stream in streams] == [0] * NUM_STREAMS
    return token_ids


def test_streams_with_drafts_have_the_tokens_of_streams_without(
    drafting_server: TritonServer, prompts: list[list[int]], undrafted: list[list[int]]
) -> None:
    before = wait_idle(drafting_server)
    streams = start_streams(drafting_server, prompts)
    assert tokens_of(streams) == undrafted
    after = wait_idle(drafting_server)

    def counted(name: str) -> float:
        return after[f"charonia_{name}"] - before.get(f"charonia_{name}", 0.0)

    timings = [stream.timing for stream in streams]
    for name, metric in (("drafted_tokens", "draft"), ("accepted_tokens", "accepted")):
        assert counted(f"{metric}_tokens_total") == sum(timing[name] for timing in timings) > 0
    drafting = [timing for timing in timings if timing["drafted_tokens"]]
    assert counted("draft_rounds_total") == sum(timing["draft_rounds"] for timing in drafting)
    for place in (0, 1):
        for what in ("drafted", "accepted"):
            shown = counted(f'{what}_at_position_total{{position="{place}"}}')
            many = [timing[f"{what}_at_position"] for timing in drafting]
            assert shown == sum(one[place] for one in many if len(one) > place) > 0
    assert counted('step_phase_seconds_total{phase="verify"}') > 0


def test_a_unary_request_with_drafts_has_the_same_tokens(
    drafting_server: TritonServer, prompts: list[list[int]], undrafted: list[list[int]]
) -> None:
    sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    inputs = request_inputs(prompts[1], sampling, return_token_ids=True)
    assert infer_grpc(drafting_server, inputs).outputs["output_ids"] == undrafted[1]


@long
def test_streams_with_drafts_survive_the_death_of_the_engine(
    drafting_server: TritonServer, prompts: list[list[int]]
) -> None:
    num_tokens = 900
    (engine,) = drafting_server.pids("engine")
    reference = tokens_of(
        start_streams(drafting_server, prompts[:6], num_tokens, speculation=False)
    )
    with paced(drafting_server.repository, SLOW_STEP_S):
        streams = start_streams(drafting_server, prompts[:6], num_tokens)
        for stream in streams:
            stream.wait_tokens(20)
        os.kill(engine, signal.SIGKILL)
    assert tokens_of(streams) == reference
    assert max(stream.timing["restarts"] for stream in streams) == 1
    assert min(stream.timing["drafted_tokens"] for stream in streams) > 0
    wait_idle(drafting_server)


def test_a_client_that_leaves_takes_its_drafts_along(
    drafting_server: TritonServer, prompts: list[list[int]]
) -> None:
    streams = start_streams(drafting_server, prompts[:6], 500)
    for stream in streams:
        stream.wait_tokens(10)
        stream.leave()
    wait_idle(drafting_server)
