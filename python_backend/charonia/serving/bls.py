"""The engine in another Triton model, as an Executor over BLS.

Owns the calls, their time limits, and bringing a dead engine back. Must not know what is in a plan.

Time and processes: BLS works in `execute` and, once the server is up, in threads. While it starts,
a BLS call errs harmlessly, but model control from a thread can take the server down; so nothing
but BLS is tried before the first answer of an engine.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np

from charonia.errors import EngineDiedError, StepFailedError
from charonia.protocol import (
    EngineInfo,
    EngineReply,
    EngineRequest,
    Hello,
    Pending,
    StepFailure,
    StepPlan,
    StepResult,
    decode_reply,
    encode,
)

PLAN = "plan"
REPLY = "reply"
NOT_EXPLICIT = (
    "the engine died, and recovery is off: tritonserver was not started with "
    "--model-control-mode=explicit"
)
_REFUSES_CONTROL = "explicit model load / unload is not allowed"
_HELLO_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 10.0
_READY_TIMEOUT_S = 60.0
_PROBE_MODEL = "charonia-no-such-model"


class _Call:
    """One BLS call: made in the caller's thread of the moment, waited for with a time limit."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._outcome: SimpleQueue[EngineReply | Exception] = SimpleQueue()

    def finish(self, outcome: EngineReply | Exception) -> None:
        self._outcome.put(outcome)

    def reply(self, timeout: float | None) -> EngineReply:
        """Raises TimeoutError, or what the call raised."""
        try:
            outcome = self._outcome.get(timeout=timeout)
        except Empty:
            raise TimeoutError(f"no answer of the engine within {timeout:g} s") from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def result(self, timeout: float | None) -> StepResult:
        """As `Pending.result`."""
        reply = self.reply(timeout)
        if isinstance(reply, StepFailure):
            raise StepFailedError(reply.message)
        if not isinstance(reply, StepResult):
            raise StepFailedError(f"the engine answered a plan with {type(reply).__name__}")
        return reply


class BlsExecutor:
    """The engine model of the same Triton.

    Args:
        engine_model: its name. secret: what it takes plans by.
        log: takes one line, from any thread.
    """

    def __init__(
        self, pb_utils: Any, engine_model: str, secret: str, *, log: Callable[[str], None]
    ) -> None:
        self._pb_utils = pb_utils
        self._engine_model = engine_model
        self._secret = secret
        self._log = log
        self._processes: dict[int, int] = {}
        self._has_checked_control = False
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._start_thread()

    def info(self) -> EngineInfo:
        """Ask the engine what it is, and remember its processes.

        Raises:
            EngineDiedError: there is none (yet), or it does not answer.
        """
        call = _Call(Hello(secret=self._secret))
        self._calls.put(call)
        try:
            reply = call.reply(_HELLO_TIMEOUT_S)
        except (TimeoutError, StepFailedError) as error:
            self._start_thread()
            raise EngineDiedError(str(error)) from None
        if not isinstance(reply, EngineInfo):
            raise EngineDiedError(f"the engine answered a hello with {type(reply).__name__}")
        self._processes = {pid: start_time(pid) or 0 for pid in reply.pids}
        if not self._has_checked_control:
            self._check_control()
        return reply

    def submit(self, plan: StepPlan) -> Pending:
        """Start a step in the calling thread's stead."""
        call = _Call(msgspec.structs.replace(plan, secret=self._secret))
        self._calls.put(call)
        return call

    def restart(self) -> None:
        """Kill the old engine's processes, unload its model and load it again.

        Raises:
            EngineDiedError: it cannot be loaded, or Triton is not in explicit model control.
        """
        self._start_thread()  # the old one may hang in a call until the engine is gone
        kill_processes(self._processes)
        self._processes = {}
        try:
            self._pb_utils.unload_model(self._engine_model)
            self._pb_utils.load_model(self._engine_model)
        except Exception as error:
            reason = NOT_EXPLICIT if _REFUSES_CONTROL in str(error) else clean(str(error))
            raise EngineDiedError(reason) from None
        self._wait_ready()

    def close(self) -> None:
        """Stop the thread; the engine stays."""
        self._calls.put(None)

    def _check_control(self) -> None:
        """Find out whether `restart` will be possible, by a request that changes nothing."""
        self._has_checked_control = True
        try:
            self._pb_utils.unload_model(_PROBE_MODEL)
        except Exception as error:
            if _REFUSES_CONTROL in str(error):
                self._log(f"WARNING: if the engine dies, {NOT_EXPLICIT.split(', and ')[1]}")

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._pb_utils.is_model_ready(self._engine_model):
            if time.monotonic() > deadline:
                raise EngineDiedError(f"the engine was not ready within {_READY_TIMEOUT_S:g} s")
            time.sleep(0.02)

    # ------------------------------------------------------------------ the thread

    def _start_thread(self) -> None:
        """Start a thread that makes calls; an older one ends after the call that it is in."""
        self._calls.put(None)
        self._calls = SimpleQueue()
        threading.Thread(
            target=self._run, args=(self._calls,), name="charonia-bls", daemon=True
        ).start()

    def _run(self, calls: "SimpleQueue[_Call | None]") -> None:
        while (call := calls.get()) is not None:
            try:
                call.finish(self._exchange(call.request))
            except Exception as error:
                call.finish(error)

    def _exchange(self, request: EngineRequest) -> EngineReply:
        pb_utils = self._pb_utils
        plan = pb_utils.Tensor(PLAN, np.frombuffer(encode(request), dtype=np.uint8))
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._engine_model, requested_output_names=[REPLY], inputs=[plan]
            ).exec()
        except pb_utils.TritonModelException as error:
            raise EngineDiedError(clean(str(error))) from None
        if response.has_error():
            failure = response.error()
            is_refusal = failure.code() == pb_utils.TritonError.INVALID_ARG
            raise (StepFailedError if is_refusal else EngineDiedError)(clean(failure.message()))
        reply = pb_utils.get_output_tensor_by_name(response, REPLY)
        return decode_reply(reply.as_numpy().tobytes())


def clean(message: str) -> str:
    """Triton's message without the traceback and the server's paths that it may carry."""
    message = re.split(r"\n+(?:At:|Traceback)", message)[0]
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*", "…", message).strip()


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def kill_processes(processes: dict[int, int]) -> None:
    """SIGKILL processes, given as pid and start time, and wait until they have ended.

    A pid that belongs to another process by now is left alone.

    Raises:
        EngineDiedError: one does not end.
    """
    living = {pid for pid, started in processes.items() if start_time(pid) == started}
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while living := {pid for pid in living if start_time(pid) == processes[pid]}:
        if time.monotonic() > deadline:
            raise EngineDiedError(f"{len(living)} processes of the engine do not end")
        time.sleep(0.005)
