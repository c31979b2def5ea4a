"""A server's resources on the machine: processes, memory, shared memory, temporary files.

Owns how that is counted, and a directory that takes the temporary files of one campaign. Must not
know faults.
"""

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from charonia.launch.server.processes import SHARED_MEMORY, session_members
from charonia.launch.server.tritonserver import TritonServer


@dataclass(frozen=True)
class ProcessFootprint:
    """Resources of one process.

    Attributes:
        role: the model's name for its own process, else what it runs.
        created: time of its start, which tells it from another process with the same number.
    """

    role: str
    pid: int
    created: float
    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True)
class Footprint:
    """Resources of a server at one moment.

    Attributes:
        shm_bytes: in /dev/shm.
    """

    processes: Sequence[ProcessFootprint]
    shm_bytes: int

    @property
    def roles(self) -> dict[str, int]:
        """Number of processes, by role."""
        return dict(sorted(Counter(process.role for process in self.processes).items()))

    @property
    def rss_bytes(self) -> dict[str, int]:
        """Resident memory of all processes of a role together, by role."""
        sums: Counter[str] = Counter()
        for process in self.processes:
            sums[process.role] += process.rss_bytes
        return dict(sorted(sums.items()))


def processes_of(server: TritonServer) -> list[psutil.Process]:
    """tritonserver and all that it has started, and what these have, whatever their session."""
    members = session_members(server.pid) if server.pid is not None else []
    found = {process.pid: process for process in members}
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
    """Measure what a server holds now."""
    measured = []
    for process in processes_of(server):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            measured.append(_measure(process, server.repository))
    return Footprint(measured, _shm_bytes(server.runtime_dir.name))


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


def _measure(process: psutil.Process, repository: Path) -> ProcessFootprint:
    return ProcessFootprint(
        _role(process.cmdline(), repository),
        process.pid,
        process.create_time(),
        process.memory_info().rss,
        process.num_fds(),
        process.num_threads(),
    )


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
