"""Prints the log of a server, for people or for programs.

Owns the two forms. Must not know which lines are shown.
"""

import datetime
import json
import sys
import threading
from typing import Literal, TextIO

from charonia.launch.server.logs import as_record

Format = Literal["text", "json"]
FORMATS: tuple[Format, ...] = ("text", "json")


class LogPrinter:
    """Prints lines to stderr, as they are or as one JSON object each. For several threads.

    Args:
        stream: None is stderr.
    """

    def __init__(self, form: Format, stream: TextIO | None = None) -> None:
        self._is_json = form == "json"
        self._stream = stream
        self._lock = threading.Lock()

    def line(self, line: str) -> None:
        """Print a line of the log."""
        if self._is_json:
            now = datetime.datetime.now(datetime.UTC)
            line = json.dumps(as_record(line, now), ensure_ascii=False)
        with self._lock:
            print(line, file=self._stream or sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self.line(f"charonia: {text}")
