"""A server under supervision, as `charonia serve` has it, inside of a test.

Owns the thread that supervises, and how long its deeds are waited for. Must not know which models
there are.
"""

import threading

from charonia.errors import LaunchError
from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.judge import SupervisionLimits
from charonia.supervision.server.supervisor import Supervisor
from support.e2e import wait_for
from support.events import events

ALLOWED_S = 120.0
"""Timeout, in seconds, of what happens by itself. It is no measure of speed: many times what it
takes at most."""


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

    def wait_serving(self, timeout: float = ALLOWED_S) -> None:
        """Wait until the server serves (again)."""
        assert self._serving.acquire(timeout=timeout), self.error or self.lines

    def wait_events(self, name: str, count: int = 1) -> list[dict[str, str]]:
        """The fields of all events of a name, once there are so many."""
        found = wait_for(
            lambda: events(self.lines, name), lambda found: len(found) >= count, ALLOWED_S
        )
        assert len(found) >= count, self.error or self.lines
        return found

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except LaunchError as error:
            self.error = error
