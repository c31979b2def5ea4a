"""Watches one started server: who is lost, and whether it can be brought back alone.

Owns when a process counts as lost. Must not know how a server is started or stopped, how a model is
brought back (`repairs.py`), nor what a model does. It never waits for an answer: whatever becomes
of a question, a process that is lost meanwhile is noticed.

::

    who               noticed by                             brought back
    tritonserver      its process; HTTP and gRPC silent      with all its models
                      for `server_hang_s`
    scheduler         its process; no probe answered         with the whole server, as nothing less
                      for `hang_s`                           ends its open streams
    engine            the scheduler                          by the scheduler
    engine that loads no process of it for                   with the whole server, as its load
                      `orphaned_load_s`                      never ends
    any other model   its process; some are asked, see       alone: killed, unloaded, loaded; with
    in Python         `doors`: silent for `model_hang_s`     the whole server where that fails

A process is looked at several times a second. It is lost when it is gone, or has been stopped for
`stopped_s`. Calls that a lost process was still to answer (`stranded.py`) can end in no other way
than with the server: as soon as no other request runs, at the latest after `stranded_s`.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from charonia.supervision.server.background import in_background
from charonia.supervision.server.doors import Inquiry, models_with_questions
from charonia.supervision.server.model_control import ModelControl
from charonia.supervision.server.probe import Health, Probe
from charonia.supervision.server.process_watchdog import TRITONSERVER, Loss, Watchdog
from charonia.supervision.server.protocols import RunningServer
from charonia.supervision.server.repairs import Repairs
from charonia.supervision.server.stranded import StrandedCalls
from charonia.supervision.server.timeouts import Silence, SupervisionLimits


@dataclass(frozen=True)
class _Finding:
    """What a probe found; where no answer came, who else answers; and where no step runs, whether
    nothing can come of the engine's load. An engine of which nothing is known is taken for loaded.
    """

    health: Health
    is_server_live: bool = True
    is_engine_loaded: bool = True
    is_load_orphaned: bool = False


class Watch:
    """Watches a server from when it serves until it must be restarted.

    Args:
        scheduler, engine: names of the models.
        stop: once set, nothing is waited for any more.
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
        self._probe = probe
        self._scheduler = scheduler
        self._engine = engine
        self._limits = limits
        self._stop = stop
        self._is_over = threading.Event()
        self._control = ModelControl(server, self._is_over)
        self._watchdog = Watchdog(server, leave=(engine,), stopped_s=limits.stopped_s)
        self._stranded = StrandedCalls(server.metrics, limits.stranded_s, log)
        self._repairs = Repairs(
            self._control,
            self._watchdog,
            self._stranded,
            scheduler=scheduler,
            limits=limits,
            on_change=self._begin_anew,
            log=log,
        )
        self._inquiries = [
            Inquiry(
                server.http_url,
                model,
                interval_s=limits.probe_interval_s,
                timeout_s=limits.probe_timeout_s,
                hang_s=limits.model_hang_s,
            )
            for model in models_with_questions(server.repository)
        ]
        self._examined: Future[_Finding] | None = None
        self._is_silent = False  # the scheduler, when it was last asked
        self._probed = self._live = time.monotonic()
        self._silence = Silence(limits, self._probed)
        self._orphaned_since: float | None = None  # the engine's load

    def keep(self) -> str | None:
        """Return why the server must be restarted, or None when `stop` is set. Called once."""
        with contextlib.closing(self._watchdog):
            try:
                return self._keep()
            finally:
                self._is_over.set()

    def _keep(self) -> str | None:
        while not self._stop.wait(self._limits.watch_interval_s):
            now = time.monotonic()
            reason = self._look(now) or self._ask_scheduler(now)
            if reason is None:
                self._ask_others(now)
                reason = self._repairs.look(now) or self._stranded.look(now)
            if reason is not None:
                return reason
        return None

    # ------------------------------------------------------------------ processes

    def _look(self, now: float) -> str | None:
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

    def _begin_anew(self, model: str) -> None:
        for inquiry in self._inquiries:
            if inquiry.model == model:
                inquiry.forget(time.monotonic())

    # ------------------------------------------------------------------ probes

    def _ask_scheduler(self, now: float) -> str | None:
        """Begin an examination when it is time, and judge it when it is done."""
        if self._examined is None:
            if now - self._probed >= self._limits.probe_interval_s:
                self._examined = in_background(self._examine)
            return None
        if not self._examined.done():
            return None
        finding, self._examined, self._probed = self._examined.result(), None, now
        if finding.health is Health.DEAD:
            return f"the {self._scheduler} process does not answer tritonserver"
        self._is_silent = finding.health is Health.SILENT
        if not self._is_silent:
            self._silence.note_answer(now)
        if finding.is_server_live:
            self._live = now
        elif now - self._live > self._limits.server_hang_s:
            return f"tritonserver has not answered for {now - self._live:.0f} s"
        if self._is_orphaned_for_long(finding, now):
            return f"tritonserver waits for a process of {self._engine} that does not run"
        if self._is_silent:
            excess = self._silence.note_silence(now, is_loaded=finding.is_engine_loaded)
            return None if excess is None else f"the {self._scheduler} {excess}"
        return None

    def _is_orphaned_for_long(self, finding: _Finding, now: float) -> bool:
        if not finding.is_load_orphaned:
            self._orphaned_since = None
            return False
        self._orphaned_since = self._orphaned_since or now
        return now - self._orphaned_since > self._limits.orphaned_load_s

    def _ask_others(self, now: float) -> None:
        for inquiry in self._inquiries:
            # `generate` cannot answer without the scheduler.
            if self._is_silent or self._repairs.is_seen_to(inquiry.model, now):
                inquiry.excuse(now)
            elif (kind := inquiry.look(now)) is not None:
                pids = [member.process.pid for member in self._watchdog.members(inquiry.model)]
                self._repairs.begin(Loss(inquiry.model, next(iter(pids), None), kind), now)

    def _examine(self) -> _Finding:
        health = self._probe.check(self._limits.probe_timeout_s).health
        if health is Health.REFUSING:
            is_orphaned = self._control.is_load_orphaned(self._engine)
            return _Finding(health, is_load_orphaned=is_orphaned)
        if health is not Health.SILENT:
            return _Finding(health)
        is_loaded = self._control.is_loaded(self._engine)
        return _Finding(health, is_loaded is not None, is_loaded is not False)
