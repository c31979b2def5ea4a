"""Watches one started server: who is lost, and whether it can be brought back alone.

Owns when a process counts as lost and what is done then. Must not know how a server is started or
stopped, nor what a model does.

::

    who               noticed by                             brought back
    tritonserver      its process; HTTP and gRPC silent      with all its models
                      for `server_hang_s`
    scheduler         its process; no probe answered         with the whole server, as nothing less
                      for `hang_s`                           ends its open streams
    engine            the scheduler                          by the scheduler
    any other model   its process; the project's own also    alone: killed, unloaded, loaded; with
    in Python         unanswered for `model_hang_s`          the whole server where that fails

A process is looked at several times a second. It is lost when it is gone, or has been stopped for
`stopped_s`. Calls that a lost process was still to answer (`serving/open_calls.py`) can end in no
other way than with the server: as soon as no other request runs, at the latest after `stranded_s`.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from charonia.events import event
from charonia.launch.background import in_background
from charonia.launch.doors import QUESTIONS, Inquiry
from charonia.launch.errors import LaunchError
from charonia.launch.lookout import TRITONSERVER, Lookout, Loss
from charonia.launch.metrics_page import read_metrics
from charonia.launch.model_control import ModelControl
from charonia.launch.patience import Silence, SupervisionLimits
from charonia.launch.probe import Health, Probe
from charonia.launch.server import TritonServer

_RUNNING = ("charonia_requests_running", "charonia_requests_waiting")


@dataclass(frozen=True)
class _Finding:
    """What a probe found, and where no answer came, who else answers. An engine of which nothing
    is known is taken for loaded."""

    health: Health
    is_server_live: bool = True
    is_engine_loaded: bool = True


class Watch:
    """Watches a server from when it serves until it must be restarted.

    Args:
        scheduler, engine: names of the models.
        stop: once set, nothing is waited for any more.
        log: gets one line per event.
    """

    def __init__(
        self,
        server: TritonServer,
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
        self._log = log
        self._control = ModelControl(server, stop)
        self._lookout = Lookout(server, leave=(engine,), stopped_s=limits.stopped_s)
        self._inquiries = [
            Inquiry(
                server.http_url,
                model,
                interval_s=limits.probe_interval_s,
                timeout_s=limits.probe_timeout_s,
                hang_s=limits.model_hang_s,
            )
            for model in QUESTIONS
            if (server.repository / model / "1" / "model.py").exists()
        ]
        self._stranded: dict[str, float] = {}  # models that left calls open, and since when
        self._examined: Future[_Finding] | None = None
        self._is_silent = False  # the scheduler, when it was last asked
        self._probed = self._live = time.monotonic()
        self._silence = Silence(limits, self._probed)

    def keep(self) -> str | None:
        """Return why the server must be restarted, or None when `stop` is set. Called once."""
        with contextlib.closing(self._lookout):
            return self._keep()

    def _keep(self) -> str | None:
        while not self._stop.wait(self._limits.watch_interval_s):
            now = time.monotonic()
            reason = (
                self._look(now)
                or self._ask_scheduler(now)
                or self._ask_others(now)
                or self._end_stranded(now)
            )
            if reason is not None:
                return reason
        return None

    # ------------------------------------------------------------------ processes

    def _look(self, now: float) -> str | None:
        if not self._server.is_running:
            return self._server.explain_end()
        for loss in self._lookout.look(now):
            if loss.model == TRITONSERVER:
                return "tritonserver was stopped"
            self._note_open_calls(loss.model, now)
            if not self._control.is_served(loss.model):
                continue  # an operator has unloaded it, or loads another
            if self._lookout.has_successors(loss.model):
                self._adopt(loss.model)
                continue
            return self._replace(loss, now)
        return None

    def _replace(self, loss: Loss, now: float) -> str | None:
        self._log(event("process_lost", model=loss.model, kind=loss.kind, pid=loss.pid))
        if loss.model == self._scheduler:
            return f"the {self._scheduler} process {loss.describe()}"
        try:
            self._control.replace(
                loss.model,
                self._lookout.processes(loss.model),
                timeout_s=self._limits.replace_s,
            )
        except LaunchError as error:
            return str(error)
        self._adopt(loss.model)
        self._log(event("model_back", model=loss.model, seconds=time.monotonic() - now))
        return None

    def _adopt(self, model: str) -> None:
        """Look after the processes that the model has now, and no more after those before."""
        self._lookout.adopt(model)
        for inquiry in self._inquiries:
            if inquiry.model == model:
                inquiry.forget(time.monotonic())

    def _note_open_calls(self, model: str, now: float) -> None:
        """Remember a model that is lost, or about to be killed, if it was still to answer calls."""
        num_calls = self._lookout.num_open_calls(model)
        if num_calls and model not in self._stranded:
            self._stranded[model] = now
            self._log(event("calls_stranded", model=model, calls=num_calls))

    def _end_stranded(self, now: float) -> str | None:
        """Whether to restart the server for calls that nothing else ends."""
        for model, since in self._stranded.items():
            if now - since > self._limits.stranded_s or self._is_idle():
                return f"calls of the lost {model} process can end in no other way"
        return None

    def _is_idle(self) -> bool:
        found = read_metrics(self._server.metrics_url) or {}
        return bool(found) and not any(found.get(name) for name in _RUNNING)

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
        if self._is_silent:
            excess = self._silence.note_silence(now, is_loaded=finding.is_engine_loaded)
            return None if excess is None else f"the {self._scheduler} {excess}"
        return None

    def _ask_others(self, now: float) -> str | None:
        for inquiry in self._inquiries:
            if self._is_silent:
                inquiry.excuse(now)  # `generate` cannot answer without the scheduler
            elif (kind := inquiry.look(now)) is not None:
                inquiry.excuse(now)
                self._note_open_calls(inquiry.model, now)
                pids = [process.pid for process in self._lookout.processes(inquiry.model)]
                return self._replace(Loss(inquiry.model, next(iter(pids), None), kind), now)
        return None

    def _examine(self) -> _Finding:
        health = self._probe.check(self._limits.probe_timeout_s).health
        if health is not Health.SILENT:
            return _Finding(health)
        is_loaded = self._control.is_loaded(self._engine)
        return _Finding(health, is_loaded is not None, is_loaded is not False)
