"""Finds what a run of the server left behind, and removes what runs of the tests did."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from charonia.launch.server.processes import SHARED_MEMORY
from charonia.launch.server.runtime_dir import living_runs, owner_of, sweep_stale_runs

PREFIX = "ch-tests-"
_NAME = re.compile(PREFIX + r"([0-9]{1,7})-[a-z0-9_]{8}")  # the process's number, and a random part


@contextlib.contextmanager
def temporary_directory(pid: int) -> Iterator[str]:
    """A directory for the temporary files of a process that runs tests.

    First what processes left that were killed is removed.
    """
    remove_leftovers()
    prefix = f"{PREFIX}{pid}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as directory:
        yield directory


def remove_leftovers() -> None:
    """Remove what test processes of this user left that were killed.

    That is their directories, the servers that still run there, and what these have in /dev/shm.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        match = _NAME.fullmatch(path.name)
        if match is None or psutil.pid_exists(int(match[1])):
            continue
        if path.stat().st_uid != os.getuid():
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(path))
            for launcher in filter(None, map(owner_of, living_runs())):
                launcher.kill()
                launcher.wait()
            sweep_stale_runs()
        shutil.rmtree(path, ignore_errors=True)


def leftovers(runtime_dir: Path) -> list[str]:
    """List what is left of a run: processes, shared memory, its directory."""
    files = [*SHARED_MEMORY.glob(f"{runtime_dir.name}*")]
    command_lines = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    processes = [
        " ".join(line) for line in command_lines if str(runtime_dir) in " ".join(line or [])
    ]
    directory = [str(runtime_dir)] if runtime_dir.exists() else []
    return [*map(str, files), *processes, *directory]
