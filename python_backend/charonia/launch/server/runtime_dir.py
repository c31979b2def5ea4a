"""The directory of one run of the server.

Owns its path, its permissions, the operator's key in it, the prefix of the run's files in /dev/shm,
and removing what a killed launcher left behind. Must not know tritonserver.
"""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import psutil

from charonia.launch.server import processes
from charonia.log_level import DEFAULT, write_level

PREFIX = "charonia-"
OWNER_FILE = "owner.json"
KEY_FILE = "api-key"
SERVER_FILE = "server.json"
LOG_LEVEL_FILE = "log-level"
REPOSITORY = "repository"


class RuntimeDir:
    """A fresh directory that only this user can read, removed by `close`::

        /tmp/charonia-xxxxxxxx/   0700
          owner.json              the launcher's process, which lives as long as the run
          api-key                 0600, grants access to the restricted endpoints
          server.json             the addresses of its endpoints
          log-level               the present level of the log, see `log_level`
          requests-left           number of live requests while `charonia serve` drains
          backends/               links to the installation's backends
          repository/             the repository that Triton loads

    Attributes:
        path: of the directory. api_key: random, 256 bits, new for every run.
        shm_prefix: prefix of the names of this run's files in /dev/shm; unique to the run.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.shm_prefix = _shm_prefix(self.path)
        self.api_key = secrets.token_urlsafe(32)
        owner = {"pid": os.getpid(), "created": psutil.Process().create_time()}
        (self.path / OWNER_FILE).write_text(json.dumps(owner), encoding="utf-8")
        descriptor = os.open(self.path / KEY_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self.api_key + "\n")
        write_level(self.path / LOG_LEVEL_FILE, DEFAULT)

    def close(self) -> None:
        """Remove the directory and the run's files in /dev/shm."""
        processes.remove_shared_memory(self.shm_prefix)
        shutil.rmtree(self.path, ignore_errors=True)


def sweep_stale_runs() -> list[Path]:
    """Clean up after runs whose launcher was killed; returns their directories.

    tritonserver dies with its launcher, and its models' processes die with it. But a stopped
    process does not, and the files of the run remain.
    """
    swept = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            owner = json.loads((path / OWNER_FILE).read_text(encoding="utf-8"))
            if path.stat().st_uid != os.getuid() or _lives(owner["pid"], owner["created"]):
                continue
            processes.kill_by_argument(f"{path}/")
            processes.remove_shared_memory(_shm_prefix(path))
            shutil.rmtree(path)
            swept.append(path)
    return swept


def living_runs() -> list[Path]:
    """The directories of this user's active runs."""
    found = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            owner = json.loads((path / OWNER_FILE).read_text(encoding="utf-8"))
            if path.stat().st_uid == os.getuid() and _lives(owner["pid"], owner["created"]):
                found.append(path)
    return found


def owner_of(path: Path) -> psutil.Process | None:
    """The launcher of a run; None if it has ended."""
    with contextlib.suppress(OSError, ValueError, KeyError, psutil.NoSuchProcess):
        owner = json.loads((path / OWNER_FILE).read_text(encoding="utf-8"))
        if _lives(owner["pid"], owner["created"]):
            return psutil.Process(owner["pid"])
    return None


def _shm_prefix(path: Path) -> str:
    return f"{path.name}_"


def _lives(pid: int, created: float) -> bool:
    """Return whether a launcher runs. A zombie does not: its parent may never look after it."""
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
