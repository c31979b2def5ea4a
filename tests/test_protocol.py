"""The messages between the planes: what is in range can be sent, what is not is named."""

from typing import Any

import msgspec
import pytest

from charonia.errors import InvalidRequestError, NotSupportedError
from charonia.protocol import (
    INT32_MAX,
    UINT64_MAX,
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
        ("priority", 2**31),
        ("priority", -(2**31)),
        ("n", 0),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("values", [{"n": 2}, {"best_of": 3}])
def test_what_is_not_supported_yet_says_so(values: dict[str, int]) -> None:
    with pytest.raises(NotSupportedError, match=next(iter(values))):
        SamplingParams(**values)


def test_one_stop_string_is_not_taken_for_its_characters() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]


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
