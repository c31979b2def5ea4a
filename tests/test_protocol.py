"""The messages between the planes: what is in range can be sent, what is not is named."""

from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest

from charonia.errors import InvalidRequestError, NotSupportedError, shown
from charonia.protocol import (
    INT32_MAX,
    UINT64_MAX,
    CacheRange,
    NewRow,
    RowSampling,
    RowStep,
    SamplingParams,
    StepPlan,
    decode_reply,
    decode_request,
    encode,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", INT32_MAX + 1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 2**70),
        ("min_p", 1.1),
        ("seed", UINT64_MAX + 1),
        ("seed", -(2**63) - 1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logit_bias", {5: 101.0}),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ("a", "")),
        ("bad_words", ("",)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (1,) * 4097),
        ("deadline_ms", 0),
        ("deadline_ms", INT32_MAX + 1),
        ("cache_priority", 101),
        ("cache_priority", -1),
        ("cache_priority", tuple(CacheRange(start=i, end=i + 1) for i in range(33))),
        ("cache_ttl_s", 0.0),
        ("cache_ttl_s", float("nan")),
        ("cache_ttl_s", 5.0),  # of what
        ("priority", 2**31),
        ("priority", -(2**31)),
        ("n", 0),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ([CacheRange(start=-1)], "^start of cache_priority must be from 0 .* but is -1$"),
        ([CacheRange(start=2**31)], "^start of cache_priority must be from 0"),
        ([CacheRange(start=5, end=5)], r"^end of cache_priority .* above start \(5\) .* is 5$"),
        ([CacheRange(end=2**31)], "^end of cache_priority must be .* at most 2147483647"),
        ([CacheRange(priority=101)], "^priority of cache_priority must be from 0 to 100"),
        (
            [CacheRange(ttl_s=2e9)],
            "^ttl_s of cache_priority must be above 0 and at most 1000000000",
        ),
        (
            [CacheRange(start=4, end=9), CacheRange(end=5)],
            "^start of cache_priority must be behind the range before it, which ends at 5, .* is 4",
        ),
        ([CacheRange(), CacheRange(start=5)], "the range before it, which has no end, but is 5$"),
        ([5], "^each range of cache_priority must be a CacheRange or a dict with .*, but is 5$"),
        ([{"end": 5}], "^each range .* start, end, .* priority must be there, .* is {'end': 5}$"),
        ([{"priority": 5, "begin": 5}], "^each range of cache_priority must be a CacheRange or"),
        ([{"priority": "9"}], "^priority of cache_priority must be an integer, but is '9'$"),
        ([{"priority": 9, "end": True}], "^end of cache_priority must be an integer or None, but"),
    ],
)
def test_a_range_of_the_cache_that_cannot_be_is_named(ranges: list[CacheRange], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        SamplingParams(cache_priority=tuple(ranges))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"n": 0}, "^n must be from 1 to 128, but is 0$"),
        ({"n": 129}, "^n must be from 1 to 128, but is 129$"),
        ({"n": 3, "best_of": 2}, "^best_of must be from 3 to 128, but is 2$"),
        ({"best_of": 129}, "^best_of must be from 1 to 128, but is 129$"),
    ],
)
def test_a_number_of_samples_that_cannot_be_is_named(values: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        SamplingParams(**values)


def test_as_many_samples_are_generated_as_the_best_are_chosen_from() -> None:
    assert SamplingParams(n=3).num_samples == 3
    assert SamplingParams(n=3, best_of=5).num_samples == 5


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_one_string_is_not_taken_for_its_characters(name: str) -> None:
    assert getattr(SamplingParams(**{name: "ab"}), name) == ("ab",)


def test_ranges_of_the_cache_may_be_a_list_and_dicts() -> None:
    ranges = [CacheRange(end=16, priority=90), CacheRange(start=16, priority=0, ttl_s=5)]
    as_dicts = [{"end": 16, "priority": 90}, {"start": 16, "priority": 0, "ttl_s": 5}]
    for given in (ranges, as_dicts):
        assert SamplingParams(cache_priority=given).cache_priority == tuple(ranges)  # type: ignore[arg-type]


def test_allowed_tokens_are_all_or_at_least_one() -> None:
    assert SamplingParams().allowed_token_ids is None
    assert SamplingParams(allowed_token_ids=[7, 5]).allowed_token_ids == (7, 5)  # type: ignore[arg-type]
    says = "must be a list of at least one token id, or be left out, but is \\(\\)"
    with pytest.raises(InvalidRequestError, match=says):
        SamplingParams(allowed_token_ids=())
    with pytest.raises(InvalidRequestError, match="at most 4096 entries, but has 4097"):
        SamplingParams(allowed_token_ids=(1,) * 4097)


WRONG_TYPES: dict[Any, tuple[list[Any], str]] = {
    int: ([1.5, "4", True, None, [1], 2.0, [10**5000]], "an integer"),
    int | None: ([1.5, "4", True, [1]], "an integer or None"),
    float: (["0.5", True, None, [0.5], 10**400], "a number"),
    float | None: (["0.5", True, [0.5]], "a number or None"),
    bool: ([1, "true", None, []], "True or False"),
    str: ([5, None, b"a", ["a"], "\ud800"], "a string of valid Unicode"),
    tuple[str, ...]: (
        [5, None, [1], {"a": 1}, [None], "\ud800", ["a", "\udc80"]],
        "a string or a list of strings of valid Unicode",
    ),
    tuple[int, ...]: ([5, None, "12", [1.5], [True], ["1"]], "a list of integers"),
    tuple[int, ...] | None: ([5, "12", [1.5], [True], ["1"]], "a list of integers or None"),
    dict[int, float]: (
        [5, None, [1], {"1": 1.0}, {1: "x"}, {True: 1.0}],
        "a dict of token ids and numbers",
    ),
    int | tuple[CacheRange, ...] | None: (
        ["high", True, 1.5, {"priority": 5}],
        "an integer, a list of ranges or None",
    ),
}


@pytest.mark.parametrize(("name", "hint"), get_type_hints(SamplingParams).items())
def test_a_value_of_another_type_is_named_with_what_is_accepted(name: str, hint: Any) -> None:
    values, accepted = WRONG_TYPES[hint]
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value) == f"{name} must be {accepted}, but is {shown(value)}"


@pytest.mark.parametrize("name", ["start", "end", "priority", "ttl_s"])
def test_a_value_of_a_range_of_another_type_is_named(name: str) -> None:
    for value in ("5", True):
        with pytest.raises(InvalidRequestError, match=f"^{name} of cache_priority must be a"):
            CacheRange(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        seed=np.uint64(2**64 - 1),
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int32(5): np.float64(1.0)},  # type: ignore[dict-item]
    )
    read = SamplingParams(
        seed=2**64 - 1, temperature=0.5, stop_token_ids=(1, 2), logit_bias={5: 1.0}
    )
    assert params == read
    assert msgspec.msgpack.encode(params) == msgspec.msgpack.encode(read)


@pytest.mark.parametrize(
    ("name", "value"), [("use_beam_search", True), ("num_beams", 4), ("length_penalty", 0.5)]
)
def test_beam_search_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(
        NotSupportedError, match=f"^{name} = {value} is for beam search, .* best_of"
    ):
        SamplingParams(**{name: value})


def test_parameters_of_beam_search_that_ask_for_none_are_passed_over() -> None:
    none = {"use_beam_search": False, "beam_width": 1, "length_penalty": 1, "early_stopping": None}
    assert SamplingParams(n=2, **none) == SamplingParams(n=2)
    with pytest.raises(TypeError, match="'beams'"):
        SamplingParams(beams=1)  # type: ignore[call-arg]


def test_a_plan_of_extreme_values_comes_through() -> None:
    sampling = RowSampling(
        seed=UINT64_MAX,
        top_k=SamplingParams(top_k=INT32_MAX).top_k,
        min_tokens=SamplingParams(max_tokens=INT32_MAX, min_tokens=INT32_MAX).min_tokens,
        logit_bias={0: -100.0},
        allowed_ids=(INT32_MAX, 0),
    )
    plan = StepPlan(
        epoch=UINT64_MAX,
        step_id=0,
        reset=True,
        joins=[NewRow(0, [1, 2], 2, 0, [], sampling)],
        rows=[RowStep(0, 2, [7])],
    )
    assert decode_request(encode(plan)) == plan


@pytest.mark.parametrize("decode", [decode_request, decode_reply])
def test_text_that_is_not_utf_8_is_no_message(decode: Any) -> None:
    with pytest.raises(msgspec.DecodeError, match="not UTF-8"):
        decode(b"\x81\xa4type\xa1\x80")
