"""Prints the log of a server, for people or for programs.

Owns the two forms, and that only lines of the present level are printed. Must not know which of
these are shown.
"""

import contextlib
import datetime
import json
import sys
import threading
from collections.abc import Callable
from typing import Literal, TextIO

from charonia.events import LEVELS, Level
from charonia.launch.server.logs import as_record, severity
from charonia.log_level import DEFAULT

Format = Literal["text", "json"]
FORMATS: tuple[Format, ...] = ("text", "json")


class LogPrinter:
    """Prints lines to stderr, as they are or as one JSON object each. For several threads.

    Lines that cannot be printed, because of a full disk say, are lost. Nobody must fail with one:
    tritonserver stands still if its log is not read any more.

    Args:
        stream: None is stderr.

    Attributes:
        level: returns the present level.
    """

    def __init__(
        self,
        form: Format,
        stream: TextIO | None = None,
        *,
        level: Callable[[], Level] = lambda: DEFAULT,
    ) -> None:
        self.level = level
        self._is_json = form == "json"
        self._stream = stream
        self._lock = threading.Lock()

    def shows(self, level: Level) -> bool:
        """Return whether lines of this level are printed now."""
        return LEVELS.index(level) <= LEVELS.index(self.level())

    def line(self, line: str) -> None:
        """Print a line of the log, if the present level shows it."""
        if not self.shows(severity(line)):
            return
        if self._is_json:
            now = datetime.datetime.now(datetime.UTC)
            line = json.dumps(as_record(line, now), ensure_ascii=False)
        with self._lock, contextlib.suppress(OSError):
            print(line, file=self._stream or sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self.line(f"charonia: {text}")
