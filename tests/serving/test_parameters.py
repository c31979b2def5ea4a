"""Sampling parameters: names, coercion and what is refused."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import CharoniaError, InvalidRequestError, NotSupportedError
from charonia.protocol import CacheRange, SamplingParams
from charonia.serving.conventions.parameters import (
    PARAMETER_NAMES,
    parse_sampling_params,
    parse_timeout,
    tenant_of_header,
    without_headers,
)


def test_nothing_is_vllms_defaults() -> None:
    assert parse_sampling_params({}) == SamplingParams()


def test_every_parameter_has_a_coercion() -> None:
    assert {field.name for field in msgspec.structs.fields(SamplingParams)} == PARAMETER_NAMES


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("max_tokens", "100", 100),
        ("max_tokens", 100.0, 100),
        ("max_tokens", " 7 ", 7),
        ("max_tokens", "7\x1f", 7),
        ("temperature", "0.1", 0.1),
        ("temperature", 1, 1.0),
        ("top_k", "-1", -1),
        ("ignore_eos", "false", False),
        ("ignore_eos", "True", True),
        ("ignore_eos", 1, True),
        ("ignore_eos", "0", False),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", "18446744073709551615", 2**64 - 1),
        ("seed", None, None),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("stop", None, ()),
        ("stop_token_ids", [1, "2"], (1, 2)),
        ("stop_token_ids", "[1, 2]", (1, 2)),
        ("bad_words", ["x"], ("x",)),
        ("allowed_token_ids", [1, "2"], (1, 2)),
        ("allowed_token_ids", "[1, 2]", (1, 2)),
        ("allowed_token_ids", None, None),
        ("logit_bias", {"5": 1, "6": "-2.5"}, {5: 1.0, 6: -2.5}),
        ("logit_bias", '{"5": 100}', {5: 100.0}),
        ("logprobs", "3", 3),
        ("best_of", 1, 1),
        ("priority", "0", 0),
        ("tenant", "a", "a"),
        ("speculation", "false", False),
        ("cache_priority", 80, 80),
        ("cache_priority", " 80 ", 80),
        ("cache_priority", 80.0, 80),
        ("cache_priority", [], ()),
        (
            "cache_priority",
            [
                {"start": "16", "end": 32, "priority": "90", "ttl_s": "0.5"},
                {"priority": 0, "end": 16},
            ],
            (CacheRange(start=16, end=32, priority=90, ttl_s=0.5), CacheRange(end=16, priority=0)),
        ),
        (
            "cache_priority",
            '[{"start": 8, "end": null, "priority": 90, "ttl_s": null}]',
            (CacheRange(start=8, priority=90),),
        ),
    ],
)
def test_a_value_may_be_written_in_these_ways(name: str, value: Any, read: Any) -> None:
    assert getattr(parse_sampling_params({name: value}), name) == read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", 10**30),
        ("max_tokens", "9" * 5000),
        ("max_tokens", 1e300),
        ("max_tokens", float("nan")),
        ("max_tokens", [5]),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", False),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", "NaN"),
        ("top_k", -2),
        ("top_k", 2**40),
        ("min_p", 2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", "0x10"),
        ("n", 0),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", "\ud800"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "five"),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", [2**40]),
        ("bad_words", 5),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [2**40]),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", "[" * 100_000),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", "all"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("ignore_eos", "perhaps"),
        ("ignore_eos", 2),
        ("skip_special_tokens", []),
        ("deadline_ms", 0),
        ("cache_priority", 101),
        ("cache_priority", "high"),
        ("cache_priority", '"high"'),
        ("cache_priority", True),
        ("cache_priority", 1.5),
        ("cache_priority", {"priority": 5}),
        ("cache_priority", [5]),
        ("cache_priority", [{}]),
        ("cache_priority", [{"priority": None}]),
        ("cache_priority", [{"priority": 5, "begin": 5}]),
        ("cache_priority", [{"priority": "high"}]),
        ("cache_priority", [{"priority": 50, "start": -1}]),
        ("cache_priority", [{"priority": 50, "ttl_s": "long"}]),
        ("cache_ttl_s", 0),
        ("cache_ttl_s", "long"),
        ("priority", "soon"),
        ("tenant", 5),
        ("cache_salt", "\ud800"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_sampling_params({name: value})
    message = str(caught.value)
    assert name in message
    assert "must be" in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("name", "wrong", "accepted"),
    [
        ("deadline_ms", (0, 2**31), "from 1 to 2147483647"),
        ("priority", (-(2**31), 2**31), "from -2147483647 to 2147483647"),
        ("top_k", (2**31,), "at most 2147483647"),
        ("stop_token_ids", ([2**31], [-(2**31)]), "an integer from 0 to 2147483647"),
    ],
)
def test_bounds_are_the_same_on_either_side_and_accepted(
    name: str, wrong: tuple[Any, ...], accepted: str
) -> None:
    for value in wrong:
        with pytest.raises(InvalidRequestError, match=f"{name} must be {accepted}, but is"):
            parse_sampling_params({name: value})
    for bound in map(int, re.findall(r"-?\d+", accepted)):
        value = [bound] if isinstance(wrong[0], list) else bound
        assert getattr(parse_sampling_params({name: value}), name) in (bound, (bound,))


def test_an_unknown_name_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(InvalidRequestError, match=r"'temprature'.*accepted are max_tokens, .*stop"):
        parse_sampling_params({"temprature": 1})


def test_what_triton_adds_is_passed_over() -> None:
    added = {"id": "7", "timeout": 5, "sequence_id": 0, "sequence_start": False}
    assert parse_sampling_params(added | {"priority": 0}) == SamplingParams()


@pytest.mark.parametrize("name", ["use_beam_search", "beam_width", "length_penalty"])
def test_beam_search_is_refused_by_its_name(name: str) -> None:
    says = f"^{name} = 4 is for beam search, which is not supported; .* best_of"
    with pytest.raises(NotSupportedError, match=says):
        parse_sampling_params({name: 4})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("use_beam_search", "true"),
        ("use_beam_search", [False]),
        ("num_beams", 2),
        ("length_penalty", 0.5),
        ("length_penalty", "much"),
        ("early_stopping", "never"),
    ],
)
def test_beam_search_is_refused_however_it_is_written(name: str, value: Any) -> None:
    with pytest.raises(NotSupportedError, match=f"^{name} = .* is for beam search"):
        parse_sampling_params({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", False),
        ("use_beam_search", "false"),
        ("use_beam_search", None),
        ("num_beams", 1),
        ("beam_width", "1"),
        ("length_penalty", 1),
        ("early_stopping", False),
    ],
)
def test_parameters_of_beam_search_that_ask_for_none_are_passed_over(name: str, value: Any) -> None:
    params = parse_sampling_params({name: value, "max_tokens": 3})
    assert params == SamplingParams(max_tokens=3)


@pytest.mark.parametrize("value", ["soon", -1, 1.5, None, [1], True])
def test_a_wrong_timeout_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        parse_timeout(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(PARAMETER_NAMES)), JSON, max_size=3))
def test_any_json_is_read_or_refused_and_never_worse(values: dict[str, Any]) -> None:
    try:
        params = parse_sampling_params(values)
    except CharoniaError as error:
        str(error).encode("utf-8", errors="strict")
    else:
        msgspec.msgpack.encode(params)


def test_what_triton_made_of_headers_is_left_out() -> None:
    parameters = {"X-Id": "7", "priority": "u=1, i", "timeout": "5", "top_p": "0.5", "max_token": 1}
    assert without_headers(parameters, lambda name: True) == {"timeout": "5", "top_p": "0.5"}
    assert without_headers(parameters, lambda name: name.startswith("X-")) == {
        name: value for name, value in parameters.items() if name != "X-Id"
    }


@pytest.mark.parametrize("name", ["X-Tenant", "x-tenant", "X-TENANT"])
def test_a_tenant_is_what_the_header_says_in_any_case(name: str) -> None:
    assert tenant_of_header({name: "search", "tenant": "other"}, "X-Tenant") == "search"


def test_without_the_header_there_is_no_tenant() -> None:
    assert tenant_of_header({"tenant": "other"}, "X-Tenant") == ""


@pytest.mark.parametrize("parameters", [{"x-tenant": "a", "X-Tenant": "a"}, {"x-tenant": 5}])
def test_a_header_that_cannot_be_trusted_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="the header X-Tenant"):
        tenant_of_header(parameters, "X-Tenant")
