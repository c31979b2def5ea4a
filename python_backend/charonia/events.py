"""One log line per event, in a format that is easy to read, search and parse.

Owns that format. Knows nothing about which events there are, or where lines go.

    engine_died kind=hung reason="no answer of the engine within 30 s" live=16 restarts=3

The event's name comes first, then its fields. A value is a bare word, or a JSON string if a bare
word would be ambiguous. So a client's own text cannot end the line or look like a field.
"""

import json
import re
import threading
import time
from collections.abc import Callable

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
