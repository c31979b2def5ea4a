"""What a model's process watches: the engine's process, whether its model is loaded, the server.

Owns these questions, what their answers mean, and when they may be asked. Must not know plans, nor
what becomes of requests, or of an engine that does not live.

::

    EngineWatch   the scheduler asks the engine's process, through a second connection to its
                  socket, which a thread of the engine's own answers whatever its step is doing
    Readiness     Triton is asked by BLS whether a model is loaded, and whether the server works
    ServerWatch   a model with requests has Readiness ask time and again whether the server shuts
                  down

    hello ──► answer              the engine lives, however long its step takes
    hello ──► the end             its process has ended, or gave notice: it was unloaded
    hello ──► nothing for 1 s     the kernel is asked: stopped?
    hello ──► nothing for 10 s    it hangs: a deadlock, say
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
from charonia.events import event
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
"""What it says of all models while it shuts down, and before it has started; and its Python backend
to a model that is being unloaded."""


class EngineWatch:
    """Watches one engine from when it is made.

    Args:
        channel: a connection to the engine that nobody else uses.
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
        """Say whether it lives, as far as is known; waits for nothing.

        Raises:
            EngineDiedError: it does not, or (EngineHungError) it does not answer, or
                (EngineUnloadedError) it has given notice.
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
    """What Triton says of one model, the engine or another, and of itself, to a question by BLS.

    Triton is asked with a request for an output that no model has: that is refused before it gets
    into the model's queue, so the answer waits neither for the model nor behind anybody's requests.
    BLS works in `execute` and, once the model that asks is loaded, in threads; its errors are
    harmless, and so are answers without tensors. The tensors of an answer are made without holding
    Python's lock (2.51.0), so in a process with threads every such answer may corrupt the heap;
    measured, a process with three threads dies after some thousand calls.

    Attributes:
        has_server_started: whether it is known to take calls, or to have taken some: one that
            refuses them then is shutting down.
    """

    def __init__(self, pb_utils: Any, model: str) -> None:
        self._pb_utils = pb_utils
        self._model = model
        self.has_server_started = False

    def check_loaded(self) -> None:
        """Ask whether the model is loaded.

        Raises:
            EngineUnloadedError: it is not. ServerStoppingError: no model is, any more.
            ServerStartingError: the server takes no calls before it has loaded all its models.
            EngineDiedError: there is no such model.
        """
        pb_utils = self._pb_utils
        try:
            response = pb_utils.InferenceRequest(
                model_name=self._model, requested_output_names=[_OUTPUT], inputs=[]
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
            raise EngineUnloadedError(UNLOADED)  # its shutdown notice may still be to come
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
            pass  # of the model, not of the server


def clean(message: str) -> str:
    """Triton's message without the traceback, the paths and the kind that it may carry."""
    message, _ = split_answer(re.split(r"\n+(?:At:|Traceback)", message)[0])
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*", "…", message).strip()


class ServerWatch:
    """Watches from `start` on, while there are requests, whether the server shuts down.

    Triton tells no model that it shuts down before it unloads it, and it unloads none while
    requests are live: it waits for them as long as its `--exit-timeout-secs` says, then it gives up
    and breaks them off. To a BLS call it says "Server not ready" from the first moment on, as it
    does until it has loaded all its models; see `Readiness` for which of the two it is. So whoever
    asks can end what is live, and the server ends in order. A call that is refused takes 0.2 ms;
    30,000 of them left no trace in the memory of either process.

    But one that is under way while Triton 2.51.0 finalizes the model that made it is never
    answered, by which this process never ends, or it crashes the server. Triton finalizes no model
    with requests, and begins with a second in which it looks for signs of life. So only a model
    with requests that Triton counts asks: the scheduler for its own clients, and each proxy for
    those that it relays, which tells the scheduler.

    Args:
        ask: raises ServerStoppingError once the server is shutting down, and ServerStartingError as
            long as it has not started; of anything else that it raises the first is logged.
        has_requests: whether Triton waits for requests of this model before it unloads it.
        on_stopping: called once, in the watch's thread.
        log: takes one line, from any thread.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        *,
        has_requests: Callable[[], bool],
        on_stopping: Callable[[], None] = lambda: None,
        log: Callable[[str], None],
    ) -> None:
        self._ask = ask
        self._has_requests = has_requests
        self._on_stopping = on_stopping
        self._log = log
        self._is_stopping = False
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to ask, unless that was begun before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="charonia-server", daemon=True)
            self._thread.start()

    def note_stopping(self) -> None:
        """Another model has been told that the server is shutting down."""
        self._is_stopping = True

    def check(self) -> None:
        """Say what is known; asks nobody.

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
                self._ask()
            except ServerStoppingError:
                self._is_stopping = True
                self._on_stopping()
            except ServerStartingError:
                continue
            except Exception as error:  # it says nothing of the server, which may still shut down
                if not has_complained:
                    has_complained = True
                    reason = f"{type(error).__name__}: {error}"
                    self._log(event("server_watch_failed", reason=reason))
