"""The process table: whether a process exists, its start time, and how long it has been stopped.

Owns reading what the kernel says of a process. Must not know what the process is for.
"""

from pathlib import Path


def process_state(pid: int) -> str | None:
    """The state as a letter, such as R, S or T (stopped); None if the process has ended."""
    stat = _stat(pid)
    return None if stat is None else stat[0]


def start_time(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None if it has ended."""
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None for a process that ended or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    values = text.rpartition(")")[2].split()
    return None if values[0] in "ZX" else values


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped it. A tracing stop, by a debugger, does not count."""
    return process_state(pid) == "T"


class Stops:
    """Times for which processes have been stopped, from the first call that found them so."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def seconds(self, pid: int, now: float) -> float:
        """Seconds since a process was first found stopped; 0 if it is not stopped."""
        if not is_stopped(pid):
            self._since.pop(pid, None)
            return 0.0
        return now - self._since.setdefault(pid, now)
