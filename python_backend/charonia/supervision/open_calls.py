"""The number of calls that a process has not answered yet, readable even after it has ended.

Owns the shared memory with that number, on both sides: the process that answers the calls, and the
one that watches it. Must not know calls.

When a process is lost, Triton fails the requests that wait for it. It does not fail the calls that
the process was going to answer later through response senders: these end only with the server. So
the cost of a loss depends on whether there were such calls, which only the lost process knew. The
memory has no name in any file system, and exists as long as a process has it open.
"""

import contextlib
import os
from pathlib import Path

_NAME = "charonia-open-calls"
_NUM_BYTES = 8


class OpenCalls:
    """The open calls of this process."""

    def __init__(self) -> None:
        self._memory = os.memfd_create(_NAME)
        self.note(0)

    def note(self, count: int) -> None:
        """Set the number of open calls."""
        os.pwrite(self._memory, count.to_bytes(_NUM_BYTES, "little"), 0)


class OpenCallsOf:
    """The open calls of another process of this user, which must be alive at construction.

    Args:
        pid: of that process.
    """

    def __init__(self, pid: int) -> None:
        self._memory = _open(pid)

    @property
    def count(self) -> int:
        """The last number that it noted, even after its end; 0 if it notes none."""
        if self._memory is None:
            return 0
        return int.from_bytes(os.pread(self._memory, _NUM_BYTES, 0), "little")

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None


def _open(pid: int) -> int | None:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended
        return None
    for link in links:
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            if os.readlink(link).startswith(f"/memfd:{_NAME} "):
                return os.open(link, os.O_RDONLY)
    return None
