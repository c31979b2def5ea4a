"""Reads the log's lines of events, as whoever watches a server would.

Owns which lines these are. Must not know what writes them.
"""

import re
from collections.abc import Iterable

from charonia import events as written

_HEAD = re.compile(r"^(?:\[\S+\] |charonia: )")


def events(lines: Iterable[str], name: str) -> list[dict[str, str]]:
    """The fields of all events of this name, in order, without their level."""
    parsed = (written.parse_event(_HEAD.sub("", line)) for line in list(lines))
    found = [event[1] for event in parsed if event is not None and event[0] == name]
    return [{key: value for key, value in one.items() if key != "level"} for one in found]
