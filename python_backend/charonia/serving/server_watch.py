"""Whether the server is shutting down, asked time and again.

Owns a thread that asks Triton. Must not know what becomes of requests then.

Triton tells no model that it shuts down before it unloads it, and it unloads none while requests
are live: it waits for them as long as its `--exit-timeout-secs` says, then it gives up and breaks
them off. To a BLS call it says "Server not ready" from the first moment on, as it does until it has
loaded all its models; see `EngineModel` for which of the two it is. So whoever asks can end what is
live, and the server ends in order. A call that is refused takes 0.2 ms; 30,000 of them left
no trace in the memory of either process.

But one that is under way while Triton 2.51.0 finalizes the model that made it is never answered, by
which this process never ends, or it crashes the server. Triton finalizes no model with requests,
and begins with a second in which it looks for signs of life. So it is asked only while there are
steps, and a little longer.
"""

import threading
import time
from collections.abc import Callable

from charonia.errors import ServerStartingError, ServerStoppingError
from charonia.events import event

_ASK_EVERY_S = 0.25
_ASK_FOR_S = 0.3


class ServerWatch:
    """Watches the server from `start` on, as long as somebody wants it.

    Args:
        ask: raises ServerStoppingError once the server is shutting down, and ServerStartingError as
            long as it has not started; of anything else that it raises the first is logged.
        log: takes one line, from any thread.
    """

    def __init__(self, ask: Callable[[], None], *, log: Callable[[str], None]) -> None:
        self._ask = ask
        self._log = log
        self._is_stopping = False
        self._ask_until = 0.0
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to ask, unless that was begun before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="charonia-server", daemon=True)
            self._thread.start()

    def want(self) -> None:
        """A step is waited for: ask for some time from now on."""
        self._ask_until = time.monotonic() + _ASK_FOR_S

    def check(self) -> None:
        """Say what is known; asks nobody.

        Raises:
            ServerStoppingError: the server is shutting down.
        """
        if self._is_stopping:
            raise ServerStoppingError("the server is shutting down")

    def close(self) -> None:
        """Stop asking."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        has_complained = False
        while not self._is_closing.wait(_ASK_EVERY_S):
            if time.monotonic() > self._ask_until:
                continue
            try:
                self._ask()
            except ServerStoppingError:
                self._is_stopping = True
                return
            except ServerStartingError:
                continue
            except Exception as error:  # it says nothing of the server, which may still shut down
                if not has_complained:
                    has_complained = True
                    reason = f"{type(error).__name__}: {error}"
                    self._log(event("server_watch_failed", reason=reason))
