"""Streams on the real server: their concatenation, their borders, their end, many at once.

The checkpoint is random and its tokens are bytes and merged bytes, so at a high temperature its
output is full of characters that several tokens make up, and of bytes that make up none.
"""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import (
    GrpcStream,
    Response,
    at_once,
    check_stream,
    generate_stream,
    generate_url,
    ids_of,
    infer_grpc,
    infer_http,
    request_inputs,
    scrape,
    sse_events,
    stream_grpc,
    text_of,
    wait_idle,
)
from support.long import long

NUM_REQUESTS = 50
NUM_STREAMS = 64
PROMPT = "A request — größer — ждёт 🐚"
HIGH_BYTES = range(0x80, 0x100)
MIN_SHARE = 0.3
Sampling = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(small_checkpoint: Path) -> Tokenizer:
    """The checkpoint's tokenizer, as the library gives it."""
    return Tokenizer.from_file(str(small_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def high_byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are no text by themselves: bytes from 0x80, and beginnings of characters."""
    tokens = range(tokenizer.get_vocab_size())
    ids = [token_id for token_id in tokens if tokenizer.decode([token_id]) == "\ufffd"]
    assert len(ids) >= len(HIGH_BYTES)
    return ids


@pytest.fixture(scope="module", params=["hot", "biased"])
def requests(request: pytest.FixtureRequest, high_byte_ids: list[int]) -> list[Sampling]:
    """50 requests: at temperature 1.5, or biased towards the bytes from 0x80."""
    sampling: Sampling = {"max_tokens": 48, "temperature": 1.5, "ignore_eos": True}
    if request.param == "biased":
        sampling |= {"temperature": 1.0, "logit_bias": dict.fromkeys(high_byte_ids, 6.0)}
    return [sampling | {"seed": seed} for seed in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def whole_texts(server: TritonServer, requests: list[Sampling]) -> list[str]:
    """What the same requests give without streaming, without the prompt."""
    return at_once([partial(whole_text, server, sampling) for sampling in requests])


def whole_text(server: TritonServer, sampling: Sampling, prompt: str = PROMPT) -> str:
    """The text of a request that does not stream."""
    inputs = request_inputs(prompt, sampling, exclude_input_in_output=True)
    return infer_grpc(server, inputs).text


def streamed(
    server: TritonServer, sampling: Sampling, model: str = "scheduler", prompt: str = PROMPT
) -> list[Response]:
    """The responses of a request that streams over gRPC, with token ids and finish reason."""
    inputs = request_inputs(
        prompt, sampling, stream=True, return_token_ids=True, return_finish_reason=True
    )
    return stream_grpc(server, inputs, model)


def share_of_high_text(texts: list[str]) -> float:
    """How many of the characters are multi-byte in UTF-8, or stand for invalid bytes."""
    text = "".join(texts)
    return sum(ord(character) >= 0x80 for character in text) / len(text)


# ---------------------------------------------------------------------- byte for byte


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_a_grpc_stream_adds_up_to_the_unstreamed_text(
    server: TritonServer, requests: list[Sampling], whole_texts: list[str], model: str
) -> None:
    streams = at_once([partial(streamed, server, sampling, model) for sampling in requests])
    assert [text_of(stream) for stream in streams] == whole_texts
    assert share_of_high_text(whole_texts) >= MIN_SHARE
    num_tokens = sum(len(ids_of(stream)) for stream in streams)
    assert num_tokens == NUM_REQUESTS * 48
    assert sum(map(len, streams)) < num_tokens
    # One character that came with several tokens: its first bytes must have been kept back.
    assert any(
        len(response.text) == 1 < len(response.outputs["output_ids"])
        for stream in streams
        for response in stream[:-1]
    )


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_generate_stream_adds_up_to_the_unstreamed_text(
    server: TritonServer, requests: list[Sampling], whole_texts: list[str], model: str
) -> None:
    def stream(sampling: Sampling) -> list[dict[str, Any]]:
        parameters = {"sampling_parameters": json.dumps(sampling), "stream": True}
        return generate_stream(server, {"text_input": PROMPT} | parameters, model)

    streams = at_once([partial(stream, sampling) for sampling in requests])
    texts = ["".join(event["text_output"] for event in events) for events in streams]
    assert texts == whole_texts
    assert all(event["text_output"] for events in streams for event in events[:-1])


def test_both_protocols_give_the_same_bytes_without_streaming(
    server: TritonServer, requests: list[Sampling], whole_texts: list[str]
) -> None:
    inputs = [request_inputs(PROMPT, sampling) for sampling in requests]
    answers = at_once([partial(infer_http, server, one) for one in inputs])
    assert [answer.text for answer in answers] == [PROMPT + text for text in whole_texts]


# ---------------------------------------------------------------------- curl


def curl(*arguments: str) -> str:
    """What curl prints, as text."""
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "60", *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()


def test_curl_streams_what_tritonclient_streams(server: TritonServer) -> None:
    # So many that they do not all come at once, however late curl reads.
    sampling = {"max_tokens": 1000, "temperature": 1.5, "seed": 7, "ignore_eos": True}
    body = json.dumps({"text_input": PROMPT, "stream": True, **sampling})
    events = sse_events(curl(generate_url(server, "llm", stream=True), "-d", body))
    assert "".join(event["text_output"] for event in events) == whole_text(server, sampling)
    assert len(events) > 10


def test_curl_gets_a_whole_text_with_the_prompt_before_it(server: TritonServer) -> None:
    sampling = {"max_tokens": 12, "temperature": 1.5, "seed": 7}
    body = json.dumps({"text_input": PROMPT, **sampling})
    answer = json.loads(curl(generate_url(server, "scheduler"), "-d", body))
    assert answer["text_output"] == PROMPT + whole_text(server, sampling)


# ---------------------------------------------------------------------- stop strings


def across_a_border(tokenizer: Tokenizer, ids: list[int], text: str) -> str | None:
    """A piece of the text that begins in one token and ends in a later one, or None."""
    for num_ids in range(len(ids) // 3, len(ids)):
        before = tokenizer.decode(ids[:num_ids])
        border = len(before)
        is_border = text.startswith(before) and 2 <= border <= len(text) - 2
        if is_border and len(tokenizer.decode(ids[: num_ids + 1])) > border:
            return text[border - 2 : border + 2]
    return None


@pytest.fixture(scope="module")
def stopped_requests(server: TritonServer, tokenizer: Tokenizer) -> list[tuple[Sampling, str]]:
    """Requests with a stop string across a border of their own tokens; and the unstopped text."""
    samplings = [
        {"max_tokens": 60, "temperature": 1.5, "seed": seed, "ignore_eos": True}
        for seed in range(100, 130)
    ]
    streams = at_once([partial(streamed, server, sampling) for sampling in samplings])
    cases = []
    for sampling, stream in zip(samplings, streams, strict=True):
        text = text_of(stream)
        stop = across_a_border(tokenizer, ids_of(stream), text)
        if stop is not None:
            cases.append((sampling | {"stop": stop}, text))
    assert len(cases) >= 20
    return cases


@pytest.mark.parametrize("keeps_stop", [False, True])
@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_a_stop_string_across_token_borders_ends_the_text(
    server: TritonServer,
    stopped_requests: list[tuple[Sampling, str]],
    model: str,
    keeps_stop: bool,
) -> None:
    samplings = [
        sampling | {"include_stop_str_in_output": keeps_stop} for sampling, _ in stopped_requests
    ]
    streams = at_once([partial(streamed, server, sampling, model) for sampling in samplings])
    texts = at_once([partial(whole_text, server, sampling) for sampling in samplings])
    for (sampling, unstopped), stream, text in zip(stopped_requests, streams, texts, strict=True):
        before, stop, _ = unstopped.partition(sampling["stop"])
        assert text_of(stream) == text == (before + stop if keeps_stop else before)
        assert stream[-1].one("finish_reason") == "stop"
        assert [response.one("finish_reason") for response in stream[:-1]] == ["None"] * (
            len(stream) - 1
        )


def test_the_beginning_of_a_stop_string_is_given_out_when_it_does_not_go_on(
    server: TritonServer, stopped_requests: list[tuple[Sampling, str]]
) -> None:
    samplings = [
        sampling | {"stop": [sampling["stop"] + "\N{SNAIL} never", "no such text"]}
        for sampling, _ in stopped_requests
    ]
    streams = at_once([partial(streamed, server, sampling) for sampling in samplings])
    for (_, unstopped), stream in zip(stopped_requests, streams, strict=True):
        assert text_of(stream) == unstopped
        assert stream[-1].one("finish_reason") == "length"


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_a_stream_of_one_token_is_one_response_with_the_final_flag(
    server: TritonServer, model: str
) -> None:
    (response,) = streamed(server, {"max_tokens": 1, "seed": 1, "ignore_eos": True}, model)
    assert response.is_final
    assert len(response.outputs["output_ids"]) == 1


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_text_that_never_becomes_complete_comes_with_the_last_token(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    lead = tokenizer.token_to_id("ð")  # byte 0xF0, the first of four
    sampling = {"max_tokens": 1, "logit_bias": {lead: 100.0}, "temperature": 0}
    (response,) = streamed(server, sampling, model)
    assert (response.text, response.outputs["output_ids"]) == ("\ufffd", [lead])


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_the_last_response_may_have_a_token_without_text(server: TritonServer, model: str) -> None:
    sampling = {"max_tokens": 9, "logit_bias": {0: 100.0}, "temperature": 0}
    (response,) = streamed(server, sampling, model)
    assert (response.text, response.outputs["output_ids"]) == ("", [0])
    assert response.one("finish_reason") == "stop"


def test_a_request_that_does_not_stream_is_one_final_response_of_the_scheduler(
    server: TritonServer,
) -> None:
    sampling = {"max_tokens": 30, "seed": 5, "temperature": 1.5}
    (response,) = stream_grpc(server, request_inputs(PROMPT, sampling))
    assert response.text == PROMPT + whole_text(server, sampling)


# ---------------------------------------------------------------------- many at once


@pytest.fixture
def most_running(server: TritonServer) -> Iterator[Callable[[], float]]:
    """Watches the gauge of running requests; tells the most that it showed."""
    seen = [0.0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.1):
            seen.append(scrape(server)["charonia_requests_running"])

    thread = threading.Thread(target=watch)
    thread.start()
    yield lambda: max(seen)
    is_over.set()
    thread.join()


@long
def test_64_streams_run_at_once_and_each_gets_its_own_text(
    server: TritonServer, most_running: Callable[[], float]
) -> None:
    samplings = [
        {"max_tokens": 500, "temperature": 1.5, "seed": 1000 + index, "ignore_eos": True}
        for index in range(NUM_STREAMS)
    ]
    texts: list[str] = []
    while most_running() < NUM_STREAMS:  # the first may end before the last begins
        streams = [GrpcStream(server, ("scheduler", "llm")[i % 2]) for i in range(NUM_STREAMS)]
        for stream, sampling in zip(streams, samplings, strict=True):
            stream.send(request_inputs(PROMPT, sampling, stream=True, return_token_ids=True))
        answers = [list(stream) for stream in streams]
        for stream, answer in zip(streams, answers, strict=True):
            stream.close()
            check_stream(answer)
        texts = texts or at_once([partial(whole_text, server, sampling) for sampling in samplings])
        assert [text_of(answer) for answer in answers] == texts
    assert len(set(texts)) == NUM_STREAMS


@pytest.mark.parametrize("infer", [infer_grpc, pytest.param(infer_http, marks=long)])
def test_32_unary_requests_run_at_once(
    server: TritonServer, infer: Callable[..., Response]
) -> None:
    samplings = [
        {"max_tokens": 512, "temperature": 1.5, "seed": 2000 + index, "ignore_eos": True}
        for index in range(32)
    ]
    inputs = [request_inputs(PROMPT, sampling) for sampling in samplings]
    before = wait_idle(server)
    answers = at_once([partial(infer, server, one) for one in inputs], num_threads=32)
    after = wait_idle(server)
    streams = at_once([partial(streamed, server, sampling) for sampling in samplings])
    assert [answer.text for answer in answers] == [PROMPT + text_of(s) for s in streams]
    num_tokens, num_steps = (
        after[f"charonia_{name}"] - before[f"charonia_{name}"]
        for name in ("generation_tokens_total", "step_seconds_count")
    )
    # How many more depends on how soon the last client has begun.
    assert num_tokens > num_steps, "they ran one after the other"
