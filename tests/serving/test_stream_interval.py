"""The interval of streams: how many tokens a response gathers, and what is not held back for it."""

from typing import Any

import pytest

from charonia.core.output.outputs import Chunk
from charonia.errors import (
    CharoniaError,
    RequestCancelledError,
    ShuttingDownError,
)
from charonia.serving.requests.sessions import (
    MAX_UNDER_WAY,
)
from support.sessions import AT_ONCE, STREAMING, Harness, chunk, texts
from support.waiting import eventually


def test_the_first_token_goes_at_once_and_others_by_the_interval(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder)
    for step in range(10):
        sink(chunk(step, is_last=step == 9))
        by_fours.settle(new_responder())
    assert [outputs["output_ids"] for outputs, _ in responder.sent] == [
        [0],
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9],
    ]
    assert texts(responder.sent) == "".join(f"{step} " for step in range(10))


def test_a_chunk_of_several_tokens_counts_as_many(by_fours: Harness, new_responder: Any) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder)
    for num_tokens in (3, 3, 2, 1, 7):
        sink(Chunk("k", text="a", token_ids=(1,) * num_tokens))
        by_fours.settle(new_responder())
    assert [len(outputs["output_ids"]) for outputs, _ in responder.sent] == [3, 5, 8]


@pytest.mark.parametrize(
    "error", [None, RequestCancelledError("the request was cancelled"), ShuttingDownError()]
)
def test_the_interval_holds_no_end_back(
    by_fours: Harness, new_responder: Any, error: CharoniaError | None
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder)
    for step in range(3):
        sink(chunk(step))
        by_fours.settle(new_responder())
    assert texts(responder.sent) == "0 "
    sink(chunk(3, is_last=True) if error is None else Chunk("k", error=error))
    eventually(lambda: responder.failures or responder.sent[-1][1])
    assert texts(responder.sent) == ("0 1 2 3 " if error is None else "0 1 2 ")
    assert responder.failures == ([] if error is None else [error])


def test_each_sample_has_an_interval_a_first_token_and_an_end_of_its_own(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder, num_samples=2)
    for text in "aababababab":
        index = "ab".index(text)
        sink(Chunk("k", text=text, token_ids=(index,), index=index, num_open=1))
        by_fours.settle(new_responder())
    sink(Chunk("k", finish_reason="cancelled", index=0, num_open=1))
    by_fours.settle(new_responder())
    assert [outputs["text_output"] for outputs, _ in responder.sent] == [
        ["a", ""],
        ["a", "b"],  # the first of the second one, with what there is
        ["aaaa", "bbb"],
        ["", "b"],
    ]


def test_what_has_no_token_does_not_take_the_place_of_the_first_one(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", STREAMING, str, responder, num_samples=2)
    sink(Chunk("k", text="-", index=1, num_open=2))
    for index in (0, 1):
        sink(Chunk("k", text="ab"[index], token_ids=(index,), index=index, num_open=2))
        by_fours.settle(new_responder())
    assert [outputs["text_output"] for outputs, _ in responder.sent] == [["a", "-"], ["", "b"]]


def test_a_whole_answer_is_one_response_with_any_interval(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    sink = by_fours.open("k", AT_ONCE, str, responder)
    for step in range(6):
        sink(chunk(step, is_last=step == 5))
        by_fours.settle(new_responder())
    assert [outputs["output_ids"] for outputs, _ in responder.sent] == [list(range(6))]


def test_few_responses_are_under_way_with_any_interval(
    by_fours: Harness, new_responder: Any
) -> None:
    responder = new_responder()
    responder.is_acknowledged = True
    sink = by_fours.open("k", STREAMING, str, responder)
    for step in range(40):
        sink(chunk(step))
        by_fours.settle(new_responder())
        assert len(responder.sent) == min(1 + step // 4, MAX_UNDER_WAY)
    by_fours.sessions.acknowledge("k", MAX_UNDER_WAY)
    eventually(lambda: len(responder.sent) == 1 + MAX_UNDER_WAY)
    assert texts(responder.sent) == "".join(f"{step} " for step in range(40))
