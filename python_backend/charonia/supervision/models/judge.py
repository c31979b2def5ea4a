"""Judges, in a model's process, whether its engine is lost and whether the server is shutting down.

Owns when probes are sent, and what is known by their answers. Must not know the contents of probes
(`probes`), plans, or what happens to requests, or to an engine that is lost (`repairs`).

    EngineWatch   the scheduler's, of its engine
    ServerWatch   of the server, in a model with requests
"""

import contextlib
import threading
from collections.abc import Callable

from charonia.errors import EngineDiedError, ServerStartingError, ServerStoppingError
from charonia.events import error_event
from charonia.sockets.channel import Channel
from charonia.supervision.models.probes import EngineProbe, Readiness

_ASK_ENGINE_EVERY_S = 1.0
_ASK_SERVER_EVERY_S = 0.25


class EngineWatch:
    """Watches one engine, from its construction on.

    Args:
        channel: a connection to the engine, used by this object alone.
        pid: of the engine's process.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self._probe = EngineProbe(channel, pid)
        self._failure: EngineDiedError | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="charonia-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the engine is known to be lost; does not wait.

        Raises:
            EngineDiedError, EngineHungError, EngineUnloadedError: see `EngineProbe.ask`.
        """
        failure = self._failure
        if failure is not None:
            raise type(failure)(str(failure))

    def close(self) -> None:
        """Stop watching."""
        self._is_closing.set()
        self._probe.hang_up()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._probe.ask()
                self._is_closing.wait(_ASK_ENGINE_EVERY_S)
        except EngineDiedError as failure:
            self._failure = failure
        finally:
            self._probe.close()


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
        """Start watching; has no effect if already started.

        If a limit of processes is reached, the next call tries again.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="charonia-server", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started now
                thread.start()
                self._thread = thread

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
