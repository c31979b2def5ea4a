"""The level of a run's log, which its processes share and which can be changed meanwhile.

Owns the file of the level. Must not know who writes lines.

    charonia log-level ──► log-level, a file of the run ◄── each process, for each line and detail

A process looks at the file whenever it has something to say. So it needs no thread and no message,
and a process that is restarted has the present level. The path is in its environment.
"""

import contextlib
import os
from pathlib import Path

from charonia.events import LEVELS, Level

VARIABLE = "CHARONIA_LOG_LEVEL_FILE"
"""Environment variable with the path of the file, for the processes of a run."""
DEFAULT: Level = "info"
_BY_TEXT: dict[bytes, Level] = {level.encode(): level for level in LEVELS}
_MAX_BYTES = 16


def write_level(path: Path, level: Level) -> None:
    """Write the level, for all who read it at once; the file is made if there is none.

    Raises:
        OSError: it cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Always as many bytes, and in one call: a reader never sees a part.
        os.pwrite(file, level.encode().ljust(_MAX_BYTES - 1) + b"\n", 0)
    finally:
        os.close(file)


class LevelFile:
    """A reader of the file. The level is `DEFAULT` where the file names none.

    Args:
        path: of the file, which may be removed later. None always gives `DEFAULT`.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def of_environment(cls) -> "LevelFile":
        """The file of the run that this process belongs to, if it belongs to one."""
        with contextlib.suppress(KeyError, OSError):
            return cls(Path(os.environ[VARIABLE]))
        return cls(None)

    def read(self) -> Level:
        """The present level. This takes one system call and no lock."""
        if self._file is None:
            return DEFAULT
        return _BY_TEXT.get(os.pread(self._file, _MAX_BYTES, 0).strip(), DEFAULT)

    def close(self) -> None:
        """Close it; the level is `DEFAULT` then."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
