"""The process table: whether a process is there, since when, and for how long it has been stopped.

Owns what the kernel says of a process. Must not know whose it is.
"""

from pathlib import Path


def process_state(pid: int) -> str | None:
    """One letter, such as R, S or T (stopped); None when a process has ended."""
    stat = _stat(pid)
    return None if stat is None else stat[0]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it has ended."""
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on; None of a process that has ended, be it a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    values = text.rpartition(")")[2].split()
    return None if values[0] in "ZX" else values


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it. One that a debugger holds is not: that is a tracing stop."""
    return process_state(pid) == "T"


class Stops:
    """For how long processes have been stopped, as far as somebody has asked."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def seconds(self, pid: int, now: float) -> float:
        """Since a process was first found stopped; 0 for one that runs."""
        if not is_stopped(pid):
            self._since.pop(pid, None)
            return 0.0
        return now - self._since.setdefault(pid, now)
