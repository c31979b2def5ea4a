"""The engine in another Triton model, as an Executor: messages by socket, its life by BLS.

Owns the calls, their time limits, and bringing a dead engine back. Must not know what is in a plan.

    submit() ──► socket ──► engine ──► socket ──► result()      every step, see `channel`
                                                     │ nothing for a second
    a hello over BLS: Triton says whether the engine's process lives ◄──┘
    (while nothing is to be computed, the socket's end is looked at, and a hello said now and then)

BLS works in `execute` and, once the model is loaded, in threads; its errors are harmless, and so
are answers without tensors (`channel` says what the others do). Model control is not: each call
of `pb_utils` that fails has a chance of taking the whole server down (seen after 3 to 26 of them,
on 2.51.0). So nothing is asked for that may be refused: whether control is explicit is read from
the server's command line, and an engine that is loaded *again* comes up even when it cannot work,
says why in answer to a hello, and is unloaded.
"""

import contextlib
import math
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

from charonia.connection import Channel
from charonia.errors import EngineDiedError, EngineHungError, EngineUnloadedError, StepFailedError
from charonia.events import event
from charonia.protocol import (
    EngineInfo,
    EngineReply,
    Farewell,
    Hello,
    Pending,
    StepFailure,
    StepPlan,
    StepResult,
    decode_reply,
    encode,
)
from charonia.serving.channel import SOCKET_SUFFIX, connect
from charonia.serving.secret import FILE_NAME, read_or_create

PLAN = "plan"
REPLY = "reply"
RECOVERY_IS_OFF = "recovery is off: tritonserver was not started with --model-control-mode=explicit"
UNLOADED = "the engine was unloaded"
HUNG_UP = "the engine's process has hung up"
RELOAD_MARK = "reload.mark"
STEPS_SOCKET = f"steps{SOCKET_SUFFIX}"
_CONTROL_OPTION = "--model-control-mode"
_HELLO_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 10.0
_ASK_AFTER_S = 1.0
_LAST_WORDS_TIMEOUT_S = 2.0
_ASK_IDLE_EVERY_S = 3.0
"""A hello takes 0.4 ms of tritonserver's time."""

_Answer = SimpleQueue[EngineDiedError | None]
"""Where the answer to a hello goes: what is wrong, or None."""


class _Step:
    """A step that was sent to the engine through the socket."""

    def __init__(
        self, executor: "BlsExecutor", channel: Channel, failure: EngineDiedError | None
    ) -> None:
        self._executor = executor
        self._channel = channel
        self._failure = failure

    def result(self, timeout: float | None) -> StepResult:
        """As `Pending.result`. A stopped engine is noticed by asking after it over BLS."""
        if self._failure is not None:
            raise _last_words(self._channel) or self._failure
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            wait = min(deadline - time.monotonic(), _ASK_AFTER_S)
            try:
                data = self._channel.receive(max(wait, 1e-3))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no answer of the engine within {timeout:g} s") from None
                self._executor.ask_alive()
                continue
            if data is None:
                raise EngineDiedError(HUNG_UP)
            reply = _decode(data)
            if isinstance(reply, StepFailure):
                raise StepFailedError(reply.message)
            if isinstance(reply, Farewell):
                raise EngineUnloadedError(UNLOADED)
            if not isinstance(reply, StepResult):
                raise StepFailedError(f"the engine answered a plan with {type(reply).__name__}")
            return reply


class BlsExecutor:
    """The engine model of the same Triton.

    Args:
        engine_model: its name. engine_dir: its version directory.
        log: takes one line, from any thread.

    Raises:
        ConfigError: the secret can be neither read nor made.
    """

    def __init__(
        self,
        pb_utils: Any,
        engine_model: str,
        engine_dir: Path,
        *,
        log: Callable[[str], None],
    ) -> None:
        self._log = log
        self._last_complaint = ""
        self._pb_utils = pb_utils
        self._engine_model = engine_model
        self._engine_dir = engine_dir
        self._channel: Channel | None = None
        self._reload_mark = engine_dir / RELOAD_MARK
        self._secret = read_or_create(engine_dir / FILE_NAME)
        self._processes: dict[int, int] = {}
        self._ask_idle_at = 0.0
        self._can_restart = has_explicit_control(_command_line(os.getppid()))
        if not self._can_restart:
            log(event("recovery_off", reason=RECOVERY_IS_OFF))
        self._hellos: SimpleQueue[_Answer | None] = SimpleQueue()
        self._start_thread()

    @property
    def can_restart(self) -> bool:
        """Whether Triton lets an engine be replaced."""
        return self._can_restart

    def info(self) -> EngineInfo:
        """Ask the engine what it is, remember its processes, and connect to it.

        Raises:
            EngineDiedError: there is none, or it does not answer.
            EngineUnloadedError: it is not loaded (yet).
        """
        self._disconnect()
        channel = self._connect()
        try:
            self.ask_alive()
        except EngineDiedError:
            channel.close()
            raise
        try:
            channel.send(encode(Hello(secret=self._secret)), _HELLO_TIMEOUT_S)
            data = channel.receive(_HELLO_TIMEOUT_S)
            reply = None if data is None else _decode(data)
        except (OSError, StepFailedError) as error:
            channel.close()
            raise self._unreachable(f"no answer through its socket: {error}") from None
        if not isinstance(reply, EngineInfo):
            channel.close()
            raise self._unreachable(f"it answered a hello with {type(reply).__name__}")
        self._channel = channel
        self._processes = {pid: start_time(pid) or 0 for pid in reply.pids}
        return reply

    def _connect(self) -> Channel:
        """Connect to the engine; where nobody is at its socket, Triton says why: as `info`."""
        path = self._engine_dir / STEPS_SOCKET
        try:
            return connect(path)
        except OSError:
            self.ask_alive()
        try:
            return connect(path)  # it has come meanwhile
        except OSError as error:
            raise self._unreachable(f"{path.name} in its directory: {error.strerror}") from None

    def ask_alive(self) -> None:
        """Have Triton say whether the engine's process lives.

        Raises:
            EngineDiedError: it does not, or (EngineHungError) it does not answer, or
                (EngineUnloadedError) Triton has been told to unload it.
        """
        answer: _Answer = SimpleQueue()
        self._hellos.put(answer)
        try:
            error = answer.get(timeout=_HELLO_TIMEOUT_S)
        except Empty:
            self._start_thread()
            text = f"no answer of the engine within {_HELLO_TIMEOUT_S:g} s"
            raise EngineHungError(text) from None
        if error is None:
            return
        if f"Model '{self._engine_model}' is not ready" in str(error):
            raise EngineUnloadedError(UNLOADED)  # its farewell is still to come
        raise EngineHungError(str(error)) if self._lives() else error

    def check(self) -> None:
        """As `Executor.check`: its socket tells of its end, a hello every few seconds of a hang.

        Raises:
            EngineDiedError: it has gone, or does not answer.
            EngineUnloadedError: Triton has unloaded it, or has another one in its place.
        """
        channel = self._channel
        if channel is None or not channel.is_quiet():
            raise (channel and _last_words(channel)) or EngineDiedError(HUNG_UP)
        if time.monotonic() >= self._ask_idle_at:
            self.ask_alive()
            self._ask_idle_at = time.monotonic() + _ASK_IDLE_EVERY_S

    def submit(self, plan: StepPlan) -> Pending:
        """Send a plan; the engine computes while the caller goes on."""
        channel = self._channel
        assert channel is not None, "submit() before info()"
        failure: EngineDiedError | None = None
        try:
            message = encode(msgspec.structs.replace(plan, secret=self._secret))
            channel.send(message, _SEND_TIMEOUT_S)
        except TimeoutError:
            failure = EngineHungError(f"the engine takes no plan within {_SEND_TIMEOUT_S:g} s")
        except OSError as error:
            failure = EngineDiedError(f"the engine takes no plan: {error.strerror or error}")
        return _Step(self, channel, failure)

    def restart(self) -> None:
        """Kill the old engine's processes, unload its model and load it again.

        Raises:
            EngineDiedError: it cannot be loaded, or Triton is not in explicit model control.
        """
        if not self._can_restart:
            raise EngineDiedError(RECOVERY_IS_OFF)
        self._start_thread()  # the old one may hang in a call until the engine is gone
        self._disconnect()
        kill_processes(self._processes)
        self._processes = {}
        own_pid = os.getpid()
        try:
            self._reload_mark.write_text(f"{own_pid} {start_time(own_pid)}", encoding="ascii")
            self._pb_utils.unload_model(self._engine_model)
            self._pb_utils.load_model(self._engine_model)
            self._say_hello()
        except Exception as error:
            raise EngineDiedError(clean(str(error))) from None
        finally:
            # One that stays says nothing once this process has gone.
            with contextlib.suppress(OSError):
                self._reload_mark.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop the thread; the engine stays."""
        self._disconnect()
        self._hellos.put(None)

    def _lives(self) -> bool:
        """Whether all processes of the engine are there, be they stopped."""
        processes = self._processes.items()
        return bool(processes) and all(start_time(pid) == started for pid, started in processes)

    def _unreachable(self, why: str) -> EngineDiedError:
        """Of an engine that Triton knows but that cannot be spoken to: why is logged once."""
        text = f"the engine cannot be reached: {why}"
        if text != self._last_complaint:
            self._last_complaint = text
            self._log(event("engine_unreachable", reason=why))
        return EngineDiedError(text)

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _say_hello(self) -> None:
        """Make sure that the engine works, or unload it. Raises EngineDiedError."""
        try:
            self.info()
        except EngineDiedError:
            self._pb_utils.unload_model(self._engine_model)
            raise

    # ------------------------------------------------------------------ the thread

    def _start_thread(self) -> None:
        """Start a thread that makes calls; an older one ends after the call that it is in."""
        self._hellos.put(None)
        self._hellos = SimpleQueue()
        threading.Thread(
            target=self._run, args=(self._hellos,), name="charonia-bls", daemon=True
        ).start()

    def _run(self, hellos: "SimpleQueue[_Answer | None]") -> None:
        while (answer := hellos.get()) is not None:
            try:
                self._say_hello_over_bls()
            except Exception as error:
                answer.put(EngineDiedError(clean(str(error))))
            else:
                answer.put(None)

    def _say_hello_over_bls(self) -> None:
        """Raises whatever is wrong. The answer is an error or nothing: no tensor, see `channel`."""
        hello = np.frombuffer(encode(Hello(secret=self._secret)), dtype=np.uint8)
        response = self._pb_utils.InferenceRequest(
            model_name=self._engine_model,
            requested_output_names=[REPLY],
            inputs=[self._pb_utils.Tensor(PLAN, hello)],
        ).exec()
        if response.has_error():
            raise EngineDiedError(response.error().message())


def _last_words(channel: Channel) -> EngineUnloadedError | None:
    """That an engine which takes nothing any more was unloaded, if it has said so."""
    deadline = time.monotonic() + _LAST_WORDS_TIMEOUT_S
    with contextlib.suppress(TimeoutError, StepFailedError):
        # Its farewell may lie behind answers that nobody waits for.
        while (data := channel.receive(max(deadline - time.monotonic(), 1e-3))) is not None:
            if isinstance(_decode(data), Farewell):
                return EngineUnloadedError(UNLOADED)
    return None


def _decode(data: bytes) -> EngineReply:
    try:
        return decode_reply(data)
    except msgspec.DecodeError:
        raise StepFailedError("the engine's reply cannot be read") from None


def is_reload(engine_dir: Path) -> bool:
    """Whether a living scheduler is loading the engine of this directory again."""
    try:
        pid, started = (engine_dir / RELOAD_MARK).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False
    return str(start_time(int(pid))) == started


def has_explicit_control(command_line: list[str]) -> bool:
    """Whether a tritonserver started by this lets models load and unload others."""
    modes = re.findall(rf"^{_CONTROL_OPTION}[=\n](.*)$", "\n".join(command_line), re.MULTILINE)
    return modes[-1:] == ["explicit"]


def _command_line(pid: int) -> list[str]:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        )
    except OSError:
        return []


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
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while living := {pid for pid in living if start_time(pid) == processes[pid]}:
        if time.monotonic() > deadline:
            raise EngineDiedError(f"{len(living)} processes of the engine do not end")
        time.sleep(0.005)
