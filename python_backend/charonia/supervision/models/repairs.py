"""Repairs a lost engine from the scheduler's process: kills its processes, loads its model again.

Owns the order of these steps, and killing the processes that are left of an engine. Must not know
plans, the protocol of an engine, or how a model is loaded (`model_control`).

It does nothing while the server is shutting down.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from charonia.errors import EngineDiedError
from charonia.protocol import EngineInfo
from charonia.supervision.models.probes import Readiness, clean
from charonia.supervision.process_table import start_time

LOAD_MARK = "load.mark"
"""File in the engine's directory. During each load that a scheduler makes, a repair or a reload, it
holds the pid and the start time of the scheduler's process."""
_MARK_BYTES = 64
_KILL_TIMEOUT_S = 10.0


class ModelLoader(Protocol):
    """Loads and unloads models of this Triton; each call waits until it is done.

    Attributes:
        refusal: why it cannot; None if it can.
    """

    refusal: str | None

    def load(self, model: str) -> None:
        """Load a model. Any exception means that it is not loaded."""

    def unload(self, model: str) -> None:
        """Unload a model. Any exception means that it may still be loaded."""

    def close(self) -> None:
        """Make a call in progress fail."""


class EngineModel:
    """The engine's model, in the Triton that this process belongs to.

    Args:
        readiness: asks for the state of the model. directory: the model's version directory.
        control: loads and unloads the model.
    """

    def __init__(self, readiness: Readiness, directory: Path, control: ModelLoader) -> None:
        self._name = readiness.model
        self._readiness = readiness
        self._control = control
        self._mark = directory / LOAD_MARK
        with contextlib.suppress(OSError):  # it is made when it is needed, then
            if not self._mark.exists():
                self._write_mark("")

    def close(self) -> None:
        """Remove the mark, unless a scheduler is loading the engine: there may be another one."""
        if not is_loaded_by_scheduler(self._mark.parent):
            with contextlib.suppress(OSError):
                self._mark.unlink(missing_ok=True)

    def replace(self, processes: dict[int, int], reach: Callable[[], EngineInfo]) -> EngineInfo:
        """Kill what is left of the engine, unload its model and load it again.

        Args:
            processes: of the old engine, see `kill_processes`.
            reach: connects to the new engine; if it raises EngineDiedError, the model is unloaded.

        Raises:
            EngineDiedError: the model cannot be loaded, or this server's model control is not
                usable.
            ServerStoppingError, ServerStartingError: the server is shutting down, or has not
                started yet.
        """
        if self._control.refusal is not None:
            raise EngineDiedError(self._control.refusal)
        self._readiness.check_server()
        kill_processes(processes)
        own_pid = os.getpid()
        try:
            self._write_mark(f"{own_pid} {start_time(own_pid)}")
            self._control.unload(self._name)
            self._readiness.check_server()
            self._control.load(self._name)
            return self._reach(reach)
        except EngineDiedError:
            raise
        except Exception as error:
            raise EngineDiedError(clean(str(error))) from None
        finally:
            # A mark that is left behind has no effect once this process has ended.
            with contextlib.suppress(OSError):
                self._write_mark("")

    def _write_mark(self, text: str) -> None:
        """Write the mark in its place, which works on a full disk, too, where there is one."""
        file = os.open(self._mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, text.encode().ljust(_MARK_BYTES), 0)
        finally:
            os.close(file)

    def _reach(self, reach: Callable[[], EngineInfo]) -> EngineInfo:
        try:
            return reach()
        except EngineDiedError:
            self._readiness.check_server()
            self._control.unload(self._name)
            raise


def is_loaded_by_scheduler(engine_dir: Path) -> bool:
    """Return whether a running scheduler is loading the engine of this directory."""
    try:
        pid, started = (engine_dir / LOAD_MARK).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False
    return str(start_time(int(pid))) == started


def kill_processes(processes: dict[int, int]) -> None:
    """SIGKILL processes, given as pid and start time, and wait until they have ended.

    A pid that was reused by another process is left alone.

    Raises:
        EngineDiedError: a process does not end.
    """
    living = {pid for pid, started in processes.items() if start_time(pid) == started}
    for pid in living:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while living := {pid for pid in living if start_time(pid) == processes[pid]}:
        if time.monotonic() > deadline:
            raise EngineDiedError(f"{len(living)} processes of the engine do not end")
        time.sleep(0.005)
