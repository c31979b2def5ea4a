"""How many calls of a process are still to be answered, told beyond its end.

Owns the memory where that number is, and both its ends: the process that answers calls later, and
whoever watches it. Must not know calls.

Triton ends what waits for a lost process with an error, but not the calls that the process meant
to answer later through its response senders: these end with the server alone. So what a loss costs
depends on whether there were any, and only the lost process knew. The memory has no name in any
file system, and lives as long as somebody has it open.
"""

import contextlib
import os
from pathlib import Path

_NAME = "charonia-open-calls"
_NUM_BYTES = 8


class OpenCalls:
    """Of this process."""

    def __init__(self) -> None:
        self._memory = os.memfd_create(_NAME)
        self.note(0)

    def note(self, count: int) -> None:
        """So many are open now."""
        os.pwrite(self._memory, count.to_bytes(_NUM_BYTES, "little"), 0)


class OpenCallsOf:
    """Of another process of this user, which must live when this is made.

    Args:
        pid: its.
    """

    def __init__(self, pid: int) -> None:
        self._memory = _open(pid)

    @property
    def count(self) -> int:
        """The last number it noted, also after its end; 0 of a process that notes none."""
        if self._memory is None:
            return 0
        return int.from_bytes(os.pread(self._memory, _NUM_BYTES, 0), "little")

    def close(self) -> None:
        """Let go of the memory."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None


def _open(pid: int) -> int | None:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended
        return None
    for link in links:
        with contextlib.suppress(OSError):  # it was closed meanwhile, as others are all the time
            if os.readlink(link).startswith(f"/memfd:{_NAME} "):
                return os.open(link, os.O_RDONLY)
    return None
