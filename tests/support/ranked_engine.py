"""An engine of several ranks, as tests see it: started, driven by hand-written steps, and ended.

Owns finding its processes. Must not know what is tested of it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

from charonia.config import EngineArgs
from charonia.data.runner import Runner
from charonia.launch.server.processes import ReservedPorts
from charonia.parallel.engine import load_engine
from charonia.protocol import RowStep, StepResult
from parity.driver import Driver, blocks_for, new_row
from support.waiting import WAIT_S

_reserved: list[ReservedPorts] = []


def rank_args(model_dir: Path, **values: Any) -> EngineArgs:
    """A small engine of two ranks on CPUs, of which none is lost for being slow."""
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "cpu_threads": 1,
        "cpu_binding": "none",
        "tensor_parallel_size": 2,
        "rank_timeout_s": WAIT_S,
        "num_gpu_blocks_override": 32,
        "max_num_seqs": 4,
    }
    return EngineArgs.from_dict({"model": str(model_dir), **(defaults | values)})


class RankedEngine:
    """An engine and what it says.

    Attributes:
        pids: of all its ranks; the first is this process.
        lost: reasons that it gave for a lost rank. log: its lines.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.log: list[str] = []
        self.runner: Runner = load_engine(args, log=self.log.append, on_lost=self.lost.put)
        self.pids = self.runner.info().pids
        self.start_over()

    def start_over(self) -> None:
        """Begin a new epoch with the next step."""
        self._driver = Driver(self.runner)
        self._has_row = False

    def step(self, prompt: list[int]) -> StepResult:
        """Compute a prompt by itself and sample one token."""
        row = new_row(0, prompt, blocks_for(len(prompt) + 1))
        leaves = (0,) if self._has_row else ()
        self._has_row = True
        return self._driver.execute(RowStep(0, len(prompt)), joins=(row,), leaves=leaves)


@contextmanager
def ranked_engine(args: EngineArgs) -> Iterator[RankedEngine]:
    """Start an engine; whatever happens to it, its ranks end."""
    engine = RankedEngine(args)
    try:
        yield engine
    finally:
        engine.runner.close()


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_address(host: str = "127.0.0.1") -> str:
    """A host and a port at which nobody listens on this machine, nor will but who is told of it."""
    _reserved.append(ReservedPorts("127.0.0.1", 1))
    return f"{host}:{_reserved[-1].ports[0]}"


def descriptors() -> dict[int, str]:
    """This process's open sockets and files that have no name."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # that of the directory itself
            continue
        if target.startswith(("socket:", "/memfd:")):
            found[int(entry.name)] = target
    return found


def listening_ports() -> set[int]:
    """Ports at which this process listens."""
    connections = psutil.Process().net_connections(kind="inet")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
