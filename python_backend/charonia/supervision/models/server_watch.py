"""Whether the server is shutting down, asked time and again while this model has requests.

Owns a thread that asks Triton. Must not know what becomes of requests then.

Triton tells no model that it shuts down before it unloads it, and it unloads none while requests
are live: it waits for them as long as its `--exit-timeout-secs` says, then it gives up and breaks
them off. To a BLS call it says "Server not ready" from the first moment on, as it does until it has
loaded all its models; see `Readiness` for which of the two it is. So whoever asks can end what is
live, and the server ends in order. A call that is refused takes 0.2 ms; 30,000 of them left
no trace in the memory of either process.

But one that is under way while Triton 2.51.0 finalizes the model that made it is never answered, by
which this process never ends, or it crashes the server. Triton finalizes no model with requests,
and begins with a second in which it looks for signs of life. So only a model with requests that
Triton counts asks: the scheduler for its own clients, and each front for those that it relays,
which tells the scheduler.
"""

import threading
from collections.abc import Callable

from charonia.errors import ServerStartingError, ServerStoppingError
from charonia.events import event

_ASK_EVERY_S = 0.25


class ServerWatch:
    """Watches the server from `start` on, while there are requests.

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
        while not (self._is_closing.wait(_ASK_EVERY_S) or self._is_stopping):
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
