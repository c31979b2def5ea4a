"""Errors tell their kind, in words that programs and people read alike."""

from pathlib import Path

import pytest

from charonia.errors import (
    KINDS,
    CharoniaError,
    ExactTextError,
    InvalidRequestError,
    LateRequestError,
    error_of,
    shown,
    split_answer,
)

README = Path(__file__).parents[1] / "model_repository" / "README.md"


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_says_what_it_is_and_can_be_taken_apart_again(kind: str) -> None:
    error = KINDS[kind]("no\nmore")
    assert error.answer == f"no\nmore [charonia:{kind}]"
    assert split_answer(error.answer) == ("no\nmore", kind)
    again = error_of(*split_answer(error.answer))
    assert (type(again), str(again)) == (type(error), "no\nmore")


def test_a_value_that_looks_like_a_kind_is_followed_by_the_real_one() -> None:
    error = InvalidRequestError("no such value: [charonia:queue_full]")
    message, kind = split_answer(error.answer)
    assert kind == "invalid_request"
    assert message == str(error)


def test_a_text_without_a_kind_is_nobodys() -> None:
    assert split_answer("Server not ready") == ("Server not ready", None)
    assert split_answer("[charonia:timeout] it said") == ("[charonia:timeout] it said", None)
    assert type(error_of("boom", None)) is type(error_of("boom", "moonstruck")) is CharoniaError


def test_an_exact_text_stays_exact() -> None:
    assert ExactTextError("Not allowed.").answer == "Not allowed."
    assert KINDS["invalid_request"] is InvalidRequestError


def again(error: type[CharoniaError]) -> str:
    if error is LateRequestError:
        return "where it says when"
    return "yes" if error.is_retryable else "no"


def test_the_readme_lists_every_kind() -> None:
    rows = [
        f"| `{kind}` | {error.code} | {(error.__doc__ or '').splitlines()[0]} | {again(error)} |"
        for kind, error in KINDS.items()
    ]
    text = README.read_text(encoding="utf-8")
    assert "\n".join(["| --- | --- | --- | --- |", *rows, ""]) in text


def test_a_value_that_has_no_text_is_shown_by_its_type() -> None:
    nested: list[object] = []
    for _ in range(10_000):
        nested = [nested]
    assert shown(nested) == "a list that is nested too deeply to show"
    assert shown(10**5000) == "a value of type int that is too long to show"
