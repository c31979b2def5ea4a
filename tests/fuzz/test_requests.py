"""Requests, whatever is in their tensors and parameters: a call, or a clear error."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from charonia.errors import InvalidRequestError, NotSupportedError
from charonia.serving.conventions.interface import FLAGS
from charonia.serving.conventions.parameters import PARAMETER_NAMES
from charonia.serving.conventions.schema import Call, GenerateCall
from charonia.serving.requests.raw_request import RawRequest
from charonia.serving.requests.tensors import read_request
from support.calls import parse
from support.fuzzing import (
    DEEP,
    HUGE_INTEGER,
    altered,
    literals,
    only_clear_errors,
    texts,
    values,
)

SAMPLING: dict[str, Any] = {
    "max_tokens": 16,
    "temperature": 0.5,
    "stop": ["a", "b"],
    "stop_token_ids": [1, 2],
    "logit_bias": {"5": -1.5},
    "ignore_eos": True,
    "tenant": "t",
    "seed": 7,
    "deadline_ms": 1000,
    "cache_priority": [{"start": 0, "end": 16, "priority": 90, "ttl_s": 5.0}],
    "cache_ttl_s": 60,
}
TENSORS = (
    *FLAGS,
    "text_input",
    "input_ids",
    "sampling_parameters",
    "stream",
    "exclude_input_in_output",
    "cancel",
    "request_key",
    "prompt_text",
)


def read(
    tensors: dict[str, Any], parameters: dict[str, Any] | None = None, **options: Any
) -> Call | None:
    """The call; None where there is an error that it may have."""
    call = None
    with only_clear_errors(InvalidRequestError, NotSupportedError):
        call = parse(RawRequest(tensors, parameters or {}, **options))
    if isinstance(call, GenerateCall):  # what others do with it must not fail
        msgspec.msgpack.encode(call.params)
        assert (call.text is None) != (call.prompt_ids is None)
        for text in (call.text, call.prompt_text, call.key):
            assert text is None or text.encode() is not None
    return call


def string(data: bytes | str) -> Any:
    """A tensor of one string, as Triton gives it."""
    value = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return np.array([value], dtype=np.object_)


def with_sampling(data: bytes | str) -> Call | None:
    return read({"text_input": string("x"), "sampling_parameters": string(data)})


@given(altered(SAMPLING))
def test_sampling_parameters(data: bytes) -> None:
    with_sampling(data)


@given(st.sampled_from(sorted(PARAMETER_NAMES)), literals)
def test_one_sampling_parameter(name: str, value: str) -> None:
    with_sampling(f'{{"{name}": {value}}}')


@given(st.sampled_from(sorted(PARAMETER_NAMES)), st.lists(values, max_size=3), texts, values)
def test_lists_and_objects_as_sampling_parameters(
    name: str, items: list[Any], key: str, value: Any
) -> None:
    for inner in (items, {key: value}, json.dumps(items), json.dumps({key: value})):
        with_sampling(json.dumps({name: inner}))


names = st.one_of(
    st.sampled_from([*sorted(PARAMETER_NAMES), "timeout", "id", "sequence_id"]), texts
)


@given(st.dictionaries(names, st.one_of(st.booleans(), st.integers(), st.floats(), texts)))
def test_the_requests_own_parameters(parameters: dict[str, Any]) -> None:
    read({"text_input": string("x")}, parameters)


@given(
    st.dictionaries(
        st.sampled_from(TENSORS),
        st.one_of(
            arrays.arrays(
                st.sampled_from(["?", "i1", "u1", "i4", "i8", "u4", "u8", "f2", "f4", "f8"]),
                arrays.array_shapes(min_dims=0, min_side=0, max_side=3),
            ),
            arrays.arrays(np.object_, arrays.array_shapes(min_dims=0), elements=st.binary()),
            st.just(np.array([True])),
            texts.map(string),
        ),
    ),
    texts,
)
def test_tensors_of_any_type_and_shape(tensors: dict[str, Any], request_id: str) -> None:
    read(tensors, request_id=request_id)


@pytest.mark.parametrize(
    "sampling",
    [
        b"[" * DEEP,
        b'{"stop":' * DEEP,
        b'{"seed": ' + HUGE_INTEGER.encode() + b"}",
        b'{"seed": "' + HUGE_INTEGER.encode() + b'"}',
        b'{"temperature": 1e999}',
        b'{"temperature": NaN}',
        b'{"temperature": "' + HUGE_INTEGER.encode() + b'"}',
        b'{"top_k": 1e300}',
        b'{"stop": "\\ud800"}',
        b'{"tenant": "\\udfff"}',
        b'{"\\ud800": 1}',
        b'{"stop": "' + b"x" * 2**19 + b'"}',
        b'{"' + b"x" * 2**19 + b'": 1}',
        b'{"logit_bias": {"' + b" " * 2**19 + b'1": "x"}}',
        b'{"logit_bias": {"' + b"9" * 2**13 + b'": 1}}',
        b'{"logit_bias": "' + b"[" * DEEP + b'"}',
        b'{"stop_token_ids": "' + b"[" * DEEP + b'"}',
        b'{"max_tokens": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}",
        b"\xff\xfe",
        b"x" * (2**20 + 1),
    ],
    ids=range(20),
)
def test_sampling_parameters_that_are_none(sampling: bytes) -> None:
    assert with_sampling(sampling) is None


def test_what_comes_twice_counts_once() -> None:
    call = with_sampling('{"max_tokens": 1, "max_tokens": 2}')
    assert isinstance(call, GenerateCall)
    assert call.params.max_tokens == 2


class Request:
    """As `pb_utils.InferenceRequest`, as far as its own parameters go."""

    def __init__(self, parameters: str) -> None:
        self._parameters = parameters

    def request_id(self) -> str:
        return ""

    def inputs(self) -> list[Any]:
        return []

    def parameters(self) -> str:
        return self._parameters


@pytest.mark.parametrize("parameters", ["[" * DEEP, '{"a":' + HUGE_INTEGER + "}", "{", "[]", "1"])
def test_parameters_that_are_no_object(parameters: str) -> None:
    with only_clear_errors(InvalidRequestError):
        read_request(Request(parameters))
        raise AssertionError("it was taken")
