"""Finds what a run of the server left behind, and removes what runs of the tests did."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from charonia.launch.processes import SHARED_MEMORY
from charonia.launch.runtime_dir import sweep_stale_runs

PREFIX = "tests-"


@contextlib.contextmanager
def temporary_directory(pid: int) -> Iterator[str]:
    """A directory for the temporary files of a process that runs tests.

    First what processes left that were killed is removed: their directories, and what their
    servers have in /dev/shm.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tempfile, "tempdir", str(path))
                sweep_stale_runs()
            shutil.rmtree(path, ignore_errors=True)
    prefix = f"{PREFIX}{pid}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as directory:
        yield directory


def leftovers(runtime_dir: Path) -> list[str]:
    """Whatever of a run is still there: processes, shared memory, its directory."""
    files = [*SHARED_MEMORY.glob(f"{runtime_dir.name}*")]
    command_lines = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    processes = [
        " ".join(line) for line in command_lines if str(runtime_dir) in " ".join(line or [])
    ]
    directory = [str(runtime_dir)] if runtime_dir.exists() else []
    return [*map(str, files), *processes, *directory]
