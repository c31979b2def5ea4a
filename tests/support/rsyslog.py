"""A real rsyslog that ships a log, with charonia's own configuration.

Owns that process and what it has shipped. Must not know what is logged.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIGURATION = Path(__file__).parents[2] / "docker" / "logs" / "rsyslog.conf"
PLACES = ("/var/log/charonia", "/var/spool/rsyslog")
"""Folders of the configuration's files."""
PROGRAM = os.environ.get("RSYSLOGD") or shutil.which("rsyslogd", path=f"{os.defpath}:/usr/sbin")


class Rsyslog:
    """A running one.

    Args:
        folder: with the logs to ship, *.log, and what is shipped.
    """

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        configuration = folder / "rsyslog.conf"
        text = CONFIGURATION.read_text(encoding="utf-8")
        for place in PLACES:
            assert place in text
            text = text.replace(place, str(folder))
        configuration.write_text(text, encoding="utf-8")
        self._shipped = folder / "shipped.jsonl"
        self._output = (folder / "rsyslog.output").open("w")
        self._process = subprocess.Popen(
            [PROGRAM, "-n", "-f", str(configuration), "-i", str(folder / "rsyslog.pid")],
            cwd=folder,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def records(self) -> list[dict[str, Any]]:
        """Return the records that it has shipped so far."""
        assert self._process.poll() is None, self._output.name
        if not self._shipped.exists():
            return []
        text = self._shipped.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._output.close()


@contextlib.contextmanager
def running_rsyslog(folder: Path) -> Iterator[Rsyslog]:
    """An rsyslog that ships the logs of this folder."""
    with contextlib.closing(Rsyslog(folder)) as found:
        yield found
