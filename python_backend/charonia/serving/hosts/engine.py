"""The engine model: takes plans from the scheduler and has a Runner execute them.

Owns the answers, and how exceptions become answers. Must not know the contents of a plan, nor
torch: a function that is passed in makes the runner.

All messages go through a socket that only processes of the same user can open. Clients can address
the model `engine`, too, but its config.pbtxt declares an input that is larger than any request, so
Triton refuses each one.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from charonia.config import EngineArgs
from charonia.core.inline import PlanRunner
from charonia.errors import CharoniaError, ConfigError, PlanRefusedError, UnavailableError
from charonia.events import error_event, warning_event
from charonia.protocol import (
    EngineReply,
    EngineRequest,
    Hello,
    ShutdownNotice,
    StepFailure,
    StepPlan,
    decode_request,
    encode,
)
from charonia.serving.hosts.cores import has_core_to_itself, take_engine_cores
from charonia.serving.messages.executor import STEPS_SOCKET
from charonia.serving.messages.reload import restore
from charonia.sockets.answering import Answer, answer_each, answer_overlapping
from charonia.sockets.connection import Connection
from charonia.sockets.local import is_same_user, listen
from charonia.sockets.server import Server
from charonia.supervision.models.repairs import is_loaded_by_scheduler

MODEL_FILE = "model.json"
_SPIN_S = 1e-3
"""Time for which an engine with a core of its own spins for the next step, in seconds: about twice
the gap between two steps of a busy engine."""
_ENDING_TIMEOUT_S = 20.0
"""Timeout of a reset's wait for earlier steps, in seconds; less than the scheduler's timeout."""
NOT_ENDED = "steps that began earlier have not ended"


class _OpenSteps:
    """Counts the steps in progress, of all connections."""

    def __init__(self) -> None:
        self._num = 0
        self._changed = threading.Condition()

    def change(self, num: int) -> None:
        """Count steps that have begun or, with a negative number, ended."""
        with self._changed:
            self._num += num
            self._changed.notify_all()

    def wait_for_none(self, timeout: float) -> bool:
        """Wait until all have ended; False if they do not within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num == 0, timeout)


class EngineHost:
    """One engine behind Triton.

    A reload that the last server did not finish is undone first, see `reload`.

    Args:
        make_runner: loads the engine.
        version_dir: the model's version directory, with model.json and the socket.
        instance_kind: Triton's, e.g. "MODEL". log: takes one line.

    Raises:
        ConfigError, CheckpointError: the engine cannot be loaded as configured.
        UnavailableError: a reload failed for any other reason. Clients see only its type; the log
            has the details.
    """

    def __init__(
        self,
        make_runner: Callable[[EngineArgs], PlanRunner],
        version_dir: Path,
        instance_kind: str,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._log = log
        self._version_dir = version_dir
        self._server: Server | None = None
        self._one_step_at_a_time = threading.Lock()
        self._open_steps = _OpenSteps()
        self._is_pipelined = False  # whether steps may overlap
        if not is_loaded_by_scheduler(version_dir) and restore(version_dir / MODEL_FILE):
            log(warning_event("engine_reload_undone"))
        try:
            check_instance_kind(version_dir / MODEL_FILE, instance_kind)
            take_engine_cores()
            self._runner = make_runner(EngineArgs.from_file(version_dir / MODEL_FILE, log))
        except Exception as error:
            if not is_loaded_by_scheduler(version_dir):
                raise
            log(error_event("load_failed", reason=f"{type(error).__name__}: {error}"))
            if isinstance(error, CharoniaError):
                raise
            log(f"error: {traceback.format_exc()}")
            raise UnavailableError(type(error).__name__) from None

    def serve_steps(self) -> None:
        """Answer the scheduler's messages through the socket until `finalize`.

        Raises:
            ConfigError: the socket cannot be made in the model's directory.
        """
        self._is_pipelined = self._runner.info().num_stages > 1
        path = self._version_dir / STEPS_SOCKET
        try:
            listener = listen(path)
        except OSError as error:
            raise ConfigError(
                f"the engine's directory must take a socket, {path.name}: {error.strerror}"
            ) from None
        self._server = Server(listener, is_same_user, self._serve, log=self._log)
        self._server.start()

    def finalize(self) -> None:
        """Stop taking messages through the socket, and end the other ranks."""
        if self._server is not None:
            self._server.close(notice=encode(ShutdownNotice()))
        self._runner.close()

    def _serve(self, connection: Connection) -> None:
        answer = answer_overlapping if self._is_pipelined else answer_each
        answer(connection, self._begin_answer, spin=_SPIN_S if has_core_to_itself() else 0.0)

    def _begin_answer(self, data: bytes) -> Answer | None:
        """Begin to answer a message; None if it cannot be decoded."""
        try:
            message = decode_request(data)
        except msgspec.DecodeError as error:
            self._log(f"error: a message could not be read: {type(error).__name__}")
            return None
        return self._begin(message)

    def _begin(self, message: EngineRequest) -> Answer:
        if isinstance(message, Hello):
            info = encode(self._runner.info())
            return lambda: info
        assert isinstance(message, StepPlan)
        with self._one_step_at_a_time:
            # Steps of a closed connection may still run, and would write into the new rows.
            if message.reset and not self._open_steps.wait_for_none(_ENDING_TIMEOUT_S):
                self._log(error_event("step_failed", reason=NOT_ENDED))
                failure = encode(StepFailure(NOT_ENDED))
                return lambda: failure
            end = self._begin_step(message)
            if self._is_pipelined:
                return lambda: encode(end())
            reply = encode(end())
        return lambda: reply

    def _begin_step(self, plan: StepPlan) -> Callable[[], EngineReply]:
        """Begin a step. An exception, now or at its end, becomes its result."""
        try:
            end = self._runner.begin(plan)
        except Exception as error:
            failure = self._failure(error)
            return lambda: failure
        self._open_steps.change(1)

        def end_or_fail() -> EngineReply:
            try:
                return end()
            except Exception as error:
                return self._failure(error)
            finally:
                self._open_steps.change(-1)

        return end_or_fail

    def _failure(self, error: Exception) -> StepFailure:
        """Log the failure of a step and make its answer."""
        if isinstance(error, PlanRefusedError):
            # An answer, because a closed connection would look like a dead engine.
            self._log(f"error: refused: {error}")
            return StepFailure(f"the plan was refused: {error}")
        self._log(error_event("step_failed", reason=f"{type(error).__name__}: {error}"))
        self._log(f"error: {''.join(traceback.format_exception(error))}")
        return StepFailure(f"{type(error).__name__} in a step of the engine")


def end_process(reason: str) -> None:
    """Kill this engine at once, because it has lost a rank. The scheduler loads a new one.

    The ranks that it started end with it.
    """
    os.kill(os.getpid(), signal.SIGKILL)


def check_instance_kind(model_file: Path, instance_kind: str) -> None:
    """Refuse one Triton instance per GPU for an engine that starts its own ranks.

    Raises:
        ConfigError: several ranks with KIND_GPU.
    """
    try:
        values: Mapping[str, Any] = msgspec.json.decode(model_file.read_bytes(), type=dict)
    except (OSError, ValueError, RecursionError):  # msgspec lets UnicodeDecodeError through
        return  # EngineArgs reports it better
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = values.get(name, 1)
        if instance_kind == "GPU" and isinstance(size, int) and size > 1:
            raise ConfigError(
                f"{name} is {size}, but the engine's instance group is KIND_GPU: "
                "please specify KIND_MODEL in the engine's config.pbtxt"
            )
