"""Reads the log of tritonserver.

Owns the choice of lines that are shown, with and without `--verbose`, their form as JSON, and
finding the reason of a failed start. Must not know processes.
"""

import datetime
import math
import re
from collections.abc import Iterable
from typing import Any, Literal

from charonia.events import Level, level_of, parse_event, without_level

_LINE = re.compile(r"^(?P<severity>[IWEF])\d{4} \S+ \d+ (?P<source>[^:\]]+):\d+\] ?(?P<text>.*)$")
_OURS = re.compile(r"^\[(?P<source>[^\]\s]+)\] (?P<text>.*)$")
_LAUNCHER = "charonia: "
_LEVELS: dict[str, Level | Literal["fatal"]] = {
    "I": "info",
    "W": "warning",
    "E": "error",
    "F": "fatal",
}
_TEXTS = ("id", "key", "path", "prompt", "request_id", "tenant", "trace_id")
"""Fields of events that are texts, even if they look like numbers."""
_MAX_DIGITS = 24
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")
_CRASH = re.compile(
    r"Fatal Python error: |terminate called |  what\(\):  |Traceback \(most recent call last\)"
    r"|Signal \((?!15\))\d+\) received"
)
"""Beginnings of the lines of a process that crashes."""
_UNCAUGHT = re.compile(r"^  what\(\):  (?P<reason>.+)$")
_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)")

# Lines that every server logs on a machine without a GPU, and the tables of its start.
_NOISE = (
    "CUDA driver version is insufficient for CUDA runtime version",
    "no pinned memory pool",
    "CudaDriverHelper has not been initialized",
    "DCGM unable to start",
    "Failed to initialize NVML",
    "Signal (15) received.",
    # Of a failed start, which the launcher explains in one line (`failure_reason`).
    "Failed to create instance: TritonModelException",
    "failed to load '",
    "which has no loaded version",
    "error: creating server",
)
_USAGE = "Usage: tritonserver [options]"
_EXCEPTION = re.compile(
    r"^(?:Internal: )?(?:TritonModelException: )?(?P<text>.*?)(?:\\n\\nAt:.*)?$"
)


class UsageFilter:
    """Tells the list of options from the log of one tritonserver.

    It prints that for an option that it does not take: 400 lines, before the reason or behind it.
    """

    def __init__(self) -> None:
        self._is_inside = False

    def drops(self, line: str) -> bool:
        """Return whether the next line belongs to the list."""
        is_of_list = not line or line[0] in "\t " or line.endswith(":")
        self._is_inside = line == _USAGE or (self._is_inside and is_of_list)
        return self._is_inside


def is_interesting(line: str) -> bool:
    """Return whether a line is a warning, an error, or by a Python model (these are ours)."""
    if _OURS.match(line):
        return True  # even if it quotes Triton
    if any(noise in line for noise in _NOISE) or not line or line.startswith(("+-", "| ")):
        return False
    match = _LINE.match(line)
    return match is None or match["severity"] != "I" or match["source"].endswith(".py")


def failure_reason(lines: Iterable[str]) -> str | None:
    """The first reason in the log for a failed start, in one line; None if there is none."""
    first_error = None
    for line in lines:
        if failure := _LOAD_FAILURE.search(line):
            reason = _EXCEPTION.sub(r"\g<text>", failure["reason"].strip().rstrip('"'))
            return f"model {failure['model']!r} cannot be loaded: {reason}"
        match = _LINE.match(line)
        if match and match["severity"] in "EF" and is_interesting(line):
            first_error = first_error or match["text"].strip('"')
    return first_error


def crash_reason(lines: Iterable[str]) -> str:
    """The C++ library's message about an uncaught exception; empty if there is none."""
    return next((found["reason"] for line in lines if (found := _UNCAUGHT.match(line))), "")


def severity(line: str) -> Level:
    """The level of a line of the log; what ends a process is an error."""
    level, _, _ = _parts(line)
    return "error" if level == "fatal" else level


def _parts(line: str) -> tuple[Level | Literal["fatal"], str, str]:
    """Level, source and text of a line; the text of an event still has its level."""
    if found := _OURS.match(line):
        source, text = found["source"], found["text"]
    elif line.startswith(_LAUNCHER):
        source, text = "charonia", line.removeprefix(_LAUNCHER)
    elif found := _LINE.match(line):
        return _LEVELS[found["severity"]], found["source"], found["text"].strip('"')
    else:
        return "error" if _CRASH.match(line) else "info", "server", line
    return level_of(text), source, without_level(text)


def as_record(line: str, now: datetime.datetime) -> dict[str, Any]:
    """Return a line of the log as an object for JSON: `time`, `level`, `source`, and what it says.

    An event has its name as `event`, and its fields. Any other text is `message`.

    Args:
        line: tritonserver's, of a Python model (`[scheduler] …`) or the launcher's (`charonia: …`).
        now: when it came.
    """
    level, source, text = _parts(line)
    head = {"time": now.isoformat(timespec="milliseconds"), "level": level, "source": source}
    if (parsed := parse_event(text)) is None:
        return {**head, "message": text}
    name, fields = parsed
    shown = {key: _value(key, value) for key, value in fields.items() if key not in head}
    return {**head, "event": name, **shown}


def _value(key: str, text: str) -> str | float:
    if key in _TEXTS or not _NUMBER.fullmatch(text) or len(text) > _MAX_DIGITS:
        return text
    if set(text) & set(".e"):
        value = float(text)
        return value if math.isfinite(value) else text
    return int(text) if str(int(text)) == text else text
