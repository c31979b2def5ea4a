"""Lines of events: one line each, and read back as they were written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.events import event, parse_event


def test_an_event_is_its_name_and_its_fields_in_order():
    line = event("engine_died", kind="hung", live=16, seconds=1.23456, reason=TimeoutError("a b"))
    assert line == 'engine_died kind=hung live=16 seconds=1.235 reason="a b"'


def test_a_field_that_is_none_is_left_out():
    assert event("engine_back", seconds=2.0, reason=None) == "engine_back seconds=2"


@pytest.mark.parametrize("text", ["", " ", 'say "a"', "a=b", "two\nlines", "\x1b[31m", "\u2028"])
def test_what_would_be_misread_is_quoted(text):
    line = event("request_cancelled", request_id=text, tokens=1)
    assert line.isprintable()
    assert line.splitlines() == [line]
    assert parse_event(line) == ("request_cancelled", {"request_id": text, "tokens": "1"})


@given(st.text())
def test_any_text_is_read_back_and_stays_one_field(text):
    line = event("request_cancelled", request_id=text, tokens=1)
    assert parse_event(line) == ("request_cancelled", {"request_id": text, "tokens": "1"})


@pytest.mark.parametrize(
    "line",
    [
        "",
        "stopped",
        "loading weights: 40 % of 0.5 MiB",
        'a b="\\x"',
        "a b=",
        "A b=c",
        'a b="c"d e=f',
    ],
)
def test_other_lines_are_no_events(line):
    assert parse_event(line) is None
