"""One line per event, in one shape that is easy to read, to search and to parse.

Owns that shape. Must not know which events there are, or where lines go.

    engine_died kind=hung reason="no answer of the engine within 30 s" live=16 restarts=3

The event's name comes first, then its fields. A value is a bare word, or a JSON string where a word
would be misread; so a client's own text cannot end the line or pass for a field.
"""

import json
import re

_BARE = re.compile(r"[\w.:/+-]+", re.ASCII)


def event(name: str, /, **fields: object) -> str:
    """Write an event as a line; fields that are None are left out.

    Args:
        name: in snake case. fields: numbers, words or texts; times are in seconds.
    """
    return " ".join([name, *(f"{k}={_written(v)}" for k, v in fields.items() if v is not None)])


def _written(value: object) -> str:
    text = f"{round(value, 3):g}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
