"""A server under supervision, as `charonia serve` has it, inside of a test.

Owns the thread that supervises. Must not know which models there are.
"""

import threading
import time

from charonia.launch.errors import LaunchError
from charonia.launch.patience import SupervisionLimits
from charonia.launch.server import TritonServer
from charonia.launch.supervisor import Supervisor

ALLOWED_S = 15.0
"""From a fault until the server serves again."""


class Supervised:
    """A supervisor at work, as a context manager, and what it reported.

    Attributes:
        lines: events. error: why it gave up.
    """

    def __init__(self, server: TritonServer, limits: SupervisionLimits) -> None:
        self.server = server
        self.stop = threading.Event()
        self.lines: list[str] = []
        self.error: LaunchError | None = None
        self._serving = threading.Semaphore(0)
        self.supervisor = Supervisor(
            server,
            stop=self.stop,
            log=self.lines.append,
            on_serving=self._serving.release,
            limits=limits,
        )
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Supervised":
        self.thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop.set()
        self.thread.join()

    def wait_serving(self, timeout: float = ALLOWED_S) -> float:
        """Seconds until the server serves (again)."""
        started = time.monotonic()
        assert self._serving.acquire(timeout=timeout), self.error or self.lines
        return time.monotonic() - started

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except LaunchError as error:
            self.error = error
