"""Keeps a tritonserver serving: first start, restarts, a clean end.

Owns how often a server may be restarted. Must not know how a server is started, nor when it counts
as broken: a `Watch` says so.

::

    start ─► wait until a token comes ─► watch ──(stop requested)──► stop, return
      ▲                                    │
      └── back-off ◄── kill everything ◄───┘ only a restart mends what happened, see `watch`
             │
             └─► too many failed starts: stop, raise LaunchError

A server that ends after clients could reach it may have been ended by a request, which somebody may
send time and again: that is no failed start, however early it comes.
"""

import threading
import time
from collections.abc import Callable

from charonia.errors import CrashError, LaunchError, LostError, NotReadyError
from charonia.events import event
from charonia.supervision.server.probe import Probe, wait_serving
from charonia.supervision.server.protocols import Server
from charonia.supervision.server.timeouts import SupervisionLimits
from charonia.supervision.server.watch import Watch


class Supervisor:
    """Runs one server until `stop` is set. Call `run` from the main thread.

    Args:
        server: not started yet; closing it is the caller's.
        scheduler, engine: names of the models.
        stop: set it, from any thread or a signal handler, to end `run`.
        on_serving: called after each start, when a token has come.
        log: gets one line per event.
    """

    def __init__(
        self,
        server: Server,
        *,
        stop: threading.Event,
        log: Callable[[str], None],
        on_serving: Callable[[], None] = lambda: None,
        scheduler: str = "scheduler",
        engine: str = "engine",
        limits: SupervisionLimits | None = None,
    ) -> None:
        self._server = server
        self._stop = stop
        self._log = log
        self._on_serving = on_serving
        self._scheduler = scheduler
        self._engine = engine
        self._limits = limits or SupervisionLimits()
        self._num_failures = 0  # in a row
        self.num_restarts = 0

    def run(self) -> None:
        """Serve until `stop` is set; the server is stopped then.

        Raises:
            LaunchError: the first start failed, and another try would as well; or too many in a
                row did.
        """
        probe = Probe(self._server.http_url, self._scheduler, self._stop)
        try:
            try:
                self._start(probe)
            except (CrashError, LostError) as error:
                self._restart(probe, str(error), served_s=0.0)
            except NotReadyError as error:  # what is only slow would be so each time
                self._log(event("server_restarting", restarts=self.num_restarts, reason=str(error)))
                self._renew(probe)
            while not self._stop.is_set():
                started = time.monotonic()
                reason = self._watch(probe)
                if reason is not None:
                    self._restart(probe, reason, served_s=time.monotonic() - started)
        finally:
            probe.close()
            self._server.stop()

    def _start(self, probe: Probe) -> None:
        self._server.start()
        limits = self._limits
        if wait_serving(self._server, probe, limits.start_s, self._stop, limits.stopped_s):
            self._on_serving()

    def _watch(self, probe: Probe) -> str | None:
        """Return why the server must be restarted, or None when `stop` is set."""
        watch = Watch(
            self._server,
            probe,
            scheduler=self._scheduler,
            engine=self._engine,
            limits=self._limits,
            stop=self._stop,
            log=self._log,
        )
        return watch.keep()

    def _restart(self, probe: Probe, reason: str, served_s: float) -> None:
        """Kill the server and start it, with back-off, until it serves or `stop` is set."""
        noticed = time.monotonic()
        if served_s >= self._limits.stable_s:
            self._num_failures = 0
        num_failed_starts = 0
        while not self._stop.is_set():
            self._log(event("server_restarting", restarts=self.num_restarts, reason=reason))
            try:
                self._renew(probe)
            except LostError as error:
                reason, num_failed_starts = str(error), 0
            except LaunchError as error:
                reason = str(error)
                num_failed_starts += 1
                if num_failed_starts >= self._limits.max_failed_starts:
                    self._log(event("server_given_up", starts=num_failed_starts, reason=reason))
                    raise LaunchError(
                        f"gave up after {num_failed_starts} failed starts in a row; last: {reason}"
                    ) from None
            else:
                self._log(event("server_back", seconds=time.monotonic() - noticed))
                return

    def _renew(self, probe: Probe) -> None:
        """Kill the server and start it after the back-off."""
        try:
            self._server.kill()
        finally:  # processes that do not end now may do so meanwhile
            self._back_off()
        self.num_restarts += 1
        self._start(probe)

    def _back_off(self) -> None:
        """Wait before a restart that is not the first in a row, longer each time."""
        if self._num_failures:
            exponent = min(self._num_failures - 1, 16)
            self._stop.wait(min(self._limits.backoff_s * 2.0**exponent, self._limits.max_backoff_s))
        self._num_failures += 1
