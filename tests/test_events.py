"""Lines of events: one line each, and read back as they were written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.events import (
    LEVELS,
    Level,
    Log,
    debug_event,
    error_event,
    event,
    level_of,
    parse_event,
    request_fields,
    warning_event,
    with_head,
    without_level,
)


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


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (error_event("engine_died", kind="hung"), "error"),
        (warning_event("recovery_off"), "warning"),
        (event("engine_back", seconds=2.0), "info"),
        (debug_event("request_received", tokens=3), "debug"),
        ("warning: it is slow", "warning"),
        ("error: metrics could not be exported: Traceback", "error"),
        ("serving", "info"),
        ("it said warning: no", "info"),
        (event("a", reason="b level=error"), "info"),
        (event("degradation", level=2), "info"),
    ],
)
def test_a_line_has_one_level(line: str, level: Level) -> None:
    assert level_of(line) == level


def test_the_level_of_an_event_comes_before_its_fields_and_stays_with_it() -> None:
    line = error_event("engine_died", kind="hung")
    assert line == "engine_died level=error kind=hung"
    assert without_level(line) == line
    assert without_level("warning: it is slow") == "it is slow"


def test_a_head_stands_behind_the_level() -> None:
    assert with_head("rank 1: ", "joined") == "rank 1: joined"
    assert with_head("rank 1: ", "warning: it is slow") == "warning: rank 1: it is slow"
    assert level_of(with_head("rank 1: ", error_event("rank_lost", reason="x"))) == "error"


@pytest.mark.parametrize("level", LEVELS)
def test_a_log_passes_on_its_level_and_those_that_are_worse(level: Level) -> None:
    lines: list[str] = []
    log = Log(lines.append, lambda: level)
    for line in ("error: a", "warning: a", "a", debug_event("a", b=1)):
        log(line)
    assert [level_of(line) for line in lines] == list(LEVELS[: LEVELS.index(level) + 1])
    assert [one for one in LEVELS if log.shows(one)] == [level_of(line) for line in lines]


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_what_a_request_does_not_have_is_no_field() -> None:
    assert event("a", **request_fields(request_id="", tenant="")) == "a"
    fields = request_fields(request_id="7", key="k", tenant="t", trace_id=TRACE_ID)
    assert event("a", **fields) == f"a key=k request_id=7 tenant=t trace_id={TRACE_ID}"
