"""What a server holds of the machine: processes, shared memory, temporary files.

Owns how that is counted, and a directory that takes the temporary files of one campaign. Must not
know faults.
"""

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from charonia.launch.processes import SHARED_MEMORY, session_members
from charonia.launch.server import TritonServer


@dataclass(frozen=True)
class Footprint:
    """At one moment.

    Attributes:
        processes: how many there are, by role.
        shm_bytes: in /dev/shm, of this server.
        scheduler_rss_bytes, scheduler_fds, scheduler_threads: of its process; 0 if there is none.
    """

    processes: dict[str, int]
    shm_bytes: int
    scheduler_rss_bytes: int
    scheduler_fds: int
    scheduler_threads: int


def processes_of(server: TritonServer) -> list[psutil.Process]:
    """tritonserver and all that it has started, and what these have, whatever their session."""
    assert server.pid is not None, "the server is not running"
    found = {process.pid: process for process in session_members(server.pid)}
    for process in list(found.values()):
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in process.children(recursive=True):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found[child.pid] = child
    return list(found.values())


def ranks_of(server: TritonServer) -> list[psutil.Process]:
    """The engine's process, then its descendants in the order in which they were started."""
    engines = server.model_processes("engine")
    descendants = [child for engine in engines for child in engine.children(recursive=True)]
    return [*engines, *sorted(descendants, key=lambda process: process.create_time())]


def take_footprint(server: TritonServer) -> Footprint:
    """Count what a server holds now."""
    schedulers = server.model_processes("scheduler")
    return Footprint(
        processes=_roles(server),
        shm_bytes=_shm_bytes(server.runtime_dir.name),
        scheduler_rss_bytes=sum(process.memory_info().rss for process in schedulers),
        scheduler_fds=sum(process.num_fds() for process in schedulers),
        scheduler_threads=sum(process.num_threads() for process in schedulers),
    )


@contextlib.contextmanager
def own_temporary_directory() -> Iterator[Path]:
    """A directory in which this process and those that it starts make their temporary files.

    It is removed at the end, with what is still in it.
    """
    directory = Path(tempfile.mkdtemp(prefix="faults-"))
    before, inherited = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(directory)
    try:
        yield directory
    finally:
        tempfile.tempdir = before
        del os.environ["TMPDIR"]
        if inherited is not None:
            os.environ["TMPDIR"] = inherited
        shutil.rmtree(directory, ignore_errors=True)


def _roles(server: TritonServer) -> dict[str, int]:
    roles: Counter[str] = Counter()
    for process in processes_of(server):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            roles[_role(process.cmdline(), server.repository)] += 1
    return dict(sorted(roles.items()))


def _role(command: list[str], repository: Path) -> str:
    """A model's name for its own process, else the program and, of Python, what it runs."""
    for argument in command:
        path = Path(argument)
        if argument.endswith(".py") and repository in path.parents:
            return path.relative_to(repository).parts[0]
    program = Path(command[0]).name if command else "?"
    if "-m" in command[:-1]:
        return f"{program} -m {command[command.index('-m') + 1]}"
    return program


def _shm_bytes(prefix: str) -> int:
    total = 0
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total
