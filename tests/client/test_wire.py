"""Requests as both protocols want them, and responses as chunks."""

import dataclasses
import json
import subprocess
import sys
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from charonia.protocol import SamplingParams
from charonia.serving.conventions.interface import FLAGS, OUTPUTS, Output
from charonia_client import (
    Chunk,
    InvalidRequest,
    Load,
    Sampling,
    ServerError,
    Timeouts,
    TokenLogprob,
    wire,
)
from charonia_client.values import Include, join


def request(prompt: Any = "hi", **options: Any) -> wire.Request:
    values = {"request_id": "r", "include": (), "is_streaming": True, "sampling": {}} | options
    return wire.generation_request("m", prompt, values.pop("sampling"), **values)


def chunk_of(outputs: wire.Outputs) -> Chunk:
    """The chunk of the first response of a request with one sample."""
    (chunk,) = wire.ResponseReader().read(outputs)
    return chunk


def test_the_sampling_parameters_are_those_of_the_server() -> None:
    server = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert set(Sampling.__annotations__) == server


def test_the_client_can_ask_for_every_output_of_the_server() -> None:
    include = get_args(Include)
    asked = {name for name, value in request(include=include).inputs.items() if value is True}
    assert asked == {*FLAGS, "stream", "exclude_input_in_output"}


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda one: one.name)
def test_a_chunk_has_every_output_of_the_server(output: Output) -> None:
    values = {"finish_reason": ["stop"], "logprobs": ["[{}]"], "prompt_logprobs": ["[null]"]}
    values |= {"timing": ['{"queue_seconds": 1}'], "text_output": ["b"]}
    given = values.get(output.name, [7])
    without = chunk_of({"text_output": ["a"]})
    assert chunk_of({"text_output": ["a"], output.name: given}) != without


def test_the_client_needs_neither_the_servers_package_nor_torch() -> None:
    code = "import charonia_client, sys; print({'charonia', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()"


def test_the_finish_reason_is_always_asked_for_and_the_prompt_never() -> None:
    inputs = request().inputs
    assert inputs["return_finish_reason"] is True
    assert inputs["exclude_input_in_output"] is True


def test_asking_for_logprobs_in_the_sampling_includes_them() -> None:
    assert "return_logprobs" not in request().inputs
    assert request(sampling={"logprobs": 0}).inputs["return_logprobs"] is True


def test_a_sampling_parameter_of_none_is_left_to_the_server() -> None:
    inputs = request(sampling={"seed": None, "top_k": np.int64(3)}).inputs
    assert json.loads(str(inputs["sampling_parameters"])) == {"top_k": 3}


def test_a_request_has_the_same_tensors_in_both_protocols() -> None:
    asked = request([1, 2, 3], include=("token_ids",))
    message = wire.to_grpc(asked)
    pairs = zip(message.inputs, message.raw_input_contents, strict=True)
    tensors = {tensor.name: (tensor, raw) for tensor, raw in pairs}
    assert message.model_name == "m"
    assert message.id == "r"
    body = wire.to_http(asked, None)
    assert set(tensors) | {"id"} == set(body)
    ids, raw = tensors["input_ids"]
    assert (ids.datatype, list(ids.shape)) == ("INT32", [3])
    assert np.frombuffer(raw, np.int32).tolist() == body["input_ids"] == [1, 2, 3]
    sampling, raw = tensors["sampling_parameters"]
    assert sampling.datatype == "BYTES"
    assert deserialize_bytes_tensor(raw)[0].decode() == body["sampling_parameters"] == "{}"
    assert tensors["stream"][1] == b"\x01"


def test_over_http_the_total_timeout_is_told_in_microseconds() -> None:
    assert wire.to_http(request(), 1.5)["timeout"] == 1_500_000


@pytest.mark.parametrize(
    "prompt", [b"bytes", [1.5], ["a"], [[1], [2, 3]], [[1]], [2**31], 5, None, "\ud800"]
)
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt|token ids"):
        request(prompt)


def test_a_request_id_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="request_id is no Unicode text"):
        request(request_id="\ud800")
    with pytest.raises(InvalidRequest, match="request_id is no Unicode text"):
        wire.cancel_request("m", "\ud800", "", None)


@pytest.mark.parametrize("value", ["é", "a\r\nb: c", "\ud800"])
def test_a_header_that_cannot_be_sent_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="header x-one must have printable ASCII"):
        request(headers={"x-one": value})
    with pytest.raises(InvalidRequest, match="header's name"):
        request(headers={value: "1"})


def test_an_unknown_name_to_include_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(InvalidRequest, match=r"token_ids.*'tokens'"):
        request(include=("tokens",))


def test_sampling_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="set is neither"):
        request(sampling={"stop": {"a"}})


def test_empty_and_absent_outputs_mean_the_same() -> None:
    names = ("finish_reason", "logprobs", "cumulative_logprob", "num_input_tokens", "timing")
    empty: dict[str, list[Any]] = {name: [] for name in (*names, "output_ids")}
    assert chunk_of({"text_output": ["a"]} | empty) == Chunk(text="a")
    assert chunk_of({"text_output": ["a"]}) == Chunk(text="a")


def test_an_sse_event_gives_the_same_chunk_whether_lists_of_one_are_scalars_or_not() -> None:
    event = {"text_output": "a", "output_ids": 7, "finish_reason": "None", "model_name": "m"}
    lists = {"text_output": ["a"], "output_ids": [7], "finish_reason": ["None"]}
    chunk = Chunk(text="a", token_ids=(7,))
    assert chunk_of(wire.from_http(event)) == chunk_of(wire.from_http(lists)) == chunk


def test_logprobs_are_read_with_the_taken_token_first() -> None:
    taken = {"logprob": -2.0, "rank": 2, "decoded_token": "b"}
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    chunk = chunk_of(
        {
            "text_output": ["b"],
            "logprobs": [json.dumps([{"9": taken, "4": best}])],
            "prompt_logprobs": [json.dumps([None, {"4": best}])],
        }
    )
    position = (TokenLogprob(9, -2.0, 2, "b"), TokenLogprob(4, -0.5, 1, "a"))
    assert chunk.logprobs == (position,)
    assert chunk.prompt_logprobs == (None, position[1:])


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"text_output": ["a", "b"], "finish_reason": ["stop"]},
        {"text_output": ["a", "b"], "output_ids": [1, 2]},
        {"text_output": ["a", "b"], "output_ids": [1, 2], "num_output_tokens": [2]},
        {"text_output": ["a"], "finish_reason": ["bored"]},
        {"text_output": ["a"], "logprobs": ["nope"]},
        {"text_output": ["a"], "logprobs": ['[{"x": {}}]']},
        {"text_output": ["a"], "logprobs": ["[4]"]},
        {"text_output": ["a"], "timing": ["{"]},
    ],
)
def test_a_response_that_cannot_be_understood_is_the_servers_fault(
    outputs: dict[str, list[str]],
) -> None:
    with pytest.raises(ServerError):
        chunk_of(outputs)


@pytest.mark.parametrize(
    ("datatype", "raw"),
    [("BYTES", b"\5\0\0\0a"), ("BYTES", b"a"), ("INT32", b"\0\0\0"), ("INT32", b"\0" * 8)],
)
def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_the_servers_fault(
    datatype: str, raw: bytes
) -> None:
    response = service_pb2.ModelInferResponse(raw_output_contents=[raw])
    response.outputs.add(name="text_output", datatype=datatype, shape=[1])
    with pytest.raises(ServerError, match="cannot be understood"):
        wire.from_grpc(response)


def test_joining_adds_up_what_is_per_chunk_and_takes_the_rest_from_the_last() -> None:
    one = (TokenLogprob(1, -1.0, 1, "a"),)
    completion = join(
        "r",
        [
            Chunk(text="a", token_ids=(1,), logprobs=(one,), num_output_tokens=1),
            Chunk(
                is_final=True,
                text="bc",
                token_ids=(2, 3),
                logprobs=(one, one),
                num_output_tokens=2,
                cumulative_logprob=-3.0,
                finish_reason="length",
                num_input_tokens=5,
                timing={"total_seconds": 0.5},
            ),
        ],
    )
    assert (completion.text, completion.token_ids) == ("abc", (1, 2, 3))
    assert completion.logprobs == (one, one, one)
    assert (completion.num_input_tokens, completion.num_output_tokens) == (5, 3)
    assert (completion.cumulative_logprob, completion.finish_reason) == (-3.0, "length")
    assert completion.timing == {"total_seconds": 0.5}


def test_joining_keeps_samples_apart_and_has_the_first_one_at_hand() -> None:
    completion = join(
        "r",
        [
            Chunk(text="a", index=1, num_output_tokens=1, prompt_logprobs=(None,)),
            Chunk(text="b", num_output_tokens=2, finish_reason="stop", cumulative_logprob=-1.0),
            Chunk(
                text="c",
                index=1,
                num_output_tokens=3,
                finish_reason="cancelled",
                is_final=True,
                timing={"total_seconds": 0.5},
            ),
        ],
    )
    assert [(one.index, one.text) for one in completion.samples] == [(0, "b"), (1, "ac")]
    assert [one.finish_reason for one in completion.samples] == ["stop", "cancelled"]
    assert [one.num_output_tokens for one in completion.samples] == [2, 4]
    first = completion.samples[0]
    assert (completion.text, completion.finish_reason) == (first.text, first.finish_reason)
    assert completion.cumulative_logprob == -1.0
    assert completion.num_output_tokens == 6
    assert completion.prompt_logprobs == (None,)
    assert completion.timing == {"total_seconds": 0.5}


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ([], "must be final"),
        ([Chunk(text="a")], "must be final"),
        ([Chunk(text="a", finish_reason="stop")], "must be final"),
        (
            [Chunk(text="a"), Chunk(text="b", index=1, finish_reason="stop", is_final=True)],
            "sample 0 must have a finish_reason",
        ),
    ],
)
def test_chunks_without_a_last_one_make_no_completion(chunks: list[Chunk], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        join("r", chunks)


def test_each_sample_has_a_chunk_where_it_has_something_new_and_ends_once() -> None:
    reader = wire.ResponseReader()
    none, stop = "None", "stop"
    first = reader.read(
        {
            "text_output": ["a", "", "cd"],
            "output_ids": [1, 2, 3],
            "num_output_tokens": [1, 0, 2],
            "finish_reason": [none, none, none],
            "prompt_logprobs": ["[null]"],
        }
    )
    assert [(one.index, one.text, one.token_ids) for one in first] == [
        (0, "a", (1,)),
        (2, "cd", (2, 3)),
    ]
    assert [one.prompt_logprobs for one in first] == [(None,), None]
    second = reader.read({"text_output": ["", "", ""], "finish_reason": [none, stop, none]})
    assert [(one.index, one.finish_reason) for one in second] == [(1, "stop")]
    third = reader.read({"text_output": ["", "", "e"], "finish_reason": [none, stop, none]})
    assert [(one.index, one.finish_reason) for one in third] == [(2, None)]
    last = reader.read(
        {
            "text_output": ["f", "", ""],
            "finish_reason": ["length", stop, "cancelled"],
            "timing": ['{"restarts": 0}'],
        }
    )
    assert [(one.index, one.finish_reason, one.is_final) for one in last] == [
        (0, "length", False),
        (2, "cancelled", True),
    ]
    assert [one.timing for one in last] == [None, {"restarts": 0}]
    assert not any(one.is_final for one in (*first, *second, *third))


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ({"text_output": ["a"]}, "must carry 2 text_output, as the first one did"),
        ({"text_output": ["", "b"], "finish_reason": ["None", "stop"]}, "goes on after its end"),
    ],
)
def test_samples_neither_go_nor_come_back(outputs: dict[str, list[str]], says: str) -> None:
    reader = wire.ResponseReader()
    reader.read({"text_output": ["", "a"], "finish_reason": ["None", "stop"]})
    with pytest.raises(ServerError, match=says):
        reader.read(outputs)


def test_the_token_ids_of_several_samples_come_with_their_numbers() -> None:
    for n in (None, 1):
        alone = request(include=("token_ids",), sampling={"n": n})
        assert "return_num_output_tokens" not in alone.inputs
    several = request(include=("token_ids",), sampling={"n": 2})
    assert several.inputs["return_num_output_tokens"] is True


def test_samples_are_cancelled_by_their_indexes() -> None:
    asked = wire.cancel_request("m", "r", "t", [2, 0])
    assert wire.to_http(asked, None)["cancel_samples"] == [2, 0]
    assert "cancel_samples" not in wire.cancel_request("m", "r", "", None).inputs


@pytest.mark.parametrize("samples", [[], [1.5], ["a"], [[1]], [2**31]])
def test_samples_that_are_no_indexes_are_refused(samples: Any) -> None:
    with pytest.raises(InvalidRequest, match="samples must"):
        wire.cancel_request("m", "r", "", samples)


@pytest.mark.parametrize("name", ["total_s", "first_token_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_timeout_that_is_not_above_zero_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Timeouts(**{name: value})


def test_the_answer_to_a_probe_is_read_and_anything_else_is_an_error() -> None:
    text = '{"engine_up": false, "reason": "no engine", "step_age_s": null, "turn_age_s": 0.5}'
    state = wire.read_state(text)
    assert (state.is_up, state.reason) == (False, "no engine")
    assert (state.step_age_s, state.turn_age_s, state.load) == (None, 0.5, None)
    load = {field.name: place for place, field in enumerate(dataclasses.fields(Load))}
    known = json.loads(text) | {"load": load | {"what comes later": 1}}
    assert wire.read_state(json.dumps(known)).load == Load(**load)
    foreign = json.dumps(known | {"load": 3})
    for wrong in ("", "[]", "{}", "not ready", foreign):
        with pytest.raises(ServerError, match="the answer to a probe cannot be understood"):
            wire.read_state(wrong)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Load)])
def test_a_load_that_lacks_a_field_is_no_load_and_the_rest_of_the_probe_counts(name: str) -> None:
    """Client and server may be of different versions."""
    load = {field.name: 1 for field in dataclasses.fields(Load) if field.name != name}
    answer = {"engine_up": True, "reason": None, "step_age_s": 1, "turn_age_s": 1, "load": load}
    state = wire.read_state(json.dumps(answer))
    assert state.is_up
    assert state.load is None
