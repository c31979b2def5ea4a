"""Repairs a running server: reloads lost models, or decides that the server must be restarted.

Owns the reaction to a loss, and how often it is tried. Must not know how a loss is noticed
(`judge`). Nothing here blocks: calls that take time run in the background, and their results are
taken at a later turn.

::

    loss ─► is the model to be served? ──no──► ignored; asked again `probe_interval_s` later
                   │ yes
                   ├─ the scheduler, or lost too often ───────────────────► restart of the server
                   └─ kill what is lost ─► unload, load, one model at a time ──fails──┘
                                              └─► its new processes are watched

If a model has several processes, only the lost ones are killed. The others finish their requests,
and Triton ends them. Triton does not if a request was lost with a process, so those left after
`drain_s` are killed as well. Calls that a lost process had not answered are orphaned: they end only
with the server.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import psutil

from charonia.errors import LaunchError
from charonia.events import error_event, event, warning_event
from charonia.supervision.server.background import in_background
from charonia.supervision.server.judge import Loss, SupervisionLimits, Watchdog
from charonia.supervision.server.model_control import ModelControl
from charonia.supervision.server.protocols import RunningServer

_RUNNING = ("charonia_requests_running", "charonia_requests_waiting")


class OrphanedCalls:
    """Calls that a lost process had not answered, and when the server is restarted to end them.

    They end only with the server (`supervision/open_calls.py`).

    Args:
        server: has the metrics that tell whether requests run.
        timeout_s: after this time the server is restarted even while other requests run.
        log: gets one line per model.
    """

    def __init__(self, server: RunningServer, timeout_s: float, log: Callable[[str], None]) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._log = log
        self._since: dict[str, float] = {}
        self._asked: Future[bool] | None = None

    def note(self, model: str, num_calls: int, now: float) -> None:
        """Note that a process of a model was lost with this many open calls."""
        if num_calls and model not in self._since:
            self._since[model] = now
            self._log(warning_event("calls_stranded", model=model, calls=num_calls))

    def look(self, now: float) -> str | None:
        """Return the reason to restart the server now, or None."""
        if not self._since:
            return None
        is_idle = False
        if self._asked is None:
            self._asked = in_background(self._is_idle)
        elif self._asked.done():
            is_idle, self._asked = self._asked.result(), None
        for model, since in self._since.items():
            if is_idle or now - since > self._timeout_s:
                return f"calls of the lost {model} process can end in no other way"
        return None

    def _is_idle(self) -> bool:
        found = self._server.metrics() or {}
        return all(found.get(name) == 0 for name in _RUNNING)


@dataclass
class _Case:
    """A loss under repair.

    Attributes:
        reloaded: gives the processes that replace the lost ones.
        ask_again_at: if the model is not to be served, when to ask again; else None.
    """

    loss: Loss
    since: float
    is_served: Future[bool]
    reloaded: Future[list[psutil.Process]] | None = None
    ask_again_at: float | None = None


class Repairs:
    """Repairs the models of one running server.

    Args:
        scheduler: name of the model that is never reloaded without the server.
        on_change: called with a model's name when its processes were replaced.
        log: gets one line per event.
    """

    def __init__(
        self,
        control: ModelControl,
        watchdog: Watchdog,
        orphaned: OrphanedCalls,
        *,
        scheduler: str,
        limits: SupervisionLimits,
        on_change: Callable[[str], None],
        log: Callable[[str], None],
    ) -> None:
        self._control = control
        self._watchdog = watchdog
        self._orphaned = orphaned
        self._scheduler = scheduler
        self._limits = limits
        self._on_change = on_change
        self._log = log
        self._cases: dict[str, _Case] = {}
        self._reloads: dict[str, list[float]] = {}  # when they began

    def is_seen_to(self, model: str, now: float) -> bool:
        """Return whether a loss of this model needs no action now."""
        case = self._cases.get(model)
        return case is not None and (case.ask_again_at is None or now < case.ask_again_at)

    def begin(self, loss: Loss, now: float) -> None:
        """Start the repair of a loss."""
        asked = in_background(lambda: self._control.is_served(loss.model))
        self._cases[loss.model] = _Case(loss, now, asked)

    def adopt(self, model: str, now: float) -> None:
        """Take over the processes of a model that somebody else has reloaded."""
        _kill(member.process for member in self._watchdog.members(model) if member.is_lost)
        self._note_open_calls(model, now)
        self._watchdog.adopt(model, now)
        self._on_change(model)

    def look(self, now: float) -> str | None:
        """Continue all repairs. Returns why the server must be restarted, or None."""
        _kill(self._watchdog.lingering(now, self._limits.drain_s))
        for case in list(self._cases.values()):
            reason = self._go_on(case, now) if case.reloaded is None else self._end(case, now)
            if reason is not None:
                return reason
        return None

    def _go_on(self, case: _Case, now: float) -> str | None:
        """Decide on a repair, once it is known whether the model should be served."""
        loss = case.loss
        if case.ask_again_at is not None or not case.is_served.done():
            return None
        if not case.is_served.result():
            self._note_open_calls(loss.model, now)
            case.ask_again_at = now + self._limits.probe_interval_s
            return None
        if loss.model == self._scheduler:
            self._log_loss(loss)
            return f"the {self._scheduler} process {loss.describe()}"
        if any(other.reloaded is not None for other in self._cases.values()):
            return None  # one at a time
        self._log_loss(loss)
        return self._reload(case, now)

    def _reload(self, case: _Case, now: float) -> str | None:
        model, limits = case.loss.model, self._limits
        recent = [at for at in self._reloads.get(model, ()) if now - at < limits.stable_s]
        if len(recent) >= limits.max_reloads:
            return f"the {model} process was lost {len(recent) + 1} times in a short time"
        self._reloads[model] = [*recent, now]
        members = self._watchdog.members(model)
        lost = [member for member in members if member.is_lost]
        doomed = members if case.loss.kind == "hung" or not lost else lost
        _kill(member.process for member in doomed)
        case.reloaded = in_background(
            lambda: self._control.reload(model, timeout_s=limits.replace_s)
        )
        return None

    def _end(self, case: _Case, now: float) -> str | None:
        """Start watching the new processes, once they exist."""
        assert case.reloaded is not None
        if not case.reloaded.done():
            return None
        model = case.loss.model
        try:
            processes = case.reloaded.result()
        except LaunchError as error:
            return str(error)
        del self._cases[model]
        self._note_open_calls(model, now)
        self._watchdog.take(model, processes, now)
        self._on_change(model)
        self._log(event("model_back", model=model, seconds=time.monotonic() - case.since))
        if not processes:
            self._log(warning_event("model_unwatched", model=model))
        return None

    def _note_open_calls(self, model: str, now: float) -> None:
        """Note the open calls of its lost processes, which take no new calls any more."""
        lost = [member for member in self._watchdog.members(model) if member.is_lost]
        self._orphaned.note(model, sum(member.num_open_calls for member in lost), now)

    def _log_loss(self, loss: Loss) -> None:
        self._log(error_event("process_lost", model=loss.model, kind=loss.kind, pid=loss.pid))


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # also ends stopped processes
