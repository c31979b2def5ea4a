"""Requests of the vLLM convention, and the responses to them."""

import json
from typing import Any

import numpy as np
import pytest

from charonia.errors import (
    InvalidRequestError,
    PromptTooLongError,
    RequestTimeoutError,
)
from charonia.protocol.sampling_params import MAX_CHARACTERS
from charonia.serving.conventions.interface import FLAGS
from charonia.serving.conventions.schema import (
    CancelCall,
    GenerateCall,
    OutputOptions,
    PromptLimits,
)
from charonia.serving.requests.raw_request import RawRequest
from charonia.serving.requests.request_key import Sealer
from charonia.serving.requests.tensors import error_response, read_request, tensor
from support.calls import SEALER, parse

ECHO_TEXT = (
    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
)


def flag(*values: bool) -> Any:
    return np.array(values, dtype=np.bool_)


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def generate_call(raw: RawRequest) -> GenerateCall:
    call = parse(raw)
    assert isinstance(call, GenerateCall)
    return call


def test_a_text_is_enough(strings: Any) -> None:
    call = generate_call(RawRequest({"text_input": strings("héllo")}, {}))
    assert (call.text, call.prompt_ids, call.prompt_text) == ("héllo", None, None)
    assert call.options == OutputOptions(
        is_streaming=False, has_echo=True, names=frozenset({"text_output"}), has_key=False
    )
    assert call.timeout_s is None


def test_token_ids_are_enough(strings: Any) -> None:
    call = generate_call(RawRequest({"input_ids": ids(1, 2)}, {}))
    assert (call.text, call.prompt_text) == (None, None)
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [1, 2]


def test_every_request_has_a_key_of_its_own() -> None:
    raw = RawRequest({"input_ids": ids(1)}, {}, request_id="0")
    assert generate_call(raw).key != generate_call(raw).key


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_a_flag_asks_for_its_output(name: str) -> None:
    raw = RawRequest({"input_ids": ids(1), name: flag(True)}, {})
    assert generate_call(raw).options.names == {"text_output", FLAGS[name]}
    raw = RawRequest({"input_ids": ids(1), name: flag(False)}, {})
    assert generate_call(raw).options.names == {"text_output"}


def test_an_output_that_the_client_does_not_want_is_not_made() -> None:
    tensors = {"input_ids": ids(1), "return_logprobs": flag(True)}
    raw = RawRequest(tensors, {}, output_names=frozenset({"text_output"}))
    assert generate_call(raw).options.names == {"text_output"}


@pytest.mark.parametrize(
    ("stream", "exclude", "has_echo"),
    [
        (None, None, True),
        (False, None, True),
        (False, False, True),
        (False, True, False),
        (True, None, False),
        (True, True, False),
    ],
)
def test_the_prompt_is_echoed_only_without_streaming(
    stream: bool | None, exclude: bool | None, has_echo: bool
) -> None:
    tensors = {"input_ids": ids(1)}
    if stream is not None:
        tensors["stream"] = flag(stream)
    if exclude is not None:
        tensors["exclude_input_in_output"] = flag(exclude)
    assert generate_call(RawRequest(tensors, {})).options.has_echo == has_echo


def test_an_echo_in_a_stream_is_refused_in_the_words_that_clients_test_for() -> None:
    tensors = {
        "input_ids": ids(1),
        "stream": flag(True),
        "exclude_input_in_output": flag(False),
    }
    with pytest.raises(InvalidRequestError) as caught:
        parse(RawRequest(tensors, {}))
    assert str(caught.value) == ECHO_TEXT


def test_sampling_parameters_come_from_the_tensor_before_the_requests_own(strings: Any) -> None:
    tensors = {"input_ids": ids(1), "sampling_parameters": strings('{"max_tokens": "5"}')}
    params = generate_call(RawRequest(tensors, {"max_tokens": 9, "custom": 1})).params
    assert params.max_tokens == 5
    assert generate_call(RawRequest(tensors, {"priority": "-2"})).params.priority == -2
    assert (
        generate_call(RawRequest({"input_ids": ids(1)}, {"max_tokens": 9})).params.max_tokens == 9
    )


def test_whose_a_request_is_and_when_it_is_due_counts_beside_the_tensor(strings: Any) -> None:
    own = {"tenant": "a", "priority": "-2", "deadline_ms": 50, "max_tokens": 9}
    inputs = {"input_ids": ids(1)}
    without = generate_call(RawRequest(inputs | {"sampling_parameters": strings("")}, own)).params
    assert (without.tenant, without.priority, without.deadline_ms) == ("a", -2, 50)
    assert without.max_tokens == 16
    said = {"sampling_parameters": strings('{"tenant": "b"}')}
    assert generate_call(RawRequest(inputs | said, own)).params.tenant == "b"


def test_an_empty_sampling_parameters_tensor_is_the_defaults(strings: Any) -> None:
    tensors = {"input_ids": ids(1), "sampling_parameters": strings("")}
    assert generate_call(RawRequest(tensors, {"max_tokens": 9})).params.max_tokens == 16


@pytest.mark.parametrize(
    ("timeout_us", "parameters", "timeout_s"),
    [
        (0, {}, None),
        (2_000_000, {}, 2.0),
        (0, {"timeout": 500_000}, 0.5),
        (0, {"timeout": "500000"}, 0.5),
        (2_000_000, {"timeout": 500_000}, 0.5),
        (0, {"timeout": 0}, None),
    ],
)
def test_a_timeout_counts_wherever_it_stands(
    timeout_us: int, parameters: dict[str, Any], timeout_s: float | None
) -> None:
    raw = RawRequest({"input_ids": ids(1)}, parameters, timeout_us=timeout_us)
    assert generate_call(raw).timeout_s == timeout_s


def test_a_negative_timeout_of_grpc_is_refused_as_one_of_http() -> None:
    inputs = {"input_ids": ids(1)}
    for raw in (
        RawRequest(inputs, {}, timeout_us=2**64 - 1),  # what Triton makes of gRPC's -1
        RawRequest(inputs, {"timeout": -1}),
    ):
        words = "^timeout must be microseconds, at least 0, but is -1$"
        with pytest.raises(InvalidRequestError, match=words):
            parse(raw)


def test_logprobs_of_the_prompt_are_an_output_when_they_are_computed() -> None:
    raw = RawRequest({"input_ids": ids(1)}, {"prompt_logprobs": 0})
    assert generate_call(raw).options.names == {"text_output", "prompt_logprobs"}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "text_input or input_ids must be given, but there is none"),
        ({"stream": flag(True)}, "there is none"),
        ({"text_input": "a", "input_ids": ids(1)}, "both are given"),
        ({"text_input": ""}, "text_input must not be empty"),
        ({"text_input": b"\xff"}, "text_input is not valid UTF-8: invalid start byte at byte 0"),
        ({"text_input": b"ok\xc3"}, "text_input is not valid UTF-8"),
        ({"text_input": b"\xed\xa0\x80"}, "text_input is not valid UTF-8"),
        ({"text_input": ["a", "b"]}, r"text_input must be one string, but has shape \[2\]"),
        ({"text_input": []}, "text_input must be one string"),
        ({"text_input": ids(1)}, "text_input must be one string"),
        ({"input_ids": ids()}, "input_ids must be a list of at least one"),
        ({"input_ids": np.zeros((1, 2), np.int32)}, r"shape \[1, 2\]"),
        ({"input_ids": np.zeros(2, np.float32)}, "type float32"),
        ({"input_ids": np.zeros(2, np.int64)}, "type int64"),
        ({"input_ids": np.zeros((), np.int32)}, "input_ids must be"),
        ({"input_ids": ids(1), "stream": flag(True, False)}, "stream must be one boolean"),
        ({"input_ids": ids(1), "stream": flag()}, "stream must be one boolean"),
        ({"input_ids": ids(1), "stream": ids(1)}, "stream must be one boolean"),
        ({"input_ids": ids(1), "cancel": flag(True, True)}, "cancel must be one boolean"),
        ({"input_ids": ids(1), "return_timing": "yes"}, "return_timing must be one boolean"),
        ({"input_ids": ids(1), "sampling_parameters": "{"}, "sampling_parameters is not valid"),
        ({"input_ids": ids(1), "sampling_parameters": "[1]"}, "must be a JSON object"),
        ({"input_ids": ids(1), "sampling_parameters": "null"}, "must be a JSON object"),
        ({"input_ids": ids(1), "sampling_parameters": "[" * 100_000}, "is not valid JSON"),
        ({"input_ids": ids(1), "sampling_parameters": b'{"stop": "\xff"}'}, "not valid UTF-8"),
        ({"input_ids": ids(1), "sampling_parameters": '{"stop": "\\ud800"}'}, "stop must be valid"),
        ({"input_ids": ids(1), "sampling_parameters": '{"top_p": NaN}'}, "top_p must be"),
        ({"input_ids": ids(1), "sampling_parameters": '{"a": 1}'}, "unknown sampling parameter"),
        ({"input_ids": ids(1), "sampling_parameters": ["{}", "{}"]}, "must be one string"),
        ({"cancel": flag(True)}, "cancel needs the id"),
        ({"cancel_samples": ids(1), "input_ids": ids(1)}, "give cancel = true, too"),
        ({"cancel": flag(True), "cancel_samples": ids()}, "cancel_samples must be a list"),
        ({"cancel": flag(True), "cancel_samples": flag(True)}, "cancel_samples must be a list"),
        ({"cancel": flag(True), "cancel_samples": ids(0, 128)}, "from 0 to 127, but has 128"),
        ({"cancel": flag(True), "cancel_samples": ids(-1)}, "from 0 to 127, but has -1"),
        ({"cancel": flag(True), "cancel_samples": ids(*[1] * 129)}, "at most 128 .* has 129"),
    ],
)
def test_a_malformed_request_is_refused_in_clear_words(
    tensors: dict[str, Any], words: str, strings: Any
) -> None:
    for name, value in tensors.items():
        if isinstance(value, str | bytes):
            tensors = tensors | {name: strings(value)}
        elif isinstance(value, list):
            tensors = tensors | {name: strings(*value)}
    with pytest.raises(InvalidRequestError, match=words):
        parse(RawRequest(tensors, {}))


def test_cancelling_needs_an_id_and_no_prompt(strings: Any) -> None:
    raw = RawRequest({"cancel": flag(True)}, {"tenant": "t"}, request_id="7")
    assert parse(raw) == CancelCall(request_id="7", tenant="t")
    with pytest.raises(InvalidRequestError, match="cancel needs the id"):
        parse(RawRequest({"cancel": flag(True), "request_key": strings("k")}, {}))
    some = RawRequest({"cancel": flag(True), "cancel_samples": ids(3, 0)}, {}, request_id="7")
    assert parse(some) == CancelCall("7", "", frozenset({0, 3}))
    call = generate_call(RawRequest({"cancel": flag(False), "input_ids": ids(1)}, {}))
    assert call.prompt_ids is not None


def test_an_ensembles_cancel_has_an_empty_key(strings: Any) -> None:
    tensors = {"cancel": flag(True), "request_key": strings(), "input_ids": ids()}
    assert parse(RawRequest(tensors, {}, request_id="7")) == CancelCall("7", "")


def test_the_ensemble_brings_ids_and_the_text_that_they_came_from(strings: Any) -> None:
    key = SEALER.new_key(ids(5), "five", 7.25)
    tensors = {
        "input_ids": ids(5),
        "prompt_text": strings("five"),
        "request_key": strings(key),
    }
    outputs = frozenset({"text_output", "request_key"})
    call = generate_call(RawRequest(tensors, {}, output_names=outputs))
    assert (call.prompt_text, call.key) == ("five", key[:32])
    assert call.options.has_key
    assert call.arrived_at == 7.25
    assert not generate_call(RawRequest(tensors, {})).options.has_key  # nobody takes it there
    tensors |= {"prompt_text": strings(), "request_key": strings(SEALER.new_key(ids(5), "", 7.25))}
    assert generate_call(RawRequest(tensors, {})).prompt_text is None


@pytest.mark.parametrize(
    ("tokens", "text", "key"),
    [
        ((5,), "four", None),
        ((6,), "five", None),
        ((5,), "", None),
        ((5,), "five", ""),
        ((5,), "five", "k" * 96),
        ((5,), "", "k"),
        ((5,), "five", "é" * 48),
    ],
)
def test_nobody_but_the_tokenizer_names_a_request_or_gives_its_text(
    strings: Any, tokens: tuple[int, ...], text: str, key: str | None
) -> None:
    sealed = SEALER.new_key(ids(5), "five", 7.25) if key is None else key
    tensors = {
        "input_ids": ids(*tokens),
        "prompt_text": strings(text),
        "request_key": strings(sealed),
    }
    with pytest.raises(InvalidRequestError, match="are for other models"):
        parse(RawRequest(tensors, {}))
    other = Sealer(b"1" * 32).new_key(ids(*tokens), text, 7.25)
    with pytest.raises(InvalidRequestError, match="are for other models"):
        parse(RawRequest(tensors | {"request_key": strings(other)}, {}))


def test_a_relayed_requests_key_is_not_shown_to_its_client() -> None:
    call = parse(RawRequest({"input_ids": ids(1)}, {}), "k")
    assert isinstance(call, GenerateCall)
    assert (call.key, call.options.has_key) == ("k", False)


def test_a_relayed_cancel_names_a_request_by_its_id() -> None:
    raw = RawRequest({"cancel": flag(True)}, {"tenant": "t"}, request_id="7")
    assert parse(raw, "k") == CancelCall(request_id="7", tenant="t")


def test_a_prompt_that_is_too_long_is_refused_by_its_size(strings: Any) -> None:
    limits = PromptLimits.of(3, 4)
    for tensors in (
        {"text_input": strings("x" * 13)},
        {"text_input": np.array([b"\xff" * 13], dtype=object)},  # which nobody decodes
        {"input_ids": ids(1, 2, 3, 4)},
    ):
        with pytest.raises(PromptTooLongError, match=r"12 bytes, but has 13|at most 3 are"):
            parse(RawRequest(tensors, {}), limits=limits)
    assert isinstance(
        parse(RawRequest({"text_input": strings("x" * 12)}, {}), limits=limits), GenerateCall
    )
    assert PromptLimits.of(2**40, 1) == PromptLimits()
    assert PromptLimits.of(7, None) == PromptLimits(max_ids=7)


@pytest.mark.parametrize("max_bytes_per_token", [2**21, 2**25, None])
def test_only_a_bound_by_the_vocabulary_is_said_to_be_one(
    strings: Any, max_bytes_per_token: int | None
) -> None:
    limits = PromptLimits.of(3, max_bytes_per_token)
    raw = RawRequest({"text_input": strings(b"x" * (limits.max_bytes + 1))}, {})
    with pytest.raises(PromptTooLongError) as error:
        parse(raw, limits=limits)
    is_by_vocabulary = "a prompt of 3 tokens, the longest, has no more" in str(error.value)
    assert is_by_vocabulary == (max_bytes_per_token == 2**21)


def test_a_request_is_copied_out_of_shared_memory(pb_utils: Any) -> None:
    shared = ids(1, 2)
    request = pb_utils.Request(
        [pb_utils.Tensor("input_ids", shared)],
        parameters_json='{"max_tokens": 3}',
        id="7",
        timeout_us=9,
    )
    raw = read_request(request)
    shared[:] = 0
    assert raw.tensors["input_ids"].tolist() == [1, 2]
    assert (raw.parameters, raw.request_id, raw.timeout_us) == ({"max_tokens": 3}, "7", 9)
    assert raw.output_names == {"text_output"}


@pytest.mark.parametrize(
    ("name", "values", "dtype"),
    [
        ("text_output", ["ü"], np.object_),
        ("cumulative_logprob", [-1.5], np.float32),
        ("num_output_tokens", [3], np.uint32),
        ("output_ids", [1, 2], np.int32),
        ("prompt_text", [], np.object_),
    ],
)
def test_an_output_has_its_tensors_type(
    pb_utils: Any, name: str, values: list[Any], dtype: Any
) -> None:
    made = tensor(pb_utils, name, values)
    assert made.name() == name
    assert made.as_numpy().dtype == dtype
    assert made.as_numpy().shape == (len(values),)


def test_text_leaves_as_utf_8(pb_utils: Any) -> None:
    assert tensor(pb_utils, "text_output", ["ü"]).as_numpy().item() == "ü".encode()


def test_an_error_keeps_its_code_and_words(pb_utils: Any) -> None:
    error = error_response(pb_utils, RequestTimeoutError("Request timeout expired")).error()
    assert error.message() == "Request timeout expired [charonia:timeout]"
    assert error.code() == pb_utils.TritonError.UNAVAILABLE


def test_a_misspelled_name_in_the_tensor_is_no_header(strings: Any) -> None:
    tensors = {"input_ids": ids(1), "sampling_parameters": strings('{"max_token": 5}')}
    raw = RawRequest(tensors, {"Host": "here"})
    with pytest.raises(InvalidRequestError, match="unknown sampling parameter 'max_token'"):
        parse(raw, is_forwarded=lambda name: True)
    assert generate_call(RawRequest({"input_ids": ids(1)}, {})).params.max_tokens == 16


def test_a_parameter_that_is_given_twice_is_refused(pb_utils: Any) -> None:
    """As Triton gives what a client says itself and what its header says, in this order or not."""
    text = '{"x-tenant": "a", "top_k": 5, "x-tenant": "b"}'
    request = pb_utils.Request([], parameters_json=text)
    with pytest.raises(InvalidRequestError, match="'x-tenant' is given more than once"):
        read_request(request)


OF_TRITON, OF_CLIENT = (f"00-{digit * 32}-00f067aa0ba902b7-01" for digit in "12")


@pytest.mark.parametrize(
    ("context", "given", "expected"),
    [
        (None, None, None),
        (OF_TRITON, None, OF_TRITON),
        (None, OF_CLIENT, OF_CLIENT),
        (OF_TRITON, OF_CLIENT, OF_CLIENT),  # Triton lost the client's, and began its own
        (OF_TRITON, OF_TRITON.replace("-00f0", "-10f0"), OF_TRITON),  # Triton's span is below it
        (OF_TRITON, f"{OF_CLIENT[:-2]}00", OF_TRITON),  # nobody records the client's
        (None, f"{OF_CLIENT[:-2]}00", f"{OF_CLIENT[:-2]}00"),  # which the log may name
        (OF_TRITON, "other", OF_TRITON),
        (OF_TRITON, 7, OF_TRITON),
    ],
)
def test_a_request_is_in_its_clients_trace(
    pb_utils: Any, context: str | None, given: Any, expected: str | None
) -> None:
    request = pb_utils.Request([], parameters_json=json.dumps({"traceparent": given}))
    request.trace_context = context and json.dumps({"traceparent": context})
    assert read_request(request).traceparent == expected


@pytest.mark.parametrize(
    "pairs",
    [
        f'"Traceparent": "{OF_CLIENT}"',
        f'"Traceparent": "{OF_TRITON}", "Traceparent": "{OF_CLIENT}"',
        f'"traceparent": "{OF_TRITON}", "Traceparent": "{OF_CLIENT}"',
        f'"traceparent": "{OF_CLIENT}", "Traceparent": "none"',
        f'"traceparent": 7, "Traceparent": "{OF_CLIENT}"',
    ],
)
def test_over_http_a_header_may_have_any_case(pb_utils: Any, pairs: str) -> None:
    request = pb_utils.Request([], parameters_json=f'{{"top_k": 5, {pairs}}}')
    assert read_request(request).traceparent == OF_CLIENT


@pytest.mark.parametrize(
    ("parameters", "text", "tenant"),
    [
        ({}, None, None),
        ({"tenant": "a"}, None, "a"),
        ({"tenant": "a"}, '{"tenant": "b"}', "b"),
        ({"tenant": "a"}, '{"top_k": 1}', "a"),
        ({"tenant": "a"}, '{"tenant": ', "a"),
        ({"tenant": 7}, '["tenant"]', None),
        ({}, '{"tenant": null}', None),
        ({"tenant": "a" * 2000}, None, "a" * MAX_CHARACTERS["tenant"]),
        ({"tenant": "a"}, f'{{"tenant": "b", "stop": "{"c" * 2**14}"}}', "a"),  # too much to read
    ],
)
def test_a_line_names_the_tenant_that_a_request_names_wherever_it_does(
    parameters: dict[str, Any], text: str | None, tenant: str | None
) -> None:
    tensors = {} if text is None else {"sampling_parameters": np.array([text.encode()], object)}
    assert RawRequest(tensors, parameters).log_fields["tenant"] == tenant


def test_of_several_contexts_the_last_one_counts(pb_utils: Any) -> None:
    text = json.dumps({"traceparent": OF_TRITON, "top_k": 5})
    text = f'{text[:-1]}, "traceparent": "{OF_CLIENT}"}}'
    assert read_request(pb_utils.Request([], parameters_json=text)).traceparent == OF_CLIENT
    twice = f'{text[:-1]}, "top_k": 5}}'
    with pytest.raises(InvalidRequestError, match="'top_k' is given more than once"):
        read_request(pb_utils.Request([], parameters_json=twice))


def parse_with_header(strings: Any, sampling: str, parameters: dict[str, Any]) -> Any:
    tensors = {"input_ids": ids(1), "sampling_parameters": strings(sampling)}
    raw = RawRequest(tensors, parameters, request_id="7")
    return parse(raw, is_forwarded=lambda name: name == "X-Tenant", tenant_header="x-tenant")


def test_a_header_says_whose_a_request_is(strings: Any) -> None:
    for sampling in ("{}", '{"tenant": "search"}'):
        assert parse_with_header(strings, sampling, {"X-Tenant": "search"}).params.tenant == (
            "search"
        )
    assert parse_with_header(strings, "{}", {}).params.tenant == ""
    cancel = RawRequest({"cancel": flag(True)}, {"X-Tenant": "search"}, request_id="7")
    assert parse(cancel, is_forwarded=lambda name: True, tenant_header="x-tenant") == CancelCall(
        "7", "search"
    )


@pytest.mark.parametrize("parameters", [{"X-Tenant": "search"}, {}, {"tenant": "other"}])
def test_a_request_cannot_say_otherwise(strings: Any, parameters: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequestError, match="tenant = 'other' is not what the header x-tenant says"
    ):
        parse_with_header(strings, '{"tenant": "other"}', parameters)
