"""Keeps a tritonserver serving: first start, probes, restarts, a clean end.

Owns when a server counts as broken and how often it may be restarted. Must not know how a server is
started, nor what a model does: a `Probe` asks it for one token.

::

    start ─► wait until a token comes ─► watch ──(stop requested)──► stop, return
      ▲                                    │
      └── back-off ◄── kill everything ◄───┘ the server or the scheduler's process is gone, or
             │                               no probe was answered for `hang_s`
             └─► too many quick failures: stop, raise LaunchError

What counts is the probe. That the scheduler's process changed (it is looked at several times a
second) only makes the next probe come at once.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from charonia.events import event
from charonia.launch.errors import LaunchError
from charonia.launch.probe import Health, Probe, wait_serving
from charonia.launch.server import TritonServer


@dataclass(frozen=True, kw_only=True)
class SupervisionLimits:
    """All times in seconds.

    Attributes:
        start_s: for loading the models until a token comes.
        probe_interval_s: between two probes; probe_timeout_s: of one.
        watch_interval_s: between two looks at processes.
        hang_s: without any answer of the scheduler, and since its engine was last seen not loaded;
            longer than the deadline that the scheduler itself sets its engine, or both would act
            at once.
        reload_s: without any answer while the engine is not loaded: the scheduler is then reloading
            it.
        stable_s: a server that served so long has made up for earlier failures.
        max_quick_failures: this many in a row end the supervision.
        backoff_s: before the second of them in a row; doubles with each one more.
    """

    start_s: float = 900.0
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 5.0
    watch_interval_s: float = 0.25
    hang_s: float = 45.0
    reload_s: float = 900.0
    stable_s: float = 60.0
    max_quick_failures: int = 5
    backoff_s: float = 1.0


class Silence:
    """How long the scheduler has been silent, and for how long it may be.

    While its engine is loaded anew, nobody can be answered; that does not count as silence of a
    scheduler whose engine is loaded again.
    """

    def __init__(self, limits: SupervisionLimits, now: float) -> None:
        self._limits = limits
        self._answered = now
        self._unloaded = now  # when the engine was last seen so

    def note_answer(self, now: float) -> None:
        """The scheduler has answered."""
        self._answered = now

    def note_silence(self, now: float, *, is_loaded: bool) -> str | None:
        """No answer came; returns what to say when that is so for too long, else None.

        Args:
            is_loaded: whether its engine is, at this moment.
        """
        if not is_loaded:
            self._unloaded = now
            silent_s, allowed_s = now - self._answered, self._limits.reload_s
        else:
            silent_s = now - max(self._answered, self._unloaded)
            allowed_s = self._limits.hang_s
        return f"has not answered for {silent_s:.0f} s" if silent_s > allowed_s else None


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
        server: TritonServer,
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
        self._quick_failures = 0
        self.num_restarts = 0

    def run(self) -> None:
        """Serve until `stop` is set; the server is stopped then.

        Raises:
            LaunchError: the first start failed, or too many failures in a row.
        """
        probe = Probe(self._server.http_url, self._scheduler, self._stop)
        try:
            self._start(probe)
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
        if wait_serving(self._server, probe, self._limits.start_s, self._stop):
            self._on_serving()

    def _watch(self, probe: Probe) -> str | None:
        """Return why the server must be restarted, or None when `stop` is set."""
        known = self._scheduler_state()
        probed = time.monotonic()
        silence = Silence(self._limits, probed)
        while not self._stop.wait(self._limits.watch_interval_s):
            if not self._server.is_running:
                return self._server.explain_end()
            state, now = self._scheduler_state(), time.monotonic()
            if state == known and now - probed < self._limits.probe_interval_s:
                continue
            known = state
            result = probe.check(self._limits.probe_timeout_s)
            probed = time.monotonic()
            if result.health is Health.DEAD:
                return f"the {self._scheduler} process died or was stopped"
            if result.health is not Health.SILENT:
                silence.note_answer(probed)
            elif excess := silence.note_silence(probed, is_loaded=probe.is_loaded(self._engine)):
                return f"the {self._scheduler} {excess}"
        return None

    def _scheduler_state(self) -> list[tuple[int, bool]]:
        """Pid of each scheduler process, and whether it is stopped."""
        state = []
        for process in self._server.model_processes(self._scheduler):
            try:
                state.append((process.pid, process.status() == psutil.STATUS_STOPPED))
            except psutil.NoSuchProcess:
                continue
        return state

    def _restart(self, probe: Probe, reason: str, served_s: float) -> None:
        """Kill the server and start it, with back-off, until it serves or `stop` is set."""
        limits = self._limits
        noticed = time.monotonic()
        if served_s >= limits.stable_s:
            self._quick_failures = 0
        while not self._stop.is_set():
            self._quick_failures += 1
            if self._quick_failures > limits.max_quick_failures:
                self._log(event("server_given_up", failures=self._quick_failures, reason=reason))
                raise LaunchError(
                    f"gave up after {self._quick_failures} failures in a row; last: {reason}"
                )
            self._log(event("server_restarting", restarts=self.num_restarts, reason=reason))
            self._server.kill()
            if self._quick_failures > 1:
                self._stop.wait(limits.backoff_s * 2.0 ** (self._quick_failures - 2))
            self.num_restarts += 1
            try:
                self._start(probe)
            except LaunchError as error:
                reason = str(error)
            else:
                self._log(event("server_back", seconds=time.monotonic() - noticed))
                return
