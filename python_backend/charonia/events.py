"""One log line per event, in a format that is easy to read, search and parse.

Owns that format and the levels of lines. Knows nothing about which events there are, or where lines
go.

    engine_died level=error kind=hung reason="no answer of the engine within 30 s" live=16
    warning: max_model_len is lowered from 4096 to 2048

The event's name comes first, then its level unless that is "info", then its fields. A value is a
bare word, or a JSON string if a bare word would be ambiguous. So a client's own text cannot end the
line or look like a field. Other lines begin with their level, unless that is "info".
"""

import json
import re
import threading
import time
import traceback
from collections.abc import Callable
from typing import Literal

Level = Literal["error", "warning", "info", "debug"]
LEVELS: tuple[Level, ...] = ("error", "warning", "info", "debug")
"""Levels, from the fewest lines to the most: a level also shows the lines of those before it."""
_RANKS = {level: rank for rank, level in enumerate(LEVELS)}
_LEVEL = re.compile(r"(?:(error|warning|debug): |[a-z][a-z_]* level=(error|warning|debug)(?: |$))")
_BARE = re.compile(r"[\w.:/+-]+", re.ASCII)
_VALUE = r'"(?:[^"\\]|\\.)*"|[^\s"]\S*'
_EVENT = re.compile(rf"(?P<name>[a-z][a-z_]*)(?P<fields>(?: \w+=(?:{_VALUE}))+)")
_FIELD = re.compile(rf" (\w+)=({_VALUE})")


def event(name: str, /, **fields: object) -> str:
    """Format an event as a line; fields that are None are left out.

    Args:
        name: in snake case. fields: numbers, words or texts; times are in seconds.
    """
    return " ".join([name, *(f"{k}={_written(v)}" for k, v in fields.items() if v is not None)])


def error_event(name: str, /, **fields: object) -> str:
    """Make an `event` of level error, for requests that failed, or something that was lost."""
    return event(name, level="error", **fields)


def exception_event(name: str, /, **fields: object) -> str:
    """Make an `error_event` with the traceback of the exception that is being handled."""
    return error_event(name, **fields, traceback=traceback.format_exc())


def warning_event(name: str, /, **fields: object) -> str:
    """Make an `event` of level warning, for a part that does not work while requests go on."""
    return event(name, level="warning", **fields)


def debug_event(name: str, /, **fields: object) -> str:
    """Make an `event` of level debug, for a detail. Ask `Log.shows` before making one."""
    return event(name, level="debug", **fields)


def level_of(line: str) -> Level:
    """The level of a line."""
    found = _LEVEL.match(line)
    return "info" if found is None else found[1] or found[2]  # type: ignore[return-value]


def without_level(line: str) -> str:
    """A line without the level that it begins with; an event keeps its own."""
    found = _LEVEL.match(line)
    return line if found is None or found[1] is None else line[found.end() :]


def with_head(head: str, line: str) -> str:
    """A line with something in front, and its level before that."""
    level = level_of(line)
    return f"{'' if level == 'info' else f'{level}: '}{head}{without_level(line)}"


class Log:
    """Takes lines and passes on those that the present level shows. For any thread.

    Args:
        write: takes one line. level: returns the present level; asked for each line.
    """

    def __init__(self, write: Callable[[str], None], level: Callable[[], Level]) -> None:
        self._write = write
        self._level = level

    def __call__(self, line: str) -> None:
        """Pass a line on, or drop it."""
        if self.shows(level_of(line)):
            self._write(line)

    def shows(self, level: Level) -> bool:
        """Return whether lines of this level are passed on now."""
        return _RANKS[level] <= _RANKS[self._level()]


def parse_event(text: str) -> tuple[str, dict[str, str]] | None:
    """Return an event's name and its fields as texts; None if it is none, or has no field."""
    found = _EVENT.fullmatch(text)
    if found is None:
        return None
    try:
        fields = {
            name: json.loads(value) if value.startswith('"') else value
            for name, value in _FIELD.findall(found["fields"])
        }
    except ValueError:  # somebody else's line, that looks like one
        return None
    return found["name"], fields


def request_fields(
    *, request_id: str, key: str | None = None, tenant: str | None, trace_id: str | None = None
) -> dict[str, str | None]:
    """The fields by which a line says which request it concerns, the same in all processes.

    Args:
        request_id, tenant: empty or None if the request has none. key: unique among live requests.
        trace_id: of W3C's Trace Context.
    """
    return {
        "key": key,
        "request_id": request_id or None,
        "tenant": tenant or None,
        "trace_id": trace_id,
    }


def _written(value: object) -> str:
    text = f"{round(value, 3):g}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


class RareLog:
    """A rate-limited log, for lines that strangers can cause: at most one every `EVERY_S` seconds.

    The next line says how many were left out.

    Args:
        log: takes one line. clock: seconds, monotonic.
    """

    EVERY_S = 10.0
    MAX_CHARACTERS = 500

    def __init__(
        self, log: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until = clock()
        self._num_left_out = 0

    def __call__(self, line: str) -> None:
        """Log a line, cut to `MAX_CHARACTERS`, or count it."""
        with self._lock:
            now = self._clock()
            if now < self._quiet_until:
                self._num_left_out += 1
                return
            self._quiet_until = now + self.EVERY_S
            num, self._num_left_out = self._num_left_out, 0
        rest = f" ({num} more such lines were left out)" if num else ""
        self._log(line[: self.MAX_CHARACTERS] + rest)
