"""The public interface on the real server: every input, output, way to say a thing, exact text."""

import contextlib
import json
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from charonia.launch.server.tritonserver import TritonServer
from charonia.protocol import SamplingParams
from charonia.serving.conventions.interface import FLAGS
from support.e2e import (
    HTTP,
    GrpcStream,
    Response,
    at_once,
    error_of,
    generate,
    generate_stream,
    ids_of,
    infer_grpc,
    infer_http,
    one_response,
    request_inputs,
    stream_grpc,
    text_of,
)

PROMPT = "def größer(queue: list[str]) -> int:"
SAMPLING: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 42, "ignore_eos": True}
ECHO_IN_STREAM = (
    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
)
IN_ENSEMBLE = "in ensemble 'llm', "
TIMING = {
    "queue_seconds",
    "first_token_seconds",
    "total_seconds",
    "cached_tokens",
    "computed_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "preemptions",
    "restarts",
    "prefill_seconds",
    "decode_seconds",
    "engine_seconds",
    "engine_flops",
}
UNARY = [
    pytest.param(infer_grpc, id="generate by gRPC"),
    pytest.param(infer_http, id="generate by HTTP"),
    pytest.param(
        lambda server, inputs: one_response(stream_grpc(server, inputs)), id="scheduler by gRPC"
    ),
    pytest.param(
        lambda server, inputs: one_response(stream_grpc(server, inputs, "llm")), id="llm by gRPC"
    ),
    pytest.param(
        lambda server, inputs: one_response(stream_grpc(server, inputs, "second")),
        id="a second name by gRPC",
    ),
]
Unary = Callable[[TritonServer, dict[str, Any]], Response]


@pytest.fixture(scope="module")
def tokenizer(small_checkpoint: Path) -> Tokenizer:
    """The checkpoint's tokenizer, as the library gives it."""
    return Tokenizer.from_file(str(small_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def text(server: TritonServer) -> str:
    """What `SAMPLING` makes of `PROMPT`."""
    return text_of(stream_grpc(server, request_inputs(PROMPT, SAMPLING, stream=True)))


# ---------------------------------------------------------------------- inputs and outputs


@pytest.mark.parametrize("model", ["scheduler", "llm", "generate", "second"])
def test_a_model_has_the_tensors_of_the_interface(server: TritonServer, model: str) -> None:
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        config = client.get_model_config(model, as_json=True)["config"]
    types = {tensor["name"]: tensor["data_type"] for tensor in config["input"]}
    flags = [*FLAGS, "exclude_input_in_output", "return_cancelled_output", "cancel"]
    expected = dict.fromkeys(flags, "TYPE_BOOL")
    expected |= {"text_input": "TYPE_STRING"}
    expected |= dict.fromkeys(("input_ids", "draft_input_ids", "cancel_samples"), "TYPE_INT32")
    expected |= {"sampling_parameters": "TYPE_STRING"}
    if model != "generate":
        expected["stream"] = "TYPE_BOOL"
    assert expected.items() <= types.items()
    assert set(types) - set(expected) <= {"request_key", "prompt_text", "probe"}
    assert all(tensor["optional"] for tensor in config["input"])
    outputs = {tensor["name"] for tensor in config["output"]}
    assert {"text_output", *FLAGS.values()} <= outputs


@pytest.mark.parametrize("model", ["scheduler", "llm", "generate"])
def test_no_input_has_the_name_of_a_sampling_parameter(server: TritonServer, model: str) -> None:
    with contextlib.closing(grpc.InferenceServerClient(server.grpc_url)) as client:
        config = client.get_model_config(model, as_json=True)["config"]
    inputs = {tensor["name"] for tensor in config["input"]}
    assert not inputs & {*SamplingParams.__struct_fields__, "id", "timeout"}


@pytest.mark.parametrize("model", ["scheduler", "llm", "second"])
def test_a_stream_carries_all_that_was_asked_for(
    server: TritonServer, tokenizer: Tokenizer, text: str, model: str
) -> None:
    inputs = request_inputs(PROMPT, SAMPLING | {"logprobs": 3}, stream=True)
    responses = stream_grpc(server, inputs | dict.fromkeys(FLAGS, True), model)
    assert text_of(responses) == text
    ids = ids_of(responses)
    assert tokenizer.decode(ids) == text
    counts = [response.one("num_output_tokens") for response in responses]
    assert counts == [len(response.outputs["output_ids"]) for response in responses]
    assert sum(counts) == SAMPLING["max_tokens"]
    num_prompt = len(tokenizer.encode(PROMPT).ids)
    assert {response.one("num_input_tokens") for response in responses} == {num_prompt}
    reasons = [response.one("finish_reason") for response in responses]
    assert reasons == ["None"] * (len(responses) - 1) + ["length"]
    total = 0.0
    for response in responses:
        total += check_logprobs(response, tokenizer, num_top=3)
        assert response.one("cumulative_logprob") == pytest.approx(total, rel=1e-5)
    assert ["timing" in response.outputs for response in responses[:-1]] == [False] * (
        len(responses) - 1
    )
    check_timing(responses[-1], num_prompt)


@pytest.mark.parametrize("infer", UNARY)
def test_a_whole_answer_carries_all_that_was_asked_for(
    server: TritonServer, tokenizer: Tokenizer, text: str, infer: Unary
) -> None:
    inputs = request_inputs(PROMPT, SAMPLING | {"logprobs": 2})
    response = infer(server, inputs | dict.fromkeys(FLAGS, True))
    assert response.text == PROMPT + text
    assert tokenizer.decode(response.outputs["output_ids"]) == text
    assert response.one("num_output_tokens") == len(response.outputs["output_ids"]) == 12
    num_prompt = len(tokenizer.encode(PROMPT).ids)
    assert response.one("num_input_tokens") == num_prompt
    assert response.one("finish_reason") == "length"
    total = check_logprobs(response, tokenizer, num_top=2)
    assert response.one("cumulative_logprob") == pytest.approx(total, rel=1e-5)
    check_timing(response, num_prompt)


def check_logprobs(response: Response, tokenizer: Tokenizer, num_top: int) -> float:
    """Assert that logprobs say what they should; returns the sum over the sampled tokens."""
    entries = json.loads(response.one("logprobs"))
    ids = response.outputs["output_ids"]
    total = 0.0
    for token_id, entry in zip(ids, entries, strict=True):
        assert next(iter(entry)) == str(token_id)  # the sampled one first
        assert num_top <= len(entry) <= num_top + 1
        assert all(set(one) == {"logprob", "rank", "decoded_token"} for one in entry.values())
        ranked = sorted(entry.values(), key=lambda one: one["rank"])
        assert [one["rank"] for one in ranked[:num_top]] == list(range(1, num_top + 1))
        assert all(a["logprob"] >= b["logprob"] for a, b in pairwise(ranked))
        assert all(-math.inf < one["logprob"] <= 0 for one in ranked)
        assert entry[str(token_id)]["decoded_token"] == tokenizer.decode([token_id])
        total += entry[str(token_id)]["logprob"]
    return total


def check_timing(response: Response, num_prompt: int) -> None:
    timing = json.loads(response.one("timing"))
    assert set(timing) == TIMING
    assert 0 <= timing["queue_seconds"] <= timing["first_token_seconds"] <= timing["total_seconds"]
    assert timing["cached_tokens"] + timing["computed_tokens"] == num_prompt
    assert timing["restarts"] == 0
    parts = (timing[f"{part}_seconds"] for part in ("queue", "prefill", "decode"))
    assert sum(parts) == pytest.approx(timing["total_seconds"])
    assert timing["engine_seconds"] > 0
    assert timing["engine_flops"] > 0


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 1}, {"logprobs": 0, "prompt_logprobs": 0}])
@pytest.mark.parametrize(
    ("model", "stream"),
    [
        *product(["scheduler", "llm", "second"], [True, False]),
        ("generate", None),
    ],
)
def test_exactly_the_outputs_that_were_asked_for_come(
    server: TritonServer, model: str, stream: bool | None, sampling: dict[str, Any]
) -> None:
    """Every combination of the flags, each given as true or as false, or not at all."""
    sampling = {"max_tokens": 2, "ignore_eos": True, "temperature": 0} | sampling
    inputs = request_inputs([5, 6, 7], sampling)
    combinations = list(product([True, False], repeat=len(FLAGS)))

    def ask(values: tuple[bool, ...]) -> list[Response]:
        given = dict(zip(FLAGS, values, strict=True))
        if sum(values) % 2:
            given = {name: value for name, value in given.items() if value}
        if model == "generate":
            return [infer_grpc(server, inputs | given)]
        return stream_grpc(server, inputs | given | {"stream": stream}, model)

    answers = at_once([partial(ask, values) for values in combinations], num_threads=8)
    for values, responses in zip(combinations, answers, strict=True):
        wanted = {FLAGS[flag] for flag, value in zip(FLAGS, values, strict=True) if value}
        for response in responses:
            expected = {"text_output"} | wanted
            if not response.is_final:
                expected -= {"timing"}
            if response is responses[0] and "prompt_logprobs" in sampling:
                expected |= {"prompt_logprobs"}
            assert set(response.outputs) == expected
            if "logprobs" in wanted:
                is_null = response.one("logprobs") == "null"
                assert is_null == ("logprobs" not in sampling)


@pytest.mark.parametrize("infer", UNARY)
def test_prompt_logprobs_come_with_every_token_of_the_prompt(
    server: TritonServer, tokenizer: Tokenizer, infer: Unary
) -> None:
    sampling = SAMPLING | {"prompt_logprobs": 1}
    response = infer(server, request_inputs(PROMPT, sampling, return_timing=True))
    first, *entries = json.loads(response.one("prompt_logprobs"))
    assert first is None
    ids = tokenizer.encode(PROMPT).ids
    assert [next(iter(entry)) for entry in entries] == [str(token_id) for token_id in ids[1:]]
    assert json.loads(response.one("timing"))["cached_tokens"] == 0


def test_only_the_outputs_that_a_client_names_come(server: TritonServer) -> None:
    outputs = [grpc.InferRequestedOutput(name) for name in ("text_output", "output_ids")]
    inputs = request_inputs(PROMPT, SAMPLING) | dict.fromkeys(FLAGS, True)
    response = infer_grpc(server, inputs, outputs=outputs)
    assert set(response.outputs) == {"text_output", "output_ids"}


@pytest.mark.parametrize("infer", UNARY)
def test_token_ids_are_a_prompt_like_their_text(
    server: TritonServer, tokenizer: Tokenizer, text: str, infer: Unary
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    assert infer(server, request_inputs(ids, SAMPLING)).text == PROMPT + text


# ---------------------------------------------------------------------- the prompt before the text


@pytest.mark.parametrize("infer", UNARY)
@pytest.mark.parametrize(("excludes", "has_prompt"), [(None, True), (False, True), (True, False)])
def test_a_whole_answer_begins_with_the_prompt_unless_excluded(
    server: TritonServer, text: str, infer: Unary, excludes: bool | None, has_prompt: bool
) -> None:
    inputs = request_inputs(PROMPT, SAMPLING)
    if excludes is not None:
        inputs["exclude_input_in_output"] = excludes
    assert infer(server, inputs).text == (PROMPT + text if has_prompt else text)


@pytest.mark.parametrize("model", ["scheduler", "llm"])
def test_a_stream_never_has_the_prompt(server: TritonServer, text: str, model: str) -> None:
    inputs = request_inputs(PROMPT, SAMPLING, stream=True, exclude_input_in_output=True)
    assert text_of(stream_grpc(server, inputs, model)) == text


def test_a_stream_that_asks_for_the_prompt_gets_the_exact_error(server: TritonServer) -> None:
    inputs = request_inputs(PROMPT, SAMPLING, stream=True, exclude_input_in_output=False)
    assert error_of(lambda: stream_grpc(server, inputs)).message() == ECHO_IN_STREAM
    error = error_of(lambda: stream_grpc(server, inputs, "llm"))
    assert error.message() == IN_ENSEMBLE + ECHO_IN_STREAM
    body = {"text_input": PROMPT, "stream": True, "exclude_input_in_output": False}
    assert generate_stream(server, body) == [{"error": ECHO_IN_STREAM}]
    assert generate_stream(server, body, "second") == [{"error": ECHO_IN_STREAM}]
    assert generate_stream(server, body, "llm") == [{"error": IN_ENSEMBLE + ECHO_IN_STREAM}]


# ---------------------------------------------------------------------- ways to say it

AS_STRINGS = {"max_tokens": "12", "temperature": "1.5", "seed": "42", "ignore_eos": "true"}


@pytest.mark.parametrize("infer", UNARY)
@pytest.mark.parametrize("sampling", [SAMPLING, AS_STRINGS], ids=["typed", "as strings"])
def test_sampling_comes_by_the_tensor(
    server: TritonServer, text: str, infer: Unary, sampling: dict[str, Any]
) -> None:
    assert infer(server, request_inputs(PROMPT, sampling)).text == PROMPT + text


@pytest.mark.parametrize("model", ["scheduler", "llm", "generate"])
@pytest.mark.parametrize("sampling", [SAMPLING, AS_STRINGS], ids=["typed", "as strings"])
def test_sampling_comes_by_grpc_parameters(
    server: TritonServer, text: str, model: str, sampling: dict[str, Any]
) -> None:
    inputs = request_inputs(PROMPT)
    if model == "generate":
        assert infer_grpc(server, inputs, parameters=sampling).text == PROMPT + text
        return
    responses = stream_grpc(server, inputs | {"stream": True}, model, parameters=sampling)
    assert text_of(responses) == text


@pytest.mark.parametrize("sampling", [SAMPLING, AS_STRINGS], ids=["typed", "as strings"])
def test_sampling_comes_by_http_infer_parameters(
    server: TritonServer, text: str, sampling: dict[str, Any]
) -> None:
    response = infer_http(server, request_inputs(PROMPT), parameters=sampling)
    assert response.text == PROMPT + text


@pytest.mark.parametrize("model", ["scheduler", "llm", "generate"])
@pytest.mark.parametrize("sampling", [SAMPLING, AS_STRINGS], ids=["typed", "as strings"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "in parameters"])
def test_sampling_comes_by_http_generate_parameters(
    server: TritonServer, text: str, model: str, sampling: dict[str, Any], is_nested: bool
) -> None:
    body = {"parameters": sampling} if is_nested else sampling
    reply = generate(server, {"text_input": PROMPT, **body}, model)
    assert reply.json()["text_output"] == PROMPT + text


def test_inputs_come_inside_parameters_of_http_generate_too(
    server: TritonServer, text: str
) -> None:
    parameters = SAMPLING | {"stream": True, "return_finish_reason": True}
    events = generate_stream(server, {"text_input": PROMPT, "parameters": parameters})
    assert "".join(event["text_output"] for event in events) == text
    assert events[-1]["finish_reason"] == "length"


def test_the_tensor_is_taken_before_parameters(server: TritonServer, text: str) -> None:
    inputs = request_inputs(PROMPT, SAMPLING)
    assert infer_grpc(server, inputs, parameters={"max_tokens": 1}).text == PROMPT + text


def test_what_triton_puts_among_the_parameters_is_no_error(server: TritonServer, text: str) -> None:
    body = {"id": "7", "priority": 0, "timeout": 30_000_000, "sequence_id": 1}
    body |= {"sequence_start": True, "sequence_end": True}
    reply = generate(server, {"text_input": PROMPT, **SAMPLING, **body})
    assert reply.json()["text_output"] == PROMPT + text
    inputs = request_inputs(PROMPT, SAMPLING)
    options = {"request_id": "7", "priority": 3, "timeout": 30_000_000}
    assert infer_grpc(server, inputs, **options).text == PROMPT + text
    responses = stream_grpc(server, inputs, sequence_id=1, sequence_start=True, **options)
    assert one_response(responses).text == PROMPT + text


@pytest.mark.parametrize("model", ["scheduler", "llm", "generate"])
def test_headers_that_triton_forwards_are_no_parameters(
    server: TritonServer, text: str, model: str
) -> None:
    body = {"text_input": PROMPT, **SAMPLING}
    url = f"http://{server.http_url}/v2/models/{model}/generate"
    reply = HTTP.post(url, json=body, headers={"X-Request-Id": "7", "X-Trace": "a"})
    assert reply.json()["text_output"] == PROMPT + text
    inputs = request_inputs(PROMPT)
    headers = {"x-request-id": "7"}
    if model == "generate":
        answer = infer_grpc(server, inputs, headers=headers, parameters=SAMPLING).text
    else:
        with GrpcStream(server, model, headers) as stream:
            answer = one_response(list(stream.send(inputs, parameters=SAMPLING))).text
    assert answer == PROMPT + text
    refused = HTTP.post(url, json=body | {"Y-Request-Id": "7"})
    assert "unknown sampling parameter 'Y-Request-Id'" in refused.json()["error"]


def test_an_empty_sampling_tensor_means_the_defaults(server: TritonServer) -> None:
    inputs = request_inputs(PROMPT, return_num_output_tokens=True)
    for sampling in ("", "{}"):
        response = infer_grpc(server, inputs | {"sampling_parameters": sampling})
        assert 1 <= response.one("num_output_tokens") <= 16


def test_request_ids_need_not_be_unique(server: TritonServer, text: str) -> None:
    call = partial(infer_grpc, server, request_inputs(PROMPT, SAMPLING), request_id="0")
    assert {answer.text for answer in at_once([call] * 8)} == {PROMPT + text}


def test_every_accepted_parameter_is_accepted(server: TritonServer) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": 6,
        "min_tokens": 2,
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "seed": -3,
        "n": 1,
        "best_of": 1,
        "stop": ["zz", "yy"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "bad_words": ["queue"],
        "allowed_token_ids": [5, 7, 88, 97, 110],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -5},
        "logprobs": 1,
        "prompt_logprobs": 0,
        "priority": 0,
        "deadline_ms": 60_000,
        "tenant": "a",
        "cache_salt": "b",
        "speculation": False,
        "cache_priority": [
            {"start": 0, "end": 16, "priority": 90, "ttl_s": 5},
            {"start": 16, "priority": 0},
        ],
        "cache_ttl_s": 60,
        "use_answer_cache": "false",
    }
    assert set(sampling) == set(SamplingParams.__struct_fields__)
    assert infer_grpc(server, request_inputs(PROMPT, sampling)).text.startswith(PROMPT)
    nothing = dict.fromkeys(sampling)  # null is the default
    assert infer_grpc(server, request_inputs(PROMPT, nothing)).text.startswith(PROMPT)


# ---------------------------------------------------------------------- what sampling does


def test_stop_tokens_minimum_and_bias_act(server: TritonServer) -> None:
    def answer(**sampling: Any) -> Response:
        values = {"temperature": 0, "max_tokens": 10} | sampling
        inputs = request_inputs(PROMPT, values, return_finish_reason=True, return_token_ids=True)
        return infer_grpc(server, inputs)

    seven = answer(logit_bias={7: 100})
    assert seven.outputs["output_ids"] == [7] * 10
    stopped = answer(logit_bias={7: 100}, stop_token_ids=[7])
    assert (stopped.outputs["output_ids"], stopped.one("finish_reason")) == ([7], "stop")
    assert stopped.text == PROMPT
    late = answer(logit_bias={7: 100}, stop_token_ids=[7], min_tokens=4)
    assert len(late.outputs["output_ids"]) == 5
    assert 7 not in late.outputs["output_ids"][:4]
    assert late.outputs["output_ids"][4] == 7
    assert answer(logit_bias={0: 100}).outputs["output_ids"] == [0]
    assert answer(logit_bias={0: 100}, ignore_eos=True).outputs["output_ids"] == [0] * 10
    allowed = answer(allowed_token_ids=[88, 7], logit_bias={9: 100, 7: 50}, temperature=1, seed=1)
    assert allowed.outputs["output_ids"] == [7] * 10
    mixed = answer(allowed_token_ids=[88, 7, 90], temperature=9, seed=1, max_tokens=40)
    assert {*mixed.outputs["output_ids"]} == {88, 7, 90}
    special = answer(logit_bias={0: 100}, ignore_eos=True, skip_special_tokens=False)
    assert special.text == PROMPT + "<|endoftext|>" * 10


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"num_beams": 2}, "num_beams = 2 is for beam search"),
        ({"priority": 3}, "priority = 3 has no effect with scheduling_policy 'fcfs'"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    server: TritonServer, sampling: dict[str, Any], text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        infer_grpc(server, request_inputs(PROMPT, sampling))
