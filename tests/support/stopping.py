"""Stops processes as a debugger would, for tests of who notices."""

import contextlib
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
    eventually(lambda: _stands_still(pid), f"process {pid} stands still")


def _stands_still(pid: int) -> bool:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return bool(states) and all(state in "TtZX" for state in states)
