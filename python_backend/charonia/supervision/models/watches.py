"""Watches from a model's process: the engine's process, its model's state, and the server.

Owns the probes, the meaning of their answers, and when they may be sent. Must not know plans, or
what happens to requests, or to an engine that is lost.

::

    EngineWatch   the scheduler probes the engine's process over a second connection to its socket;
                  a thread of the engine answers, whatever the current step is doing
    Readiness     asks Triton by BLS whether a model is loaded, and whether the server works
    ServerWatch   in a model with requests, asks repeatedly whether the server is shutting down

    hello ──► answer              the engine lives, however long its step takes
    hello ──► end of connection   the process has ended
    hello ──► shutdown notice     the engine was unloaded
    hello ──► no answer for 1 s   the process table is read: is it stopped?
    hello ──► no answer for 10 s  it hangs, for example in a deadlock
"""

import re
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from charonia.errors import (
    EngineDiedError,
    EngineHungError,
    EngineUnloadedError,
    ServerStartingError,
    ServerStoppingError,
    split_answer,
)
from charonia.events import error_event
from charonia.protocol import Hello, ShutdownNotice, decode_reply, encode
from charonia.sockets.channel import Channel
from charonia.supervision.process_table import process_state

UNLOADED = "the engine was unloaded"
HUNG_UP = "the engine's process has hung up"
_ASK_ENGINE_EVERY_S = 1.0
_LOOK_AFTER_S = 1.0
_NUM_LOOKS = 10
_HELLO = encode(Hello())
_ASK_SERVER_EVERY_S = 0.25
_OUTPUT = "readiness"
_IS_LOADED = "unexpected inference output"
_IS_NOT_LOADED = "is not ready"
_TAKES_NO_CALLS = ("Server not ready", "BLS is only supported during")
"""Triton's answers for all models while it shuts down or starts, and the Python backend's answer to
a model that is being unloaded."""


class EngineWatch:
    """Watches one engine, from its construction on.

    Args:
        channel: a connection to the engine, used by this object alone.
        pid: of the engine's process.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        self._failure: EngineDiedError | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the engine is known to be lost; does not wait.

        Raises:
            EngineDiedError: it has ended. EngineHungError: it does not answer. EngineUnloadedError:
                it has sent a shutdown notice.
        """
        failure = self._failure
        if failure is not None:
            raise type(failure)(str(failure))

    def close(self) -> None:
        """Stop watching."""
        self._is_closing.set()
        self._channel.hang_up()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._ask()
                self._is_closing.wait(_ASK_ENGINE_EVERY_S)
        except EngineDiedError as failure:
            self._failure = failure
        finally:
            self._channel.close()

    def _ask(self) -> None:
        """Raises as `check`."""
        try:
            self._channel.send(_HELLO, _LOOK_AFTER_S)
        except OSError:
            raise EngineDiedError(HUNG_UP) from None
        for _ in range(_NUM_LOOKS):
            try:
                data = self._channel.receive(_LOOK_AFTER_S)
            except TimeoutError:
                if process_state(self._pid) in ("T", "t"):
                    raise EngineHungError("the engine's process is stopped") from None
                continue
            if data is None:
                raise EngineDiedError(HUNG_UP)
            if _is_shutdown_notice(data):
                raise EngineUnloadedError(UNLOADED)
            return
        raise EngineHungError(f"no answer of the engine within {_NUM_LOOKS * _LOOK_AFTER_S:g} s")


def _is_shutdown_notice(data: bytes) -> bool:
    try:
        return isinstance(decode_reply(data), ShutdownNotice)
    except msgspec.DecodeError:
        raise EngineDiedError("the engine's reply cannot be read") from None


class Readiness:
    """Asks Triton, by BLS, about the state of one model and of the server itself.

    The question is a request for an output that no model has. Triton refuses it before it enters
    the model's queue, so the answer waits neither for the model nor behind other requests. BLS
    works in `execute` and, once the asking model is loaded, in threads. Its errors are harmless,
    and so are answers without tensors. Triton 2.51.0 creates the tensors of an answer without
    holding the GIL, so in a process with threads each such answer may corrupt the heap. In a
    measurement a process with three threads died after some thousand calls.

    Attributes:
        model: the model's name.
        has_server_started: whether the server has ever taken a call. If it has and now refuses
            calls, it is shutting down.
    """

    def __init__(self, pb_utils: Any, model: str) -> None:
        self._pb_utils = pb_utils
        self.model = model
        self.has_server_started = False

    def check_loaded(self) -> None:
        """Ask whether the model is loaded.

        Raises:
            EngineUnloadedError: it is not. ServerStoppingError: the server is shutting down.
            ServerStartingError: the server has not loaded all its models yet, and takes no calls.
            EngineDiedError: there is no such model.
        """
        pb_utils = self._pb_utils
        try:
            response = pb_utils.InferenceRequest(
                model_name=self.model, requested_output_names=[_OUTPUT], inputs=[]
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
            raise EngineUnloadedError(UNLOADED)  # its shutdown notice may not have arrived yet
        if _IS_LOADED not in text:
            raise EngineDiedError(clean(text))

    def check_server(self) -> None:
        """Ask whether the server works.

        Raises:
            ServerStoppingError, ServerStartingError: it is shutting down, or has not started yet.
                It refuses all calls meanwhile.
        """
        try:
            self.check_loaded()
        except (ServerStoppingError, ServerStartingError):
            raise
        except EngineDiedError:
            pass  # says nothing about the server


def clean(message: str) -> str:
    """Triton's message without traceback, paths and kind of error."""
    message, _ = split_answer(re.split(r"\n+(?:At:|Traceback)", message)[0])
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*", "…", message).strip()


class ServerWatch:
    """Watches whether the server shuts down, from `start` on, while there are requests.

    Triton does not tell a model about a shutdown before it unloads it, and it does not unload a
    model with live requests. It waits for them for `--exit-timeout-secs`, then breaks them off. But
    during shutdown, as during startup, it answers BLS calls with "Server not ready"; `Readiness`
    tells the two apart. A model that asks can thus end its requests, and the server ends in order.
    A refused call takes 0.2 ms; 30,000 of them did not grow the memory of either process.

    A call must not be in flight while Triton 2.51.0 finalizes the calling model: it is never
    answered, so this process never ends, or it crashes the server. Triton does not finalize a model
    with requests, and first waits a second for signs of life. So only a model with requests that
    Triton counts asks: the scheduler for its own clients, and each proxy for those that it relays.
    The proxies tell the scheduler.

    Args:
        readiness: asks the server. The first of its unexpected exceptions is logged.
        has_requests: whether this model has requests that Triton waits for before unloading it.
        on_stopping: called once when a shutdown is found, in the watch's thread.
        log: takes one line, from any thread.
    """

    def __init__(
        self,
        readiness: Readiness,
        *,
        has_requests: Callable[[], bool],
        on_stopping: Callable[[], None] = lambda: None,
        log: Callable[[str], None],
    ) -> None:
        self._readiness = readiness
        self._has_requests = has_requests
        self._on_stopping = on_stopping
        self._log = log
        self._is_stopping = False
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching; has no effect if already started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="charonia-server", daemon=True)
            self._thread.start()

    def note_stopping(self) -> None:
        """Note that another model has found the server shutting down."""
        self._is_stopping = True

    def check(self) -> None:
        """Raise if the server is known to be shutting down; does not ask it.

        Raises:
            ServerStoppingError: the server is shutting down.
        """
        if self._is_stopping:
            raise ServerStoppingError("the server is shutting down")

    def close(self) -> None:
        """Stop asking; `check` raises from now on."""
        self._is_stopping = True
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        has_complained = False
        while not (self._is_closing.wait(_ASK_SERVER_EVERY_S) or self._is_stopping):
            if not self._has_requests():
                continue
            try:
                self._readiness.check_server()
            except ServerStoppingError:
                self._is_stopping = True
                self._on_stopping()
            except ServerStartingError:
                continue
            except Exception as error:  # tells nothing about a shutdown
                if not has_complained:
                    has_complained = True
                    reason = f"{type(error).__name__}: {error}"
                    self._log(error_event("server_watch_failed", reason=reason))
