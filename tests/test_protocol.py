"""The messages between the planes: what is in range can be sent, what is not is named."""

from typing import Any

import msgspec
import pytest

from charonia.errors import InvalidRequestError, NotSupportedError
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
        (
            [{"priority": 9}],
            "^range of cache_priority must be a CacheRange, but is {'priority': 9}$",
        ),
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


def test_one_stop_string_is_not_taken_for_its_characters() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]


def test_ranges_of_the_cache_may_be_a_list() -> None:
    ranges = [CacheRange(end=16, priority=90), CacheRange(start=16, priority=0)]
    params = SamplingParams(cache_priority=ranges)  # type: ignore[arg-type]
    assert params.cache_priority == tuple(ranges)


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
