"""The engine in another Triton model, as an Executor: plans and results by socket.

Owns the connection to the engine and its timeouts. Must not know the contents of a plan, nor how an
engine is loaded; `repairs` does.

    submit() ──► socket ──► engine ──► socket ──► result()      every step
    a second connection: is the engine alive                    every second, see `EngineWatch`
    a question to Triton: is the server shutting down           with requests: `ServerWatch`
    open(): a thread finds the engine, or loads it              see `repairs`

A message over BLS passes through tritonserver. That costs five or six wake-ups of threads each way,
and about 0.4 ms of processor time. All these processes are on one machine, so frequent messages go
directly through sockets.

The thread that submits serves all requests, so it never waits for an engine that does not read. The
rest of a plan that the socket does not take at once is sent during the wait for a result, whose
length the caller chooses.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from charonia.core.replica.opening import EngineOpening
from charonia.errors import EngineDiedError, EngineUnloadedError, StepFailedError
from charonia.events import error_event, warning_event
from charonia.protocol import (
    EngineInfo,
    EngineReply,
    Hello,
    Pending,
    ShutdownNotice,
    StepFailure,
    StepPlan,
    StepResult,
    decode_reply,
    encode,
)
from charonia.sockets.channel import Channel
from charonia.sockets.local import SOCKET_SUFFIX, connect, peer_pid
from charonia.supervision.models.judge import EngineWatch, ServerWatch
from charonia.supervision.models.probes import HUNG_UP, UNLOADED, Readiness
from charonia.supervision.models.repairs import EngineModel, ModelLoader
from charonia.supervision.process_table import start_time

STEPS_SOCKET = f"steps{SOCKET_SUFFIX}"
_HELLO_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 0.5
_VERDICT_S = 3.0
"""Time for which Triton's answer about the engine is reused while no request waits, in seconds."""


class _Step:
    """A step that was sent to the engine."""

    def __init__(
        self,
        channel: Channel,
        watch: EngineWatch,
        server: ServerWatch,
        failure: StepFailedError | None,
    ) -> None:
        self._watch = watch
        self._server = server
        self._channel = channel
        self._failure = failure

    def result(self, timeout: float | None) -> StepResult:
        """Wait as `Pending.result` does. A dead engine is noticed within seconds."""
        self._server.check()
        if self._failure is not None:
            raise self._failure
        try:
            data = self._channel.receive(timeout)
        except TimeoutError:
            self._watch.check()
            raise
        if data is None:
            raise EngineDiedError(HUNG_UP)
        reply = _decode(data)
        if isinstance(reply, StepFailure):
            raise StepFailedError(reply.message)
        if isinstance(reply, ShutdownNotice):
            raise EngineUnloadedError(UNLOADED)
        if not isinstance(reply, StepResult):
            raise StepFailedError(f"the engine answered a plan with {type(reply).__name__}")
        return reply


class SocketExecutor:
    """The engine model of the same Triton.

    Args:
        readiness: asks Triton for the model's state.
        engine_dir: the model's version directory.
        control: loads and unloads the engine.
        has_requests: whether live requests keep Triton from unloading this model.
        log: takes one line, from any thread.

    Attributes:
        refusal: why engines cannot be replaced; None if they can.
    """

    def __init__(
        self,
        readiness: Readiness,
        engine_dir: Path,
        control: ModelLoader,
        *,
        has_requests: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        self._has_requests = has_requests
        self._log = log
        self._last_complaint = ""
        self._socket = engine_dir / STEPS_SOCKET
        self._channel: Channel | None = None
        self._watch: EngineWatch | None = None
        self._processes: dict[int, int] = {}
        self._opening: EngineOpening | None = None
        self._readiness = readiness
        self._verdict: tuple[float, EngineDiedError] | None = None  # see `_check_loaded`
        self._model = EngineModel(readiness, engine_dir, control)
        self._server = ServerWatch(readiness, has_requests=has_requests, log=log)
        self._control = control
        self.refusal = control.refusal
        if self.refusal is not None:
            log(warning_event("recovery_off", reason=self.refusal))

    def open(self, *, replace: bool, on_done: Callable[[], None]) -> EngineOpening:
        """Open as `Executor.open` does, in a thread of its own.

        Its error is EngineUnloadedError if the model is not loaded, ServerStoppingError if Triton
        takes no more calls, and else EngineDiedError.
        """
        self._opening = EngineOpening(self._replace if replace else self._reach)
        self._opening.start(on_done)
        return self._opening

    def submit(self, plan: StepPlan) -> Pending:
        """Send a plan; the engine computes while the caller goes on."""
        channel, watch = self._channel, self._watch
        assert channel is not None, "submit() before open()"
        assert watch is not None
        self._readiness.has_server_started = True  # there are requests only then
        failure: StepFailedError | None = None
        try:
            channel.post(encode(plan))
        except OSError as error:  # it is too long; `result` notices a dead engine
            failure = StepFailedError(f"the plan cannot be sent: {error.strerror}")
        return _Step(channel, watch, self._server, failure)

    def check(self) -> None:
        """Check as `Executor.check` does; sends no message."""
        self._server.check()
        channel = self._channel
        if channel is None or self._watch is None or not channel.is_quiet():
            notice = channel and _last_notice(channel)
            raise self._noted(notice) if notice else EngineDiedError(HUNG_UP)
        try:
            self._watch.check()
        except EngineUnloadedError as error:
            raise self._noted(error) from None

    def note_server_stopping(self) -> None:
        """Note that the server is shutting down, as another model has seen."""
        self._server.note_stopping()

    def close(self) -> None:
        """Disconnect; the engine stays. Waits briefly for an attempt to open one."""
        self._server.close()
        self._control.close()
        if self._opening is not None:
            self._opening.join(_CLOSE_TIMEOUT_S)
        self._model.close()
        self._disconnect()

    # ------------------------------------------------------------------ in the opening's thread

    def _reach(self) -> EngineInfo:
        """Connect to the present engine, and note its processes. Raises as `open`."""
        self._disconnect()
        channel = self._connect()
        pid = peer_pid(channel)
        self._processes = {pid: start_time(pid) or 0}  # to be killed if it does not answer
        try:
            reply = self._say_hello(channel)
            watch = EngineWatch(self._connect(), pid)
        except EngineDiedError:
            channel.close()
            raise
        self._channel, self._watch = channel, watch
        self._processes = {pid: start_time(pid) or 0 for pid in reply.pids}
        self._server.start()
        return reply

    def _replace(self) -> EngineInfo:
        """Replace the present engine by a new one. Raises as `open`."""
        self._server.check()  # a server that shuts down must not be asked to load
        self._disconnect()
        return self._model.replace(self._processes, self._reach)

    def _connect(self) -> Channel:
        """Connect to the engine. If that fails, ask Triton why; raises as `open`."""
        try:
            return connect(self._socket)
        except OSError:
            self._check_loaded()
        try:
            return connect(self._socket)  # it may have been loaded meanwhile
        except OSError as error:
            name = self._socket.name
            raise self._unreachable(f"{name} in its directory: {error.strerror}") from None

    def _say_hello(self, channel: Channel) -> EngineInfo:
        """Raises as `open`."""
        try:
            channel.send(encode(Hello()), _HELLO_TIMEOUT_S)
            data = channel.receive(_HELLO_TIMEOUT_S)
            reply = None if data is None else _decode(data)
        except (OSError, StepFailedError) as error:
            raise self._unreachable(f"no answer through its socket: {error}") from None
        if isinstance(reply, ShutdownNotice):
            raise self._noted(EngineUnloadedError(UNLOADED))
        if not isinstance(reply, EngineInfo):
            raise self._unreachable(f"it answered a hello with {type(reply).__name__}")
        return reply

    def _unreachable(self, why: str) -> EngineDiedError:
        """The error of an engine that is loaded but does not answer; each reason is logged once.

        Raises:
            EngineUnloadedError: Triton says that it is not loaded.
        """
        self._check_loaded()
        text = f"the engine cannot be reached: {why}"
        if text != self._last_complaint:
            self._last_complaint = text
            self._log(error_event("engine_unreachable", reason=why))
        return EngineDiedError(text)

    def _check_loaded(self) -> None:
        """Ask Triton whether the engine is loaded. Raises as `open`.

        Triton must not be asked while it finalizes this model, which it may do at any time if no
        request is live. So without requests its last answer is reused for some seconds, and a
        shutdown notice of the engine, too: at the server's end this model is finalized within
        seconds of that.
        """
        self._server.check()
        now = time.monotonic()
        if self._verdict and now - self._verdict[0] < _VERDICT_S and not self._has_requests():
            raise self._verdict[1]
        try:
            self._readiness.check_loaded()
        except EngineDiedError as error:
            raise self._noted(error) from None
        self._verdict = None

    def _noted(self, error: EngineDiedError) -> EngineDiedError:
        self._verdict = time.monotonic(), error
        return error

    def _disconnect(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _last_notice(channel: Channel) -> EngineUnloadedError | None:
    """The error of an engine that was unloaded, if it has sent a shutdown notice."""
    with suppress(TimeoutError, StepFailedError):
        # The notice may follow unread answers.
        while (data := channel.receive(0.0)) is not None:
            if isinstance(_decode(data), ShutdownNotice):
                return EngineUnloadedError(UNLOADED)
    return None


def _decode(data: bytes) -> EngineReply:
    try:
        return decode_reply(data)
    except msgspec.DecodeError:
        raise StepFailedError("the engine's reply cannot be read") from None
