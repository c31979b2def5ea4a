"""Streams of fewer, longer responses, as `stream_interval` asks for them."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from charonia.launch.server.run import running_server
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    ONE_THREAD,
    Response,
    at_once,
    ids_of,
    infer_grpc,
    one_torch_thread,
    request_inputs,
    stream_grpc,
    text_of,
)

INTERVAL = 4
NUM_TOKENS = 46
PROMPT = "A request — größer — ждёт 🐚"


@pytest.fixture(scope="module")
def server(small_checkpoint: Path) -> Iterator[TritonServer]:
    """A server whose responses have so many tokens."""
    settings = (ONE_THREAD, f"scheduler.stream_interval={INTERVAL}")
    with one_torch_thread(), running_server(model=small_checkpoint, settings=settings) as server:
        yield server


def answers(server: TritonServer, seed: int, model: str) -> tuple[Response, list[Response]]:
    """A request's answer as a whole, and as a stream."""
    sampling = {
        "max_tokens": NUM_TOKENS,
        "temperature": 1.5,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 1,
    }
    inputs = partial(request_inputs, PROMPT, sampling, return_token_ids=True, return_logprobs=True)
    whole = infer_grpc(server, inputs(exclude_input_in_output=True))
    return whole, stream_grpc(server, inputs(stream=True), model)


def logprobs_of(responses: list[Response]) -> list[Any]:
    """Of all tokens."""
    return [entry for one in responses for entry in json.loads(one.one("logprobs"))]


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_a_stream_with_an_interval_adds_up_to_the_whole_answer_in_fewer_responses(
    server: TritonServer, model: str
) -> None:
    for whole, stream in at_once([partial(answers, server, seed, model) for seed in range(8)]):
        assert text_of(stream) == whole.text
        assert ids_of(stream) == whole.outputs["output_ids"]
        assert logprobs_of(stream) == logprobs_of([whole])
        assert all(len(one.outputs["output_ids"]) >= INTERVAL for one in stream[1:-1])
        assert len(stream) <= 2 + NUM_TOKENS // INTERVAL
