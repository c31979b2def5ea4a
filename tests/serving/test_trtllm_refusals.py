"""What TensorRT-LLM's models refuse, and in whose words."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from charonia.errors import (
    CharoniaError,
    ExactTextError,
    InvalidRequestError,
    NotSupportedError,
    QueueFullError,
    RequestCancelledError,
)
from charonia.serving.conventions.trtllm.facade import (
    BATCH_NEEDS_DECOUPLED,
    MAX_RETURN_SEQUENCES,
    MAX_SEQUENCES,
    STOP_NEEDS_ID,
    STREAM_NEEDS_DECOUPLED,
)
from charonia.serving.conventions.trtllm.tables import MODELS, Refused
from charonia.serving.requests.raw_request import NUMPY_TYPES, RawRequest
from support.trtllm import (
    PART_OF_CHARACTER,
    TEXT,
    TOKENS,
    facade,
    raw_request,
    split,
)

REFUSED = [
    pytest.param(model, one, id=f"{model} {one.name}")
    for model in ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
    for one in MODELS[model].refused
]


@pytest.mark.parametrize(("model", "one"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(model: str, one: Refused) -> None:
    raw = raw_request(model, [TOKENS if model == "tensorrt_llm" else TEXT])
    dtype = NUMPY_TYPES[one.datatype]
    shape = [1, *(2 if size == -1 else size for size in one.dims)]
    value = np.full(shape, b"x" if dtype is np.object_ else 3, dtype=dtype)
    with pytest.raises(NotSupportedError, match=f"^{one.name} = .* is not supported; leave it out"):
        facade(model).split(replace_tensors(raw, {one.name: value}))
    for neutral in one.neutral:
        tensors = {one.name: np.full([1, *one.dims], neutral, dtype=dtype)}
        assert facade(model).split(replace_tensors(raw, tensors))
    empty = np.zeros([1, *(0 if size == -1 else size for size in one.dims)], dtype=dtype)
    if not empty.size:
        assert facade(model).split(replace_tensors(raw, {one.name: empty}))


def replace_tensors(raw: RawRequest, tensors: dict[str, Any]) -> RawRequest:
    return RawRequest(raw.tensors | tensors, {}, output_names=raw.output_names)


@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        ("ensemble", {"max_tokens": 4}, "text_input is not present in the request"),
        ("ensemble", {"text_input": "a"}, "max_tokens is not present in the request"),
        ("tensorrt_llm", {"input_ids": [1]}, "request_output_len is not present in the request"),
        (
            "tensorrt_llm",
            {"request_output_len": 1, "input_lengths": 1},
            "input_ids is not present in the request",
        ),
        ("tensorrt_llm", TOKENS | {"input_lengths": 4}, "input_lengths must be from 1 to 3"),
        ("tensorrt_llm", TOKENS | {"input_lengths": 0}, "input_lengths must be from 1 to 3"),
        ("tensorrt_llm", TOKENS | {"num_return_sequences": 0}, "must be from 1 to 64, but is 0"),
        (
            "tensorrt_llm",
            TOKENS | {"num_return_sequences": 10**9},
            f"num_return_sequences must be from 1 to {MAX_RETURN_SEQUENCES}",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"stop_words_list": [[1, 2, 3], [2, 1, -1]]},
            "stop_words_list must say in its second row where each word ends, from 3 to 3",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"bad_words_list": [[1, 2], [3, -1]]},
            "bad_words_list must say in its second row where each word ends, from 1 to 2",
        ),
        ("tensorrt_llm", TOKENS | {"input_ids": []}, "input_ids must have at least one token"),
        (
            "tensorrt_llm",
            TOKENS | {"stop_words_list": [[-5, 6], [2, -1]]},
            "stop_words_list must have token ids from 0 to 4095, but has -5",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"bad_words_list": [[10**9], [1]]},
            "bad_words_list must have token ids from 0 to 4095, but has 1000000000",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"bad_words_list": [[PART_OF_CHARACTER], [1]]},
            "bad_words_list must have words of whole characters",
        ),
        (
            "tensorrt_llm",
            TOKENS | {"embedding_bias": [1.0] * 5000},
            "embedding_bias must have at most 4096 values other than 0, but has 5000",
        ),
        ("ensemble", TEXT | {"stop_words": [b"\xff"]}, "stop_words is not valid UTF-8"),
        ("ensemble", {"text_input": "a" * (2**24 + 1), "max_tokens": 1}, "at most 16777216 bytes"),
        ("ensemble", TEXT | {"bad_words": ["a" * (2**18 + 1)]}, "at most 262144 bytes"),
        ("ensemble", TEXT | {"stop_words": [""] * (2**18 + 1)}, "at most 262144 texts"),
        (
            "tensorrt_llm",
            TOKENS | {"stop_words_list": [[5] * (2**15 + 1), [*range(1, 2**15 + 2)]]},
            "stop_words_list must have at most 262144 bytes, but has 262152",
        ),
        (
            "ensemble",
            TEXT | {"stop_words": ["a"] * 65},
            "stop_words must have at most 64 entries and 8192 characters, but has 65 and 65",
        ),
        (
            "ensemble",
            TEXT | {"embedding_bias_words": ["a" * 2**17], "embedding_bias_weights": [1.0]},
            "embedding_bias_words must have at most 4096 entries and 65536 characters",
        ),
    ],
)
def test_a_request_that_says_too_little_or_too_much_is_refused(
    model: str, inputs: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        split(model, inputs)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({}, "all inputs must have the same batch, but there are none"),
        (
            {"input_lengths": np.array([[1], [2]], dtype=np.int32)},
            "input_ids 1, input_lengths 2",
        ),
        (
            {"input_ids": np.array([1], dtype=np.int32)},
            r"input_ids must be INT32 of shape \[batch, n\], but has shape \[1\] and type int32",
        ),
        (
            {"input_ids": np.array([[1]], dtype=np.int64)},
            r"input_ids must be INT32 of shape \[batch, n\], but has shape \[1, 1\] and type int64",
        ),
        (
            {"input_ids": np.zeros((0, 1), dtype=np.int32)},
            "all inputs must have the same batch, but there are input_ids 0",
        ),
    ],
)
def test_tensors_without_a_common_batch_are_refused(tensors: dict[str, Any], text: str) -> None:
    given = {"input_ids": np.array([[1]], dtype=np.int32)} | tensors if tensors else {}
    with pytest.raises(InvalidRequestError, match=text):
        facade().split(RawRequest(given, {}))


def test_a_large_input_that_is_refused_is_not_copied() -> None:
    table = np.zeros((1, 2**10, 2**10), dtype=np.float16)
    raw = raw_request("tensorrt_llm", [TOKENS])
    raw = replace(raw, tensors={**raw.tensors, "prompt_embedding_table": table})
    tracemalloc.start()
    try:
        with pytest.raises(NotSupportedError, match=r"prompt_embedding_table = 0\.0 is not"):
            facade().split(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < table.nbytes


def test_errors_say_which_request_of_a_batch_they_are_about() -> None:
    wrong = TOKENS | {"input_lengths": 4}
    with pytest.raises(InvalidRequestError, match=r"^request 1 of the batch: input_lengths"):
        split("tensorrt_llm", TOKENS, wrong)
    _, second = split("tensorrt_llm", TOKENS, TOKENS)
    found = second.failure(InvalidRequestError("max_tokens must be 1"))
    assert str(found) == "request 1 of the batch: request_output_len must be 1"


def test_one_request_does_not_fill_the_queue() -> None:
    row = TOKENS | {"num_return_sequences": 64}
    assert len(split("tensorrt_llm", *[row] * 4)) == MAX_SEQUENCES
    text = (
        "num_return_sequences of all requests in a batch must be at most 256 together, but is 320"
    )
    with pytest.raises(InvalidRequestError, match=text):
        split("tensorrt_llm", *[row] * 5)


def test_a_model_that_is_not_decoupled_says_what_it_cannot_do_as_theirs_does() -> None:
    for rows, text in (
        ([TOKENS, TOKENS], BATCH_NEEDS_DECOUPLED),
        ([TOKENS | {"streaming": True}], STREAM_NEEDS_DECOUPLED),
    ):
        with pytest.raises(ExactTextError) as error:
            split("tensorrt_llm", *rows, is_decoupled=False)
        assert str(error.value) == text
    with pytest.raises(InvalidRequestError, match="num_return_sequences must be 1 where"):
        split("tensorrt_llm", TOKENS | {"num_return_sequences": 2}, is_decoupled=False)
    assert len(split("tensorrt_llm", TOKENS | {"streaming": False}, is_decoupled=False)) == 1


def test_of_a_requests_own_parameters_only_tritons_count() -> None:
    row = TOKENS | {"stop": True}
    raw = raw_request("tensorrt_llm", [row], request_id="7")
    parameters = {"Streaming": True, "timeout": 5, "temperature": "3", "x-tenant": "a"}
    ((request, _),) = facade().split(replace(raw, parameters=parameters))
    assert request.parameters == {"timeout": 5, "x-tenant": "a"}, "it may be a header"


def test_what_may_be_headers_is_bounded_because_each_sequence_takes_it_along() -> None:
    raw = raw_request("tensorrt_llm", [TOKENS])
    parameters = {f"x-{number}": "y" * 1000 for number in range(70)}
    with pytest.raises(InvalidRequestError, match="at most 65536 characters are accepted, but 70"):
        facade().split(replace(raw, parameters=parameters))


def test_a_stop_cancels_the_requests_of_its_id_and_needs_one() -> None:
    with pytest.raises(ExactTextError, match=STOP_NEEDS_ID):
        split("tensorrt_llm", TOKENS | {"stop": True})
    with pytest.raises(InvalidRequestError, match="stop must be the same in all of a batch"):
        split("tensorrt_llm", TOKENS | {"stop": True}, TOKENS | {"stop": False}, request_id="7")
    (part,) = split("tensorrt_llm", TOKENS | {"stop": True}, request_id="7")
    assert part.request.request_id == "7"
    tensors = {name: value.item() for name, value in part.request.tensors.items()}
    assert tensors == {"cancel": True, "sampling_parameters": b"{}"}
    assert part.answer({"text_output": [""]}) is None
    error = InvalidRequestError("no")
    assert part.failure(error) is error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("max_tokens must be 1"), "request_output_len must be 1"),
        (InvalidRequestError("top_p must be 1"), "runtime_top_p must be 1"),
        (
            InvalidRequestError("min_tokens must be from 0 to max_tokens (4), but is 'top_p'"),
            "min_length must be from 0 to request_output_len (4), but is 'top_p'",
        ),
        (InvalidRequestError("a stop is no stop"), "a stop is no stop"),
        (QueueFullError("seed is full"), "random_seed is full"),
        (ExactTextError("seed is what it is"), "seed is what it is"),
    ],
)
def test_errors_speak_of_the_models_own_tensors(error: CharoniaError, expected: str) -> None:
    (part,) = split("tensorrt_llm", TOKENS)
    found = part.failure(error)
    assert found is not None
    assert (str(found), found.kind, found.code) == (expected, error.kind, error.code)


def test_a_request_that_is_stopped_just_ends() -> None:
    (part,) = split("tensorrt_llm", TOKENS)
    assert part.failure(RequestCancelledError("the request was cancelled")) is None


def test_ranges_to_be_retained_have_all_their_values_and_are_few() -> None:
    starts = {"retention_token_range_starts": [0, 1]}
    for inputs, says in (
        (starts, "^retention_token_range_ends must be as many as .*_starts, but are 0 for 2"),
        (
            {name: [0] * 32 for name in starts},
            "^retention_token_range_starts must have at most 31 values, but has 32",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            split("tensorrt_llm", TOKENS | inputs)
