"""The engine in another Triton model, as an Executor: messages by socket, its model by Triton.

Owns the connection to the engine, its time limits, and bringing a dead engine back. Must not know
what is in a plan.

    submit() ──► socket ──► engine ──► socket ──► result()      every step, see `channel`
    a second connection, see `liveness`: does it live           every second
    where nobody is at the socket: a question to Triton         is the model loaded

Triton is asked over BLS, with a request that lacks its input: that is refused before it gets into
the model's queue, so the answer waits neither for the engine nor behind anybody's requests. BLS
works in `execute` and, once the model is loaded, in threads; its errors are harmless, and so
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from charonia.connection import Channel
from charonia.errors import (
    EngineDiedError,
    EngineHungError,
    EngineUnloadedError,
    StepFailedError,
    split_answer,
)
from charonia.events import event
from charonia.protocol import (
    EngineInfo,
    EngineReply,
    Farewell,
    Hello,
    LoadFailure,
    Pending,
    StepFailure,
    StepPlan,
    StepResult,
    decode_reply,
    encode,
)
from charonia.serving.channel import SOCKET_SUFFIX, connect, peer_pid
from charonia.serving.liveness import HUNG_UP, UNLOADED, EngineWatch, start_time

ANSWER = "answer"
"""The engine model's output, which nobody gets."""
RECOVERY_IS_OFF = "recovery is off: tritonserver was not started with --model-control-mode=explicit"
RELOAD_MARK = "reload.mark"
STEPS_SOCKET = f"steps{SOCKET_SUFFIX}"
_CONTROL_OPTION = "--model-control-mode"
_HELLO_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 10.0
_ASK_AFTER_S = 1.0
_LAST_WORDS_TIMEOUT_S = 2.0
_IS_LOADED = "missing required input"
"""What Triton says to a request without inputs for a model that is loaded."""
_NOT_LOADED = ("is not ready", "Server not ready")
"""What it says of one that is not; the latter of all models, at shutdown."""


class _Step:
    """A step that was sent to the engine through the socket."""

    def __init__(
        self, channel: Channel, watch: EngineWatch, failure: EngineDiedError | None
    ) -> None:
        self._watch = watch
        self._channel = channel
        self._failure = failure

    def result(self, timeout: float | None) -> StepResult:
        """As `Pending.result`. An engine that does not live is noticed within seconds."""
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
                self._watch.check()
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
        self._watch: EngineWatch | None = None
        self._reload_mark = engine_dir / RELOAD_MARK
        self._processes: dict[int, int] = {}
        self._can_restart = has_explicit_control(_command_line(os.getppid()))
        if not self._can_restart:
            log(event("recovery_off", reason=RECOVERY_IS_OFF))

    @property
    def can_restart(self) -> bool:
        """Whether Triton lets an engine be replaced."""
        return self._can_restart

    def info(self) -> EngineInfo:
        """Ask the engine what it is, remember its processes, and connect to it.

        Raises:
            EngineDiedError: there is none, or it does not answer, or says that it cannot work.
            EngineUnloadedError: it is not loaded (yet).
        """
        self._disconnect()
        channel = self._connect()
        pid = peer_pid(channel)
        self._processes = {pid: start_time(pid) or 0}  # to be killed, should it not answer
        try:
            reply = self._say_hello(channel)
            watch = EngineWatch(self._connect(), pid)
        except EngineDiedError:
            channel.close()
            raise
        self._channel, self._watch = channel, watch
        self._processes = {pid: start_time(pid) or 0 for pid in reply.pids}
        return reply

    def _connect(self) -> Channel:
        """Connect to the engine; where nobody is at its socket, Triton says why: as `info`."""
        path = self._engine_dir / STEPS_SOCKET
        try:
            return connect(path)
        except OSError:
            self._ask_triton()
        try:
            return connect(path)  # it has come meanwhile
        except OSError as error:
            raise self._unreachable(f"{path.name} in its directory: {error.strerror}") from None

    def _say_hello(self, channel: Channel) -> EngineInfo:
        """Raises as `info`."""
        try:
            channel.send(encode(Hello()), _HELLO_TIMEOUT_S)
            data = channel.receive(_HELLO_TIMEOUT_S)
            reply = None if data is None else _decode(data)
        except (OSError, StepFailedError) as error:
            raise self._unreachable(f"no answer through its socket: {error}") from None
        if isinstance(reply, LoadFailure):
            raise EngineDiedError(reply.message)
        if not isinstance(reply, EngineInfo):
            raise self._unreachable(f"it answered a hello with {type(reply).__name__}")
        return reply

    def _ask_triton(self) -> None:
        """Ask whether the engine's model is loaded.

        Raises:
            EngineUnloadedError: it is not. EngineDiedError: there is no such model.
        """
        pb_utils = self._pb_utils
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._engine_model, requested_output_names=[ANSWER], inputs=[]
            ).exec()
            text = response.error().message()
        except pb_utils.TritonModelException as error:
            text = str(error)
        if any(words in text for words in _NOT_LOADED):
            raise EngineUnloadedError(UNLOADED)  # its farewell may still be to come
        if _IS_LOADED not in text:
            raise EngineDiedError(clean(text))

    def check(self) -> None:
        """As `Executor.check`: it costs no message.

        Raises:
            EngineDiedError: it has gone, or does not answer.
            EngineUnloadedError: Triton has unloaded it, or has another one in its place.
        """
        channel = self._channel
        if channel is None or self._watch is None or not channel.is_quiet():
            raise (channel and _last_words(channel)) or EngineDiedError(HUNG_UP)
        self._watch.check()

    def submit(self, plan: StepPlan) -> Pending:
        """Send a plan; the engine computes while the caller goes on."""
        channel, watch = self._channel, self._watch
        assert channel is not None, "submit() before info()"
        assert watch is not None
        failure: EngineDiedError | None = None
        try:
            channel.send(encode(plan), _SEND_TIMEOUT_S)
        except TimeoutError:
            failure = EngineHungError(f"the engine takes no plan within {_SEND_TIMEOUT_S:g} s")
        except OSError as error:
            failure = EngineDiedError(f"the engine takes no plan: {error.strerror or error}")
        return _Step(channel, watch, failure)

    def restart(self) -> None:
        """Kill the old engine's processes, unload its model and load it again.

        Raises:
            EngineDiedError: it cannot be loaded, or Triton is not in explicit model control.
        """
        if not self._can_restart:
            raise EngineDiedError(RECOVERY_IS_OFF)
        self._disconnect()
        kill_processes(self._processes)
        self._processes = {}
        own_pid = os.getpid()
        try:
            self._reload_mark.write_text(f"{own_pid} {start_time(own_pid)}", encoding="ascii")
            self._pb_utils.unload_model(self._engine_model)
            self._pb_utils.load_model(self._engine_model)
            self._make_sure_it_works()
        except Exception as error:
            raise EngineDiedError(clean(str(error))) from None
        finally:
            # One that stays says nothing once this process has gone.
            with contextlib.suppress(OSError):
                self._reload_mark.unlink(missing_ok=True)

    def close(self) -> None:
        """Hang up; the engine stays."""
        self._disconnect()

    def _unreachable(self, why: str) -> EngineDiedError:
        """Of an engine that Triton knows but that cannot be spoken to: why is logged once."""
        text = f"the engine cannot be reached: {why}"
        if text != self._last_complaint:
            self._last_complaint = text
            self._log(event("engine_unreachable", reason=why))
        return EngineDiedError(text)

    def _disconnect(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _make_sure_it_works(self) -> None:
        """Make sure that the engine works, or unload it. Raises EngineDiedError."""
        try:
            self.info()
        except EngineDiedError:
            self._pb_utils.unload_model(self._engine_model)
            raise


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
