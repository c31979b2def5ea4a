"""The engine as one of Triton's models: whether it is loaded, and having another one loaded.

Owns what Triton is asked for, and when, and the end of the processes that are left of an engine.
Must not know plans, how an engine is spoken to, or how a model is loaded.

Triton is asked over BLS, with a request that lacks its input: that is refused before it gets into
the model's queue, so the answer waits neither for the engine nor behind anybody's requests. BLS
works in `execute` and, once the model is loaded, in threads; its errors are harmless, and so are
answers without tensors. The tensors of an answer are made without holding Python's lock (2.51.0),
so in a process with threads every such answer may corrupt the heap; measured, a process with three
threads dies after some thousand calls.

A server that is shutting down is asked for nothing.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from charonia.errors import (
    EngineDiedError,
    EngineUnloadedError,
    ServerStartingError,
    ServerStoppingError,
    split_answer,
)
from charonia.protocol import EngineInfo
from charonia.serving.liveness import UNLOADED, start_time

ANSWER = "answer"
"""The engine model's output, which nobody gets."""
RELOAD_MARK = "reload.mark"
_KILL_TIMEOUT_S = 10.0
_IS_LOADED = "missing required input"
"""What Triton says to a request without inputs for a model that is loaded."""
_IS_NOT_LOADED = "is not ready"
_TAKES_NO_CALLS = ("Server not ready", "BLS is only supported during")
"""What it says of all models while it shuts down, and before it has started; and its Python backend
to a model that is being unloaded."""


class ModelControl(Protocol):
    """Loads and unloads models of this Triton; each call waits until it has.

    Attributes:
        refusal: why it does not; None where it does.
    """

    refusal: str | None

    def load(self, model: str) -> None:
        """Any exception says that it is not loaded."""

    def unload(self, model: str) -> None:
        """Any exception says that it may still be loaded."""

    def close(self) -> None:
        """End the call under way, if there is one, with an error."""


class EngineModel:
    """The engine's model in the Triton that this process belongs to.

    Args:
        name: of the model. directory: its version directory.
        control: loads and unloads it.

    Attributes:
        has_server_started: whether it is known to take calls, or to have taken some: one that
            refuses them then is shutting down.
    """

    def __init__(self, pb_utils: Any, name: str, directory: Path, control: ModelControl) -> None:
        self._pb_utils = pb_utils
        self._name = name
        self._control = control
        self._mark = directory / RELOAD_MARK
        self.has_server_started = False

    def check_loaded(self) -> None:
        """Ask whether it is loaded.

        Raises:
            EngineUnloadedError: it is not. ServerStoppingError: no model is, any more.
            ServerStartingError: the server takes no calls before it has loaded all its models.
            EngineDiedError: there is no such model.
        """
        pb_utils = self._pb_utils
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._name, requested_output_names=[ANSWER], inputs=[]
            ).exec()
            text = response.error().message()
        except pb_utils.TritonModelException as error:
            text = str(error)
        if any(words in text for words in _TAKES_NO_CALLS):
            if not self.has_server_started:
                raise ServerStartingError("the server has not started yet")
            raise ServerStoppingError("the server takes no calls")
        self.has_server_started = True
        if _IS_NOT_LOADED in text:
            raise EngineUnloadedError(UNLOADED)  # its farewell may still be to come
        if _IS_LOADED not in text:
            raise EngineDiedError(clean(text))

    def check_server(self) -> None:
        """Ask whether the server works.

        Raises:
            ServerStoppingError, ServerStartingError: it does not, any more or yet; whatever it is
                asked for now it will refuse.
        """
        try:
            self.check_loaded()
        except (ServerStoppingError, ServerStartingError):
            raise
        except EngineDiedError:
            pass  # of the engine, not of the server

    def replace(self, processes: dict[int, int], reach: Callable[[], EngineInfo]) -> EngineInfo:
        """Kill what is left of the engine, unload its model and load it again.

        Args:
            processes: of the old engine, see `kill_processes`.
            reach: connects to the new one; where that is an EngineDiedError, it is unloaded.

        Raises:
            EngineDiedError: it cannot be loaded, or Triton loads nothing on a model's order.
            ServerStoppingError, ServerStartingError: nothing can be loaded any more, or yet.
        """
        if self._control.refusal is not None:
            raise EngineDiedError(self._control.refusal)
        self.check_server()
        kill_processes(processes)
        own_pid = os.getpid()
        try:
            self._mark.write_text(f"{own_pid} {start_time(own_pid)}", encoding="ascii")
            self._control.unload(self._name)
            self.check_server()
            self._control.load(self._name)
            return self._reach(reach)
        except EngineDiedError:
            raise
        except Exception as error:
            raise EngineDiedError(clean(str(error))) from None
        finally:
            # One that stays says nothing once this process has gone.
            with contextlib.suppress(OSError):
                self._mark.unlink(missing_ok=True)

    def _reach(self, reach: Callable[[], EngineInfo]) -> EngineInfo:
        try:
            return reach()
        except EngineDiedError:
            self.check_server()
            self._control.unload(self._name)
            raise


def is_reload(engine_dir: Path) -> bool:
    """Whether a living scheduler is loading the engine of this directory again."""
    try:
        pid, started = (engine_dir / RELOAD_MARK).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False
    return str(start_time(int(pid))) == started


def clean(message: str) -> str:
    """Triton's message without the traceback, the paths and the kind that it may carry."""
    message, _ = split_answer(re.split(r"\n+(?:At:|Traceback)", message)[0])
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*", "…", message).strip()


def kill_processes(processes: dict[int, int]) -> None:
    """SIGKILL processes, given as pid and start time, and wait until they have ended.

    A pid that belongs to another process by now is left alone.

    Raises:
        EngineDiedError: one does not end.
    """
    living = {pid for pid, started in processes.items() if start_time(pid) == started}
    for pid in living:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while living := {pid for pid in living if start_time(pid) == processes[pid]}:
        if time.monotonic() > deadline:
            raise EngineDiedError(f"{len(living)} processes of the engine do not end")
        time.sleep(0.005)
