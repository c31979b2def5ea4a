"""TensorRT-LLM's models on the real server, asked as its clients do: the scheduler's own tokens."""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http
from httpx_sse import EventSource

from charonia.launch.server.tritonserver import TritonServer
from charonia.serving.conventions.interface import Tensor
from charonia.serving.conventions.trtllm.facade import (
    BATCH_NEEDS_DECOUPLED,
    STOP_NEEDS_ID,
    STREAM_NEEDS_DECOUPLED,
)
from charonia.serving.conventions.trtllm.rows import pack_words
from charonia.serving.conventions.trtllm.tables import MAX_BATCH_SIZE, MODELS
from charonia.serving.requests.raw_request import NUMPY_TYPES
from charonia.text.tokenizer import Tokenizer
from support.e2e import (
    ANSWER_TIMEOUT_S,
    ENDLESS,
    HTTP,
    endless_request,
    error_of,
    generate_url,
    ids_of,
    infer_grpc,
    request_inputs,
    scrape,
    stream_grpc,
    tensors,
    text_of,
    wait_for,
    wait_idle,
)

PROMPT = "def größer(queue: list[str]) -> int:"
TYPES: dict[str, dict[str, Tensor]] = {
    model: {one.name: one for one in table.inputs} for model, table in MODELS.items()
}
Answer = dict[str, Any]


def batch(model: str, *rows: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a batch: of each input its rows' values, of equal shape."""
    made = {}
    for name in rows[0]:
        one = TYPES[model][name]
        values = [np.array(row[name]) for row in rows]
        if one.datatype == "STRING":
            values = [np.char.encode(value, "utf-8").astype(object) for value in values]
        shape = [1] * len(one.dims)
        made[name] = np.array(
            [value.reshape(value.shape or shape) for value in values],
            dtype=NUMPY_TYPES[one.datatype],
        )
    return made


class Stream:
    """One gRPC stream as NVIDIA's clients have it: empty last responses are not asked for."""

    def __init__(self, server: TritonServer) -> None:
        self.results: SimpleQueue[Any] = SimpleQueue()
        self.client = grpc.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self.results.put(error or result))

    def send(self, model: str, inputs: dict[str, Any], **options: Any) -> None:
        self.client.async_stream_infer(model, tensors(inputs), **options)

    def next(self) -> Answer:
        return arrays(self.results.get(timeout=ANSWER_TIMEOUT_S))

    def rest(self) -> list[Answer]:
        """All further answers, once all requests are answered to their ends."""
        self.client.stop_stream()
        return [arrays(self.results.get()) for _ in range(self.results.qsize())]


@contextlib.contextmanager
def open_stream(server: TritonServer) -> Iterator[Stream]:
    stream = Stream(server)
    with contextlib.closing(stream.client):
        yield stream


def arrays(result: Any) -> Answer:
    if isinstance(result, Exception):
        raise result
    names = [output.name for output in result.get_response().outputs]
    return {name: result.as_numpy(name) for name in names}


def ask(server: TritonServer, model: str, *rows: dict[str, Any], **options: Any) -> list[Answer]:
    """All answers to one request, which may be several."""
    with open_stream(server) as stream:
        stream.send(model, batch(model, *rows), **options)
        return stream.rest()


def text(answers: list[Answer]) -> str:
    parts = [answer["text_output"] for answer in answers]
    assert {part.shape for part in parts} == {(1,)}
    return b"".join(part.item() for part in parts).decode()


def token_ids(answers: list[Answer]) -> list[int]:
    for answer in answers:
        ids = answer["output_ids"]
        assert ids.shape == (1, 1, answer["sequence_length"].item())
    return [id_ for answer in answers for id_ in answer["output_ids"].ravel().tolist()]


@pytest.fixture(scope="module")
def tokenizer(small_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_dir(small_checkpoint)


def scheduler_ids(server: TritonServer, prompt: Any, **sampling: Any) -> list[int]:
    sampling = {"max_tokens": 12, "ignore_eos": True} | sampling
    inputs = request_inputs(prompt, sampling, stream=True, return_token_ids=True)
    return ids_of(stream_grpc(server, inputs))


def tokens_request(ids: list[int], num: int = 12, **inputs: Any) -> dict[str, Any]:
    return {"input_ids": ids, "input_lengths": len(ids), "request_output_len": num, **inputs}


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_tensors_of_its_table_and_a_batch(server: TritonServer, model: str) -> None:
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        config = client.get_model_config(model, as_json=True)["config"]
    assert config["max_batch_size"] == MAX_BATCH_SIZE
    for kind, table in (("input", MODELS[model].inputs), ("output", MODELS[model].outputs)):
        found = {
            one["name"]: (one["data_type"].removeprefix("TYPE_"), [int(n) for n in one["dims"]])
            for one in config[kind]
        }
        assert found == {one.name: (one.datatype, list(one.dims)) for one in table}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize(
    ("inputs", "sampling"),
    [
        ({}, {"temperature": 0.0}),
        (
            {"top_k": 20, "temperature": 1.5, "random_seed": 7, "repetition_penalty": 1.25},
            {"top_k": 20, "temperature": 1.5, "seed": 7, "repetition_penalty": 1.25},
        ),
        (
            {"top_p": 0.75, "presence_penalty": 0.5, "frequency_penalty": -0.5},
            {"top_p": 0.75, "seed": 0, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        ),
    ],
)
def test_text_is_the_schedulers_whole_and_in_a_stream(
    server: TritonServer, model: str, inputs: dict[str, Any], sampling: dict[str, Any]
) -> None:
    request = {"text_input": PROMPT, "max_tokens": 24, "end_id": -1, **inputs}
    parameters = {"max_tokens": 24, "ignore_eos": True} | sampling
    expected = text_of(stream_grpc(server, request_inputs(PROMPT, parameters, stream=True)))
    streamed = ask(server, model, request | {"stream": True})
    assert text(streamed) == expected
    (whole,) = ask(server, model, request | {"exclude_input_in_output": True})
    assert text([whole]) == expected
    (with_prompt,) = ask(server, model, request)
    assert text([with_prompt]) == PROMPT + expected
    assert set(whole) == {"text_output"}


def test_a_batch_of_sequences_is_answered_each_for_itself(server: TritonServer) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12]]
    rows = [
        tokens_request(
            [*prompt, *[0] * (4 - len(prompt))],
            runtime_top_k=50,
            random_seed=40,
            num_return_sequences=2,
            streaming=True,
        )
        | {"input_lengths": len(prompt)}
        for prompt in prompts
    ]
    answers = ask(server, "tensorrt_llm", *rows)
    for index, prompt in enumerate(prompts):
        for sequence in range(2):
            own = [
                answer
                for answer in answers
                if (answer["batch_index"].item(), answer["sequence_index"].item())
                == (index, sequence)
            ]
            expected = scheduler_ids(server, prompt, top_k=50, seed=40 + sequence)
            assert token_ids(own) == expected
    assert wait_idle(server)["charonia_requests_running"] == 0


def test_log_probabilities_are_those_of_the_scheduler(server: TritonServer) -> None:
    prompt = [5, 6, 7]
    request = tokens_request(prompt, streaming=True, return_log_probs=True)
    answers = ask(server, "tensorrt_llm", request)
    sampling = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0, "logprobs": 0}
    inputs = request_inputs(prompt, sampling, return_logprobs=True)
    (expected,) = stream_grpc(server, inputs | {"exclude_input_in_output": True})
    logprobs = [next(iter(one.values()))["logprob"] for one in json.loads(expected.one("logprobs"))]
    found = np.concatenate([answer["output_log_probs"] for answer in answers], axis=2)
    assert found.shape == (1, 1, 12)
    assert found.ravel().tolist() == pytest.approx(logprobs)
    assert answers[-1]["cum_log_probs"].shape == (1, 1)
    assert answers[-1]["cum_log_probs"].item() == pytest.approx(sum(logprobs), rel=1e-5)


def test_words_end_an_answer_or_do_not_come(server: TritonServer, tokenizer: Tokenizer) -> None:
    prompt = [5, 6, 7]
    plain = scheduler_ids(server, prompt, temperature=0.0)
    token = plain[4]
    assert token not in plain[:4]
    words = pack_words([[token]])
    (answer,) = ask(
        server,
        "tensorrt_llm",
        tokens_request(prompt, end_id=token, exclude_input_in_output=True),
    )
    assert token_ids([answer]) == plain[:4]  # the token that ends it is no part of it
    (answer,) = ask(
        server,
        "tensorrt_llm",
        tokens_request(prompt, bad_words_list=words.tolist(), exclude_input_in_output=True),
    )
    found = token_ids([answer])
    assert found[:4] == plain[:4]
    assert token not in found
    whole = tokenizer.decode(plain)
    word = whole[2:4]
    request = {"text_input": tokenizer.decode(prompt), "max_tokens": 12, "end_id": -1}
    assert tokenizer.encode(request["text_input"]) == prompt
    (answer,) = ask(
        server,
        "ensemble",
        request | {"stop_words": ["", word], "exclude_input_in_output": True},
    )
    assert text([answer]) == whole[: whole.index(word) + len(word)]


def test_the_three_models_in_a_row_give_what_the_ensemble_gives(server: TritonServer) -> None:
    rows = [
        {"QUERY": prompt, "REQUEST_OUTPUT_LEN": 16, "STOP_WORDS_DICT": ["no such word"]}
        for prompt in (PROMPT, "import", "a b c")
    ]
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        result = client.infer("preprocessing", tensors(batch("preprocessing", *rows)))
        made = arrays(result)
        request = {
            "input_ids": made["INPUT_ID"],
            "input_lengths": made["REQUEST_INPUT_LEN"],
            "request_output_len": made["REQUEST_OUTPUT_LEN"],
            "stop_words_list": made["STOP_WORDS_IDS"],
            "bad_words_list": made["BAD_WORDS_IDS"],
            "embedding_bias": made["EMBEDDING_BIAS"],
            "end_id": made["OUT_END_ID"],
            "pad_id": made["OUT_PAD_ID"],
            "decoder_input_ids": made["DECODER_INPUT_ID"],
            "decoder_input_lengths": made["REQUEST_DECODER_INPUT_LEN"],
        }
        with open_stream(server) as stream:
            stream.send("tensorrt_llm", request)
            answers = {answer["batch_index"].item(): answer for answer in stream.rest()}
        for index, row in enumerate(rows):
            answer = answers[index]
            inputs = {
                "TOKENS_BATCH": answer["output_ids"],
                "SEQUENCE_LENGTH": answer["sequence_length"],
            }
            found = arrays(client.infer("postprocessing", tensors(inputs)))["OUTPUT"]
            (expected,) = ask(server, "ensemble", {"text_input": row["QUERY"], "max_tokens": 16})
            assert found.shape == (1,)
            assert found.item().decode() == text([expected])


# ---------------------------------------------------------------------- ends and errors


def test_a_stop_ends_all_requests_of_its_id_without_an_error(server: TritonServer) -> None:
    before = wait_idle(server)["charonia_cancellations_total"]
    row = tokens_request([5, 6, 7], num=ENDLESS, num_return_sequences=2, streaming=True)
    with open_stream(server) as stream, open_stream(server) as other:
        stream.send("tensorrt_llm", batch("tensorrt_llm", row, row), request_id="77")
        other.send("tensorrt_llm", batch("tensorrt_llm", tokens_request([1, 2])), request_id="78")
        answers = [stream.next()]
        stop = tokens_request([0], num=1, stop=True)
        stream.send("tensorrt_llm", batch("tensorrt_llm", stop), request_id="77")
        answers += stream.rest()
        (untouched,) = other.rest()
    assert token_ids([untouched])[2:] == scheduler_ids(server, [1, 2], temperature=0.0)
    assert 0 < len(token_ids(answers)) < 4 * ENDLESS
    assert wait_idle(server)["charonia_cancellations_total"] == before + 4


def test_a_client_that_goes_away_ends_all_its_requests(server: TritonServer) -> None:
    before = wait_idle(server)["charonia_cancellations_total"]
    row = {"text_input": "a", "max_tokens": ENDLESS, "end_id": -1, "num_return_sequences": 3}
    with open_stream(server) as stream:
        stream.send("ensemble", batch("ensemble", row | {"stream": True}))
        stream.next()
        stream.client.stop_stream(cancel_requests=True)
    assert wait_idle(server)["charonia_cancellations_total"] == before + 3


def test_a_part_that_is_refused_leaves_the_others(server: TritonServer) -> None:
    rows = [tokens_request([5, 6, 7]), tokens_request([5, 6, 10**6])]
    with open_stream(server) as stream:
        stream.send("tensorrt_llm", batch("tensorrt_llm", *rows))
        stream.client.stop_stream()
        found = [stream.results.get() for _ in range(2)]
    assert stream.results.empty()
    (error,) = [one for one in found if isinstance(one, Exception)]
    assert "request 1 of the batch: input_ids has token id 1000000 at place 2" in str(error)
    (answer,) = [arrays(one) for one in found if not isinstance(one, Exception)]
    expected = scheduler_ids(server, [5, 6, 7], temperature=0.0)
    assert token_ids([answer]) == [5, 6, 7, *expected]


def test_errors_name_the_tensors_of_the_model_that_was_asked(server: TritonServer) -> None:
    for model, inputs, expected in (
        ("tensorrt_llm", tokens_request([1], num=0), "request_output_len must be at least 1"),
        ("tensorrt_llm", tokens_request([1], runtime_top_p=2.0), "runtime_top_p must be above 0"),
        ("tensorrt_llm", tokens_request([1], beam_width=4), "beam_width = 4 is not supported"),
        ("tensorrt_llm", tokens_request([1], stop=True), STOP_NEEDS_ID),
        ("ensemble", {"text_input": "a"}, "max_tokens is not present in the request"),
        ("ensemble", {"text_input": "a", "max_tokens": 1, "temperature": -1.0}, "temperature must"),
        ("preprocessing", {"QUERY": ""}, "QUERY must not be empty"),
    ):
        error = error_of(lambda m=model, i=inputs: ask(server, m, i))
        assert expected in str(error)
    drafts = tokens_request([1], draft_input_ids=[4, 5])
    error = error_of(lambda: ask(server, "tensorrt_llm", drafts))
    assert "draft_input_ids is verified by speculative decoding, which this engine does" in str(
        error
    )


def test_curl_as_in_nvidias_readme(server: TritonServer) -> None:
    body = {"text_input": "a", "max_tokens": 5, "bad_words": "", "stop_words": ""}
    answer = HTTP.post(generate_url(server, "ensemble"), json=body).json()
    assert answer["text_output"].startswith("a")
    body = {"text_input": "a", "max_tokens": 5, "stream": True}
    answer = HTTP.post(generate_url(server, "ensemble", stream=True), json=body)
    assert "".join(event.json()["text_output"] for event in EventSource(answer).iter_sse())


# ---------------------------------------------------------------------- without streams


def test_a_model_that_is_not_decoupled_answers_plain_calls(narrow_server: TritonServer) -> None:
    server = narrow_server
    request = {"text_input": PROMPT, "max_tokens": 8, "end_id": -1}
    inputs = batch("ensemble", request)
    expected = infer_grpc(
        server,
        request_inputs(PROMPT, {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}),
    ).text
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        assert text([arrays(client.infer("ensemble", tensors(inputs)))]) == expected
    client = tritonclient.http.InferenceServerClient(server.http_url)
    with contextlib.closing(client):
        result = client.infer("ensemble", tensors(inputs, tritonclient.http))
        assert result.as_numpy("text_output").item().decode() == expected
    for inputs, message in (
        (batch("ensemble", request, request), BATCH_NEEDS_DECOUPLED),
        (batch("ensemble", request | {"stream": True}), STREAM_NEEDS_DECOUPLED),
    ):
        error = error_of(lambda inputs=inputs: infer_grpc(server, inputs, "ensemble"))
        assert str(error.message()) == message


def wait_tokens(server: TritonServer, num_before: float) -> None:
    """Wait until a request that was sent has some tokens."""
    name = "charonia_generation_tokens_total"
    assert wait_for(lambda: scrape(server)[name], lambda num: num > num_before + 8) > num_before + 8


def test_a_stop_of_a_plain_call_answers_it_with_what_there_is(narrow_server: TritonServer) -> None:
    before = wait_idle(narrow_server)["charonia_generation_tokens_total"]
    request = batch("tensorrt_llm", tokens_request([5, 6, 7], num=ENDLESS))
    stop = batch("tensorrt_llm", tokens_request([0], num=1, stop=True))
    with contextlib.closing(grpc.InferenceServerClient(narrow_server.grpc_url)) as client:
        answers: SimpleQueue[Any] = SimpleQueue()
        client.async_infer(
            "tensorrt_llm",
            tensors(request),
            lambda result, error: answers.put(error or result),
            request_id="9",
        )
        wait_tokens(narrow_server, before)
        stopped = client.infer("tensorrt_llm", tensors(stop), request_id="9")
        assert arrays(stopped) == {}
        ids = token_ids([arrays(answers.get(timeout=ANSWER_TIMEOUT_S))])
    assert ids[:3] == [5, 6, 7]
    assert 8 <= len(ids[3:]) < ENDLESS
    expected = scheduler_ids(narrow_server, [5, 6, 7], max_tokens=len(ids[3:]), temperature=0.0)
    assert ids[3:] == expected
    wait_idle(narrow_server)


def test_a_whole_answer_that_is_stopped_has_what_there_is_of_it(server: TritonServer) -> None:
    row = tokens_request([5, 6, 7], num=ENDLESS, exclude_input_in_output=True)
    before = wait_idle(server)["charonia_generation_tokens_total"]
    with open_stream(server) as stream:
        stream.send("tensorrt_llm", batch("tensorrt_llm", row), request_id="79")
        wait_tokens(server, before)
        stop = tokens_request([0], num=1, stop=True)
        stream.send("tensorrt_llm", batch("tensorrt_llm", stop), request_id="79")
        (answer,) = stream.rest()
    ids = token_ids([answer])
    assert 8 <= len(ids) < ENDLESS
    expected = scheduler_ids(server, [5, 6, 7], max_tokens=len(ids), temperature=0.0)
    assert ids == expected


def test_more_than_the_queue_holds_is_refused_in_tritons_words(
    narrow_server: TritonServer,
) -> None:
    wait_idle(narrow_server)
    request = batch("tensorrt_llm", tokens_request([5, 6, 7]))

    def call() -> str:
        try:
            infer_grpc(narrow_server, request, "tensorrt_llm")
        except Exception as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(12) as pool:
        with endless_request(narrow_server):
            calls = [pool.submit(call) for _ in range(12)]
            wait_for(lambda: sum(one.done() for one in calls), lambda num_done: num_done == 10)
            refused = [one.result() for one in calls if one.done()]
        assert [one.result() for one in calls].count("") == 2, "who waited is served"
    assert len(refused) == 10
    assert all("Maximum queue size of 2" in one for one in refused)
    wait_idle(narrow_server)
