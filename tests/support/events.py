"""Reads the log's lines of events, as whoever watches a server would.

Owns their shape from the reader's side. Must not know what writes them.
"""

import json
import re
from collections.abc import Iterable

_LINE = re.compile(
    r'(?:\[\S+\] |charonia: )?(?P<name>[a-z_]+)(?P<fields>(?: \w+=(?:"(?:[^"\\]|\\.)*"|\S+))+)'
)
_FIELD = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def parse_event(line: str) -> tuple[str, dict[str, str]] | None:
    """An event's name and fields, or None where a line is no event."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    fields = {}
    for name, value in _FIELD.findall(match["fields"]):
        fields[name] = json.loads(value) if value.startswith('"') else value
    return match["name"], fields


def events(lines: Iterable[str], name: str) -> list[dict[str, str]]:
    """The fields of all events of this name, in order."""
    parsed = (parse_event(line) for line in list(lines))
    return [event[1] for event in parsed if event is not None and event[0] == name]
