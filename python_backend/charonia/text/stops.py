"""Stop strings: finds where a text ends while it still arrives.

Owns the search, and holding back what may be the beginning of a stop string. Must not know
tokens: text comes in portions, and a stop string may lie across any number of them. The request is
ended by who asks, see `core/output/outputs.py`.
"""

import re
from collections.abc import Sequence


class StopMatcher:
    """Passes a text on up to its first stop string.

    The first one is the one that is complete first: it ends the text however long another one,
    begun before it, would still have to be waited for. Of those complete with the same character
    the longest counts. So the result does not depend on the portions.

    Args:
        stops: non-empty strings; none lets everything through.
        include_stop: the stop string itself is passed on too.

    Attributes:
        stopped: a stop string was found; what comes after it is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        assert all(stops), "a stop string must not be empty"
        self._stops = tuple(stops)
        # Most portions have no character that begins a stop string, and pass at once.
        begins = "|".join({re.escape(stop[0]) for stop in stops})
        self._find_beginning = re.compile(begins or "(?!)").search
        self._include_stop = include_stop
        self._held = ""  # the longest end of the text so far that begins a stop string
        self.stopped = False

    def add(self, text: str) -> str:
        """Take the next portion and return what cannot be part of a stop string any more."""
        if self.stopped:
            return ""
        text = self._held + text
        if self._find_beginning(text) is None:
            return text
        found = [(start + len(s), start) for s in self._stops if (start := text.find(s)) >= 0]
        if found:
            end, start = min(found)
            self.stopped = True
            self._held = ""
            return text[: end if self._include_stop else start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what was held back: the text has ended, nothing of it is a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`, but is not all of it."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
