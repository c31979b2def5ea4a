"""Lines as tritonserver 2.51.0 writes them."""

import datetime
import errno
import io
import json
import os
from typing import Any

import pytest

from charonia.events import Level
from charonia.launch.commands.log_printer import LogPrinter
from charonia.launch.server.logs import (
    as_record,
    crash_reason,
    failure_reason,
    is_interesting,
    severity,
)
from charonia.serving.hosts.model_process import headed

OURS = 'I1121 02:39:01.884703 6344 model.py:7] "weights: 40 % read"'
LOADING = 'I1121 02:39:00.049192 6344 model_lifecycle.cc:472] "loading: scheduler:1"'
LOAD_FAILURE = (
    "E1121 02:39:01.884703 6344 model_lifecycle.cc:642] \"failed to load 'engine' version 1: "
    "Internal: TritonModelException: tensor lm_head.weight is missing"
    '\\n\\nAt:\\n  /models/engine/1/model.py(19): initialize\\n"'
)
EXIT_TIMEOUT = 'E1121 02:39:39.339419 6769 main.cc:535] "failed to stop server: Exit timeout."'
NO_GPU = 'E1121 02:39:00.046573 6344 server.cc:241] "CudaDriverHelper has not been initialized."'


EVENT = """[scheduler] engine_load_failed retry_in=1 reason="failed to load 'engine' version 1" """


@pytest.mark.parametrize(
    "line", [OURS, EXIT_TIMEOUT, "Traceback (most recent call last):", EVENT.strip()]
)
def test_errors_and_what_python_says_are_interesting(line: str) -> None:
    assert is_interesting(line)


@pytest.mark.parametrize("line", [LOADING, LOAD_FAILURE, NO_GPU, "", "+-----+", "| a | b |"])
def test_tritons_own_progress_and_a_missing_gpu_are_not_interesting(line: str) -> None:
    assert not is_interesting(line)


def test_a_failed_load_is_the_reason_of_a_failed_start() -> None:
    lines = [NO_GPU, EXIT_TIMEOUT, LOAD_FAILURE]
    expected = "model 'engine' cannot be loaded: tensor lm_head.weight is missing"
    assert failure_reason(lines) == expected


def test_without_a_failed_load_the_first_error_is_the_reason() -> None:
    assert failure_reason([NO_GPU, LOADING, EXIT_TIMEOUT]) == "failed to stop server: Exit timeout."


def test_a_log_without_errors_gives_no_reason() -> None:
    assert failure_reason([OURS, LOADING, NO_GPU]) is None


def test_what_nobody_caught_is_the_reason_of_a_crash() -> None:
    lines = [
        "I1123 08:15:00.000000 1 python_be.cc:2249] TRITONBACKEND_ModelInstanceInitialize: a",
        "terminate called after throwing an instance of 'boost::interprocess::lock_exception'",
        "  what():  boost::interprocess::lock_exception",
        "Signal (6) received.",
    ]
    assert crash_reason(lines) == "boost::interprocess::lock_exception"
    assert crash_reason(lines[:1]) == ""


NOW = datetime.datetime(2026, 11, 27, 12, 0, 0, 250_000, tzinfo=datetime.UTC)
HEAD = {"time": "2026-11-27T12:00:00.250+00:00", "level": "info"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[scheduler] request_cancelled request_id=17 tenant=5 tokens=3 seconds=0.25",
            {
                "source": "scheduler",
                "event": "request_cancelled",
                "request_id": "17",
                "tenant": "5",
                "tokens": 3,
                "seconds": 0.25,
            },
        ),
        (
            'charonia: gateway_without_chats reason="no \\"x\\""',
            {"source": "charonia", "event": "gateway_without_chats", "reason": 'no "x"'},
        ),
        ("charonia: serving", {"source": "charonia", "message": "serving"}),
        (
            EXIT_TIMEOUT,
            {
                "level": "error",
                "source": "main.cc",
                "message": "failed to stop server: Exit timeout.",
            },
        ),
        (
            "Signal (6) received.",
            {"level": "error", "source": "server", "message": "Signal (6) received."},
        ),
        ("Signal (15) received.", {"source": "server", "message": "Signal (15) received."}),
        (
            "[engine] a b=007 c=1e+999 d=1.5",
            {"source": "engine", "event": "a", "b": "007", "c": "1e+999", "d": 1.5},
        ),
        ("[engine] a level=5 time=6", {"source": "engine", "event": "a"}),
        (
            "[scheduler] engine_died level=error kind=hung",
            {"level": "error", "source": "scheduler", "event": "engine_died", "kind": "hung"},
        ),
        (
            "charonia: request level=warning request_id=7 status=503",
            {
                "level": "warning",
                "source": "charonia",
                "event": "request",
                "request_id": "7",
                "status": 503,
            },
        ),
        (
            "[engine] warning: rank 1: it is slow",
            {"level": "warning", "source": "engine", "message": "rank 1: it is slow"},
        ),
        (
            "[scheduler] request_received level=debug trace_id=00000000000000000000000000000012 "
            "prompt=12",
            {
                "level": "debug",
                "source": "scheduler",
                "event": "request_received",
                "trace_id": "00000000000000000000000000000012",
                "prompt": "12",
            },
        ),
    ],
)
def test_a_line_is_an_object_of_what_it_says(line: str, expected: dict[str, Any]) -> None:
    assert as_record(line, NOW) == HEAD | expected


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (LOADING, "info"),
        (EXIT_TIMEOUT, "error"),
        (EXIT_TIMEOUT.replace("E1121", "W1121"), "warning"),
        (EXIT_TIMEOUT.replace("E1121", "F1121"), "error"),
        ("[scheduler] error: metrics could not be exported: Traceback", "error"),
        ("charonia: warning: no more", "warning"),
        ("charonia: it said warning: no", "info"),
        ("Signal (6) received.", "error"),
        ("Signal (15) received.", "info"),
        ("Fatal Python error: Segmentation fault", "error"),
    ],
)
def test_a_line_has_its_own_level_or_that_of_triton(line: str, level: str) -> None:
    assert severity(line) == level


def test_lines_below_the_level_are_not_printed() -> None:
    shown = io.StringIO()
    level: Level = "warning"
    printer = LogPrinter("text", shown, level=lambda: level)
    printer.line(LOADING)
    printer.say("serving")
    printer.line(EXIT_TIMEOUT)
    level = "debug"
    printer.line("[scheduler] request_ended level=debug tokens=3")
    assert shown.getvalue().splitlines() == [
        EXIT_TIMEOUT,
        "[scheduler] request_ended level=debug tokens=3",
    ]


def test_each_line_of_a_traceback_has_the_head_and_the_level_of_the_first() -> None:
    text = headed("engine", "error: it failed: Traceback\n  File x\nValueError\n")
    assert text.splitlines() == [
        "[engine] error: it failed: Traceback",
        "[engine] error:   File x",
        "[engine] error: ValueError",
    ]
    assert headed("engine", "two\nlines") == "[engine] two\n[engine] lines\n"


def test_lines_are_printed_as_they_are_or_as_json() -> None:
    shown, objects = io.StringIO(), io.StringIO()
    LogPrinter("text", shown).say("größer")
    LogPrinter("json", objects).say("größer")
    assert shown.getvalue() == "charonia: größer\n"
    found = json.loads(objects.getvalue())
    assert (found["source"], found["message"]) == ("charonia", "größer")
    assert datetime.datetime.fromisoformat(found["time"]).tzinfo is not None


def test_a_line_that_cannot_be_printed_is_lost_and_the_next_is_not() -> None:
    class FullDisk(io.StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

    shown = FullDisk()
    printer = LogPrinter("text", shown)
    printer.say("before")
    shown.is_full = False
    printer.say("after")
    assert shown.getvalue() == "charonia: after\n"
