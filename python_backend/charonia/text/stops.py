"""Stop strings: finds where a text ends while it still arrives.

Owns the search, and holding back text that may be the beginning of a stop string. Knows nothing
about tokens: text arrives in portions, and a stop string may span any number of them. The caller
ends the request, see `core/output/outputs.py`.
"""

import re
from collections.abc import Sequence


class StopMatcher:
    """Passes a text on up to its first stop string.

    The first stop string is the one that is complete first, even if another one began before it. If
    several are complete with the same character, the longest counts. So the result does not depend
    on the portions.

    Args:
        stops: non-empty strings; without any, all text passes.
        include_stop: pass on the stop string, too.

    Attributes:
        stopped: whether a stop string was found; text after it is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        assert all(stops), "a stop string must not be empty"
        self._stops = tuple(stops)
        # Most portions contain no first character of a stop string, and pass at once.
        begins = "|".join({re.escape(stop[0]) for stop in stops})
        self._find_beginning = re.compile(begins or "(?!)").search
        self._include_stop = include_stop
        self._held = ""  # the longest end of the text so far that begins a stop string
        self.stopped = False

    def add(self, text: str) -> str:
        """Take the next portion and return the text that cannot be part of a stop string."""
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
        """End the text and return what was held back; it contains no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
