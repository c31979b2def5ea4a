"""Keeps a tritonserver serving: first start, restarts, orderly shutdown.

Owns how often a server may be restarted, and checking it several times a second. Must not know how
a server is started, when a process counts as lost (`judge`), or how a model is reloaded
(`repairs`). It never blocks on an answer, so a process that is lost during a probe is noticed.

::

    start ─► wait for the first token ─► watch ──(stop requested)──► stop, return
      ▲                                    │
      └── back-off ◄── kill everything ◄───┘ only a restart helps, see below
             │
             └─► too many failed starts: stop, raise LaunchError

A server that ends after clients could reach it may have been ended by a request, which a client may
send repeatedly. So this never counts as a failed start.

::

    what              noticed by                             brought back
    tritonserver      its process; HTTP and gRPC silent      with all its models
                      for `server_hang_s`
    scheduler         its process; no probe answered         with the whole server, as nothing less
                      for `hang_s`                           ends its open streams
    engine            the scheduler                          by the scheduler
    engine that loads no process of it for                   with the whole server, as its load
                      `orphaned_load_s`                      never ends
    any other model   its process; some are probed:          alone: killed, unloaded, loaded; with
    in Python         silent for `model_hang_s`              the whole server if that fails

A process is lost if it has ended, or has been stopped for `stopped_s`. Calls that a lost process
had not answered end only with the server. It is restarted as soon as no other request runs, and at
the latest after `orphaned_calls_s`.
"""

import contextlib
import threading
import time
from collections.abc import Callable

from charonia.errors import CrashError, LaunchError, LostError, NotReadyError
from charonia.events import error_event, event
from charonia.supervision.server.judge import (
    STOPPED_S,
    TRITONSERVER,
    EndpointWatch,
    Loss,
    SchedulerWatch,
    SupervisionLimits,
    Watchdog,
)
from charonia.supervision.server.model_control import ModelControl
from charonia.supervision.server.probes import Health, Probe, probed_endpoints
from charonia.supervision.server.protocols import RunningServer, Server
from charonia.supervision.server.repairs import OrphanedCalls, Repairs

FIRST_TIMEOUT_S = 60.0  # the first inference may compile, or page in weights
MAX_REFUSING_S = 60.0  # a new scheduler refuses until it has found its loaded engine


class Supervisor:
    """Runs one server until `stop` is set. Call `run` from the main thread.

    Args:
        server: not started yet. The caller closes it.
        scheduler, engine: names of the models.
        stop: set it, from any thread or a signal handler, to end `run`.
        on_serving: called after each start, once a token was generated.
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
        """Serve until `stop` is set, then stop the server.

        Raises:
            LaunchError: the first start failed in a way that a retry would not change, or too many
                starts in a row failed.
        """
        probe = Probe(self._server.http_url, self._scheduler, self._stop)
        try:
            try:
                self._start(probe)
            except (CrashError, LostError) as error:
                self._restart(probe, str(error), served_s=0.0)
            except NotReadyError as error:  # one retry: if it was only slow, more would not help
                self._log(
                    error_event("server_restarting", restarts=self.num_restarts, reason=str(error))
                )
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
        """Return why the server must be restarted, or None once `stop` is set."""
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
        """Kill and start the server, with back-off, until it serves or `stop` is set."""
        noticed = time.monotonic()
        if served_s >= self._limits.stable_s:
            self._num_failures = 0
        num_failed_starts = 0
        while not self._stop.is_set():
            self._log(error_event("server_restarting", restarts=self.num_restarts, reason=reason))
            try:
                self._renew(probe)
            except LostError as error:
                reason, num_failed_starts = str(error), 0
            except LaunchError as error:
                reason = str(error)
                num_failed_starts += 1
                if num_failed_starts >= self._limits.max_failed_starts:
                    self._log(
                        error_event("server_given_up", starts=num_failed_starts, reason=reason)
                    )
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
        finally:  # processes that have not ended may end meanwhile
            self._back_off()
        self.num_restarts += 1
        self._start(probe)

    def _back_off(self) -> None:
        """Wait before every restart but the first in a row, longer each time."""
        if self._num_failures:
            exponent = min(self._num_failures - 1, 16)
            self._stop.wait(min(self._limits.backoff_s * 2.0**exponent, self._limits.max_backoff_s))
        self._num_failures += 1


class Watch:
    """Watches a serving server until it must be restarted.

    Args:
        scheduler, engine: names of the models.
        stop: once set, the watch ends.
        log: gets one line per event.
    """

    def __init__(
        self,
        server: RunningServer,
        probe: Probe,
        *,
        scheduler: str,
        engine: str,
        limits: SupervisionLimits,
        stop: threading.Event,
        log: Callable[[str], None],
    ) -> None:
        self._server = server
        self._limits = limits
        self._stop = stop
        self._is_over = threading.Event()
        control = ModelControl(server, self._is_over)
        self._watchdog = Watchdog(server, leave=(engine,), stopped_s=limits.stopped_s)
        self._orphaned = OrphanedCalls(server, limits.orphaned_calls_s, log)
        self._repairs = Repairs(
            control,
            self._watchdog,
            self._orphaned,
            scheduler=scheduler,
            limits=limits,
            on_change=self._begin_anew,
            log=log,
        )
        self._endpoints = [
            EndpointWatch(server.http_url, model, limits)
            for model in probed_endpoints(server.repository)
        ]
        self._scheduler = SchedulerWatch(
            probe, control, scheduler=scheduler, engine=engine, limits=limits
        )

    def keep(self) -> str | None:
        """Return why the server must be restarted, or None once `stop` is set. Called once."""
        with contextlib.closing(self._watchdog):
            try:
                return self._keep()
            finally:
                self._is_over.set()

    def _keep(self) -> str | None:
        while not self._stop.wait(self._limits.watch_interval_s):
            now = time.monotonic()
            reason = self._look_at_processes(now) or self._scheduler.look(now)
            if reason is None:
                self._look_at_endpoints(now)
                reason = self._repairs.look(now) or self._orphaned.look(now)
            if reason is not None:
                return reason
        return None

    def _look_at_processes(self, now: float) -> str | None:
        if not self._server.is_running:
            return self._server.explain_end()
        for loss in self._watchdog.look(now):
            if loss.model == TRITONSERVER:
                return "tritonserver was stopped"
            if self._repairs.is_seen_to(loss.model, now):
                continue
            if self._watchdog.has_successors(loss.model):
                self._repairs.adopt(loss.model, now)
            else:
                self._repairs.begin(loss, now)
        return None

    def _look_at_endpoints(self, now: float) -> None:
        for endpoint in self._endpoints:
            # `generate` and others cannot answer without the scheduler.
            if self._scheduler.is_silent or self._repairs.is_seen_to(endpoint.model, now):
                endpoint.excuse(now)
            elif (kind := endpoint.look(now)) is not None:
                pids = [member.process.pid for member in self._watchdog.members(endpoint.model)]
                self._repairs.begin(Loss(endpoint.model, next(iter(pids), None), kind), now)

    def _begin_anew(self, model: str) -> None:
        for endpoint in self._endpoints:
            if endpoint.model == model:
                endpoint.forget(time.monotonic())


def wait_serving(
    server: Server,
    probe: Probe,
    timeout_s: float,
    stop: threading.Event | None = None,
    stopped_s: float = STOPPED_S,
) -> bool:
    """Wait until Triton is ready and steps run; False if `stop` was set.

    Raises:
        LostError: after clients could reach it the server or the scheduler's process ended, or
            tritonserver was stopped for `stopped_s` seconds.
        LaunchError: it ended or was stopped earlier, or was not ready within `timeout_s` seconds.
    """
    stop = stop or threading.Event()
    started = time.monotonic()
    server.wait_ready(timeout_s, stop, stopped_s)
    ready = time.monotonic()
    while not stop.is_set():
        result = probe.check(FIRST_TIMEOUT_S, lambda: server.raise_if_lost(stopped_s))
        if result.health is Health.SERVING:
            return True
        server.raise_if_lost(stopped_s)
        if result.health is Health.DEAD:
            raise LostError(f"the scheduler's process was lost: {result.detail}")
        now = time.monotonic()
        is_refusing = result.health is Health.REFUSING and now - ready > MAX_REFUSING_S
        if is_refusing or now - started > timeout_s:
            raise LaunchError(f"tritonserver is up, but does not serve: {result.detail}")
        stop.wait(0.1)
    return False
