"""Decides which processes count as lost, from the process table and the results of probes.

Owns the criteria for a loss, and all timeouts. Must not know the contents of probes (`probes`), or
the reaction to a loss (`repairs`, `supervisor`). Nothing here blocks: probes run in the background
and are judged when they are done.

::

    Watchdog         a process is gone, or has been stopped for longer than `stopped_s`
    SchedulerWatch   no probe of the scheduler was answered for `hang_s`, tritonserver did not
                     answer for `server_hang_s`, or the engine's load can never end
    EndpointWatch    another model did not answer for `model_hang_s`
"""

import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import psutil

from charonia.supervision.open_calls import OpenCallsOf
from charonia.supervision.process_table import Stops, is_stopped, process_state
from charonia.supervision.server.background import in_background
from charonia.supervision.server.model_control import ModelControl
from charonia.supervision.server.probes import (
    EndpointResult,
    Finding,
    Health,
    Probe,
    Reply,
    examine,
    probe_endpoint,
)
from charonia.supervision.server.protocols import RunningServer

TRITONSERVER = "tritonserver"
STOPPED_S = 2.0
"""Default for how long a process may be stopped."""


@dataclass(frozen=True, kw_only=True)
class SupervisionLimits:
    """Timeouts and limits of supervision. All times are in seconds.

    Attributes:
        start_s: for loading the models, until a token is generated.
        watch_interval_s: between two checks of the processes.
        stopped_s: how long a process may be stopped.
        probe_interval_s: between two probes. probe_timeout_s: of one probe.
        hang_s: how long the scheduler may not answer, counted at the earliest from when its engine
            was last found not loaded. Must be longer than the scheduler's own timeout for its
            engine, or both would act at once.
        reload_s: how long the scheduler may not answer while it reloads its engine.
        orphaned_load_s: how long an engine may be loading without having a process.
        model_hang_s: how long another model may not answer.
        server_hang_s: how long tritonserver may answer neither over HTTP nor over gRPC.
        replace_s: for unloading and reloading a lost model.
        drain_s: for the requests of a healthy process whose model is reloaded because of another
            process.
        max_reloads: of one model within `stable_s`. After one more loss the server is restarted.
        orphaned_calls_s: until the server is restarted to end orphaned calls, even while other
            requests run.
        stable_s: after serving this long, earlier failures are forgotten.
        backoff_s: before the second restart in a row. Doubles with each further one, up to
            `max_backoff_s`.
        max_failed_starts: this many in a row end the supervision. Nothing else does: a client that
            can crash the server repeatedly must not be able to end it for good.
    """

    start_s: float = 900.0
    watch_interval_s: float = 0.25
    stopped_s: float = STOPPED_S
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 5.0
    hang_s: float = 45.0
    reload_s: float = 900.0
    orphaned_load_s: float = 5.0
    model_hang_s: float = 60.0
    server_hang_s: float = 15.0
    replace_s: float = 60.0
    drain_s: float = 30.0
    max_reloads: int = 5
    orphaned_calls_s: float = 30.0
    stable_s: float = 60.0
    backoff_s: float = 1.0
    max_backoff_s: float = 10.0
    max_failed_starts: int = 5


@dataclass(frozen=True)
class Loss:
    """A process that does not serve.

    Attributes:
        model: its name, or `TRITONSERVER`. pid: of the process; None if unknown.
        kind: "died", "stopped" or "hung".
    """

    model: str
    pid: int | None
    kind: str

    def describe(self) -> str:
        """Describe what happened to the process, as a predicate for messages."""
        return {"died": "died", "stopped": "was stopped", "hung": "hangs"}[self.kind]


class Member:
    """A process of a model, and the number of its open calls."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self._open_calls = OpenCallsOf(process.pid)

    @property
    def is_lost(self) -> bool:
        """True if it has ended, or is stopped now."""
        return not _lives(self.process) or is_stopped(self.process.pid)

    @property
    def num_open_calls(self) -> int:
        """The number of open calls, even after its end."""
        return self._open_calls.count

    def close(self) -> None:
        """Release it."""
        self._open_calls.close()


@dataclass
class _Watched:
    """The processes that a model should have, and the number of them that it needs."""

    members: list[Member]
    num_needed: int


class Watchdog:
    """Watches the processes of one running server, once all its models are loaded.

    Args:
        leave: models that are supervised elsewhere.
        stopped_s: a process that has been stopped for longer is lost.
    """

    def __init__(self, server: RunningServer, leave: Collection[str], stopped_s: float) -> None:
        self._server = server
        self._stopped_s = stopped_s
        self._models: dict[str, _Watched] = {}
        self._dismissed: dict[Member, float] = {}  # and when
        self._stops = Stops()
        found = server.stubs()
        for file in server.repository.glob("*/1/model.py"):
            if (model := file.parents[1].name) not in leave:
                members = [Member(process) for process in found.get(model, [])]
                self._models[model] = _Watched(members, len(members))

    def members(self, model: str) -> list[Member]:
        """The processes that a model should have."""
        return list(self._models[model].members) if model in self._models else []

    def adopt(self, model: str, now: float) -> None:
        """Take over a model that somebody else has reloaded: its current processes are its members.

        Some of them may be ending, so the number that it needs is not changed.
        """
        self._models[model].members = self._exchange(model, self._running(model), now)

    def take(self, model: str, processes: Collection[psutil.Process], now: float) -> None:
        """Set the members of a model that was just loaded, and their number as the one it needs.

        A model without any is not watched any more.
        """
        members = self._exchange(model, processes, now)
        if members:
            self._models[model] = _Watched(members, len(members))
        else:
            self._models.pop(model, None)

    def close(self) -> None:
        """Release all members."""
        for watched in self._models.values():
            for member in watched.members:
                member.close()
        for member in self._dismissed:
            member.close()

    def look(self, now: float) -> list[Loss]:
        """All current losses, tritonserver's first."""
        losses = []
        if self._server.pid is not None and self._is_stopped_for_long(self._server.pid, now):
            losses.append(Loss(TRITONSERVER, self._server.pid, "stopped"))
        for model, watched in self._models.items():
            if not watched.members:  # it ended before the first check
                losses.append(Loss(model, None, "died"))
            for member in watched.members:
                process = member.process
                if not _lives(process):
                    losses.append(Loss(model, process.pid, "died"))
                elif self._is_stopped_for_long(process.pid, now):
                    losses.append(Loss(model, process.pid, "stopped"))
        return losses

    def has_successors(self, model: str) -> bool:
        """Return whether enough other processes run, because somebody has reloaded the model."""
        return len(self._running(model)) >= max(self._models[model].num_needed, 1)

    def lingering(self, now: float, drain_s: float) -> list[psutil.Process]:
        """Live processes that were replaced more than `drain_s` ago and have no open call."""
        return [
            member.process
            for member, since in self._dismissed.items()
            if now - since > drain_s and member.num_open_calls == 0 and _lives(member.process)
        ]

    def _running(self, model: str) -> list[psutil.Process]:
        dismissed = [member.process for member in self._dismissed]
        return [
            process
            for process in self._server.stubs().get(model, [])
            if process not in dismissed and _lives(process) and not is_stopped(process.pid)
        ]

    def _exchange(
        self, model: str, processes: Iterable[psutil.Process], now: float
    ) -> list[Member]:
        """Make the members for these processes of a model, and dismiss its other ones."""
        before = {member.process: member for member in self.members(model)}
        members = [
            before.pop(process) if process in before else Member(process) for process in processes
        ]
        for member in [one for one in self._dismissed if not _lives(one.process)]:
            del self._dismissed[member]
            member.close()
        self._dismissed |= dict.fromkeys(before.values(), now)
        return members

    def _is_stopped_for_long(self, pid: int, now: float) -> bool:
        return self._stops.seconds(pid, now) > self._stopped_s


def _lives(process: psutil.Process) -> bool:
    """Return whether it exists and is not a zombie: tritonserver does not reap its processes."""
    return process.is_running() and process_state(process.pid) is not None


class ResponseTimeout:
    """Timeout of the scheduler's answers.

    While its engine is reloading, no probe can be answered. That time counts towards `reload_s`,
    not towards `hang_s`.
    """

    def __init__(self, limits: SupervisionLimits, now: float) -> None:
        self._limits = limits
        self._answered = now
        self._unloaded = now  # when the engine was last found not loaded

    def note_answer(self, now: float) -> None:
        """Note an answer of the scheduler."""
        self._answered = now

    def note_no_answer(self, now: float, *, is_loaded: bool) -> str | None:
        """Note a missing answer; returns a description if the timeout has passed, else None.

        Args:
            is_loaded: whether its engine is loaded now.
        """
        if not is_loaded:
            self._unloaded = now
            silent_s, allowed_s = now - self._answered, self._limits.reload_s
        else:
            silent_s = now - max(self._answered, self._unloaded)
            allowed_s = self._limits.hang_s
        return f"has not answered for {silent_s:.0f} s" if silent_s > allowed_s else None


class SchedulerWatch:
    """Judges the scheduler and tritonserver, by probes in the background.

    Args:
        scheduler, engine: names of the models.

    Attributes:
        is_silent: whether the scheduler did not answer the last probe.
    """

    def __init__(
        self,
        probe: Probe,
        control: ModelControl,
        *,
        scheduler: str,
        engine: str,
        limits: SupervisionLimits,
    ) -> None:
        self._probe = probe
        self._control = control
        self._scheduler = scheduler
        self._engine = engine
        self._limits = limits
        self.is_silent = False
        self._examined: Future[Finding] | None = None
        self._probed = self._live = time.monotonic()
        self._timeout = ResponseTimeout(limits, self._probed)
        self._orphaned_since: float | None = None  # the engine's load

    def look(self, now: float) -> str | None:
        """Return the reason to restart the server, or None. Start the next probe when it is due."""
        if self._examined is None:
            if now - self._probed >= self._limits.probe_interval_s:
                self._examined = in_background(
                    lambda: examine(
                        self._probe, self._control, self._engine, self._limits.probe_timeout_s
                    )
                )
            return None
        if not self._examined.done():
            return None
        finding, self._examined, self._probed = self._examined.result(), None, now
        return self._judge(finding, now)

    def _judge(self, finding: Finding, now: float) -> str | None:
        if finding.health is Health.DEAD:
            return f"the {self._scheduler} process does not answer tritonserver"
        self.is_silent = finding.health is Health.SILENT
        if not self.is_silent:
            self._timeout.note_answer(now)
        if finding.is_server_live:
            self._live = now
        elif now - self._live > self._limits.server_hang_s:
            return f"tritonserver has not answered for {now - self._live:.0f} s"
        if self._is_orphaned_for_long(finding, now):
            return f"tritonserver waits for a process of {self._engine} that does not run"
        if self.is_silent:
            excess = self._timeout.note_no_answer(now, is_loaded=finding.is_engine_loaded)
            return None if excess is None else f"the {self._scheduler} {excess}"
        return None

    def _is_orphaned_for_long(self, finding: Finding, now: float) -> bool:
        if not finding.is_load_orphaned:
            self._orphaned_since = None
            return False
        self._orphaned_since = self._orphaned_since or now
        return now - self._orphaned_since > self._limits.orphaned_load_s


class EndpointWatch:
    """Judges one model other than the scheduler, by probes in the background."""

    def __init__(self, http_url: str, model: str, limits: SupervisionLimits) -> None:
        self.model = model
        self._http_url = http_url
        self._limits = limits
        self._probed: Future[EndpointResult] | None = None
        self._probed_at = self._answered_at = time.monotonic()

    def excuse(self, now: float) -> None:
        """Restart its timeout: it cannot answer because of another process."""
        self._answered_at = now

    def forget(self, now: float) -> None:
        """Start over: earlier probes were sent to other processes."""
        self._probed = None
        self._probed_at = self._answered_at = now

    def look(self, now: float) -> str | None:
        """Return how the model was lost, as `Loss.kind`, or None. Start the next probe when due."""
        if self._probed is None:
            if now - self._probed_at >= self._limits.probe_interval_s:
                self._probed_at = now
                self._probed = in_background(
                    lambda: probe_endpoint(self._http_url, self.model, self._limits.probe_timeout_s)
                )
        elif self._probed.done():
            result, self._probed = self._probed.result(), None
            if result.is_dead(self.model):
                return "died"
            if result.reply is not Reply.NOTHING:
                self._answered_at = now
        return "hung" if now - self._answered_at > self._limits.model_hang_s else None
