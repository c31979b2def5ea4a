"""The process table: whether a process is there, and for how long it has been stopped.

Owns what the kernel says of a process. Must not know whose it is.
"""

import psutil


def status(pid: int) -> str | None:
    """As psutil names it, or None where there is no such process."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it. One that a debugger holds is not: that is a tracing stop."""
    return status(pid) == psutil.STATUS_STOPPED


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
