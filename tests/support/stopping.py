"""Stops processes as a debugger would, for tests of who notices."""

import os
import signal
from pathlib import Path

from support.waiting import eventually


def stop_process(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs any more.

    The signal stops one thread after the other: on a busy machine the last ones still answer for a
    while.
    """
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: not _running_threads(pid), f"process {pid} stands still")


def _running_threads(pid: int) -> list[str]:
    running = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        state = stat.read_text().rpartition(")")[2].split()[0]
        if state not in "TtZX":
            running.append(stat.parent.name)
    return running
