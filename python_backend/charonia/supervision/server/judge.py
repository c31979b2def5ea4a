"""Judges who counts as lost, from the process table and from what probes find.

Owns when somebody counts as lost, and all timeouts. Must not know what is asked (`probes`), nor
what is done about a loss (`repairs`, `supervisor`). Nothing here waits for an answer: a probe runs
in the background, and is judged when it is done.

::

    Watchdog         a process is gone, or has been stopped for longer than `stopped_s`
    SchedulerWatch   no probe of the scheduler was answered for `hang_s`, tritonserver did not
                     answer for `server_hang_s`, or the engine's load can never end
    EndpointWatch    another model did not answer for `model_hang_s`
"""

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import psutil

from charonia.supervision.open_calls import OpenCallsOf
from charonia.supervision.process_table import Stops, is_stopped, process_state
from charonia.supervision.server.background import in_background
from charonia.supervision.server.probes import (
    EndpointResult,
    Finding,
    Health,
    Reply,
    probe_endpoint,
)
from charonia.supervision.server.protocols import RunningServer

TRITONSERVER = "tritonserver"
STOPPED_S = 2.0
"""For how long a process may be stopped, unless something else is said."""


@dataclass(frozen=True, kw_only=True)
class SupervisionLimits:
    """All times in seconds.

    Attributes:
        start_s: for loading the models until a token comes.
        watch_interval_s: between two looks at processes.
        stopped_s: for how long a process may be stopped.
        probe_interval_s: between two probes; probe_timeout_s: of one.
        hang_s: without any answer of the scheduler, and since its engine was last seen not loaded;
            longer than the deadline that the scheduler itself sets its engine, or both would act
            at once.
        reload_s: without any answer while the engine is not loaded: the scheduler is then reloading
            it.
        orphaned_load_s: for how long an engine may be loading without a process of it.
        model_hang_s: without any answer of another model.
        server_hang_s: without any answer of tritonserver, over HTTP and over gRPC.
        replace_s: for unloading a lost model and loading it again.
        drain_s: for what a healthy process has in hand whose model is loaded again for another.
        max_reloads: of one model within `stable_s`; where it is lost once more, the server is
            restarted.
        orphaned_calls_s: until the server is restarted to end the calls that were open in a lost
            process, while other requests run.
        stable_s: a server that served so long has made up for earlier failures.
        backoff_s: before the second restart in a row; doubles with each one more, up to
            `max_backoff_s`.
        max_failed_starts: this many in a row end the supervision. Nothing else does: whoever can
            end a server time and again must not be able to end it for good.
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
        model: its name, or `TRITONSERVER`. pid: one of its own, where it is known.
        kind: "died", "stopped" or "hung".
    """

    model: str
    pid: int | None
    kind: str

    def describe(self) -> str:
        """What happened to the process, as the end of a sentence."""
        return {"died": "died", "stopped": "was stopped", "hung": "hangs"}[self.kind]


class Member:
    """A process of a model, and how many calls it is still to answer."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self._open_calls = OpenCallsOf(process.pid)

    @property
    def is_lost(self) -> bool:
        """Whether it is gone, or stopped at this moment."""
        return not _lives(self.process) or is_stopped(self.process.pid)

    @property
    def num_open_calls(self) -> int:
        """How many, or how many they were at its end."""
        return self._open_calls.count

    def close(self) -> None:
        """Let go of it."""
        self._open_calls.close()


class Watchdog:
    """Watches one started server, from when all its models are loaded.

    Args:
        leave: models that somebody else looks after.
        stopped_s: a process that has been stopped for longer is lost.
    """

    def __init__(self, server: RunningServer, leave: Collection[str], stopped_s: float) -> None:
        self._server = server
        self._stopped_s = stopped_s
        self._members: dict[str, list[Member]] = {}
        self._num_needed: dict[str, int] = {}
        self._dismissed: dict[Member, float] = {}  # and since when
        self._stops = Stops()
        found = server.stubs()
        for file in server.repository.glob("*/1/model.py"):
            if (model := file.parents[1].name) not in leave:
                self._members[model] = [Member(process) for process in found.get(model, [])]
                self._num_needed[model] = len(self._members[model])

    def members(self, model: str) -> list[Member]:
        """Those that it must have."""
        return list(self._members.get(model, ()))

    def adopt(self, model: str, now: float) -> None:
        """Somebody has loaded the model: take the processes that it has now for its members.

        Some of them may be on their way out, so how many it needs stays as it is.
        """
        self._replace_members(model, self._running(model), now)

    def take(self, model: str, processes: Collection[psutil.Process], now: float) -> None:
        """Take these for its members, and as many for what it needs; it has just been loaded.

        A model that has none is watched no more.
        """
        self._replace_members(model, processes, now)
        self._num_needed[model] = len(processes)
        if not processes:
            del self._members[model]

    def close(self) -> None:
        """Let go of what was learned of the processes."""
        for members in (*self._members.values(), self._dismissed):
            for member in members:
                member.close()

    def look(self, now: float) -> list[Loss]:
        """All losses at this moment, tritonserver's first."""
        losses = []
        if self._server.pid is not None and self._is_stopped_for_long(self._server.pid, now):
            losses.append(Loss(TRITONSERVER, self._server.pid, "stopped"))
        for model, members in self._members.items():
            if not members:  # it ended before anybody looked
                losses.append(Loss(model, None, "died"))
            for member in members:
                process = member.process
                if not _lives(process):
                    losses.append(Loss(model, process.pid, "died"))
                elif self._is_stopped_for_long(process.pid, now):
                    losses.append(Loss(model, process.pid, "stopped"))
        return losses

    def has_successors(self, model: str) -> bool:
        """Whether enough others run: somebody has loaded the model again."""
        return len(self._running(model)) >= max(self._num_needed[model], 1)

    def lingering(self, now: float, drain_s: float) -> list[psutil.Process]:
        """Processes that were replaced longer ago, still live and have no call to answer."""
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

    def _replace_members(self, model: str, processes: Iterable[psutil.Process], now: float) -> None:
        before = {member.process: member for member in self.members(model)}
        self._members[model] = [
            before.pop(process) if process in before else Member(process) for process in processes
        ]
        for member in [one for one in self._dismissed if not _lives(one.process)]:
            del self._dismissed[member]
            member.close()
        self._dismissed |= dict.fromkeys(before.values(), now)

    def _is_stopped_for_long(self, pid: int, now: float) -> bool:
        return self._stops.seconds(pid, now) > self._stopped_s


def _lives(process: psutil.Process) -> bool:
    """Whether it is there, and no zombie: tritonserver does not reap what was its process."""
    return process.is_running() and process_state(process.pid) is not None


class ResponseTimeout:
    """Since when the scheduler has not answered, and for how long it need not.

    While its engine is loaded anew, nobody can be answered. That time counts for `reload_s` alone,
    and not for `hang_s`.
    """

    def __init__(self, limits: SupervisionLimits, now: float) -> None:
        self._limits = limits
        self._answered = now
        self._unloaded = now  # when the engine was last seen so

    def note_answer(self, now: float) -> None:
        """The scheduler has answered."""
        self._answered = now

    def note_no_answer(self, now: float, *, is_loaded: bool) -> str | None:
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


class SchedulerWatch:
    """Judges the scheduler, and tritonserver behind it, by probes in the background.

    Args:
        examine: probes them once; it is called in another thread.
        scheduler, engine: names of the models.

    Attributes:
        is_silent: whether the scheduler did not answer when it was last probed.
    """

    def __init__(
        self,
        examine: Callable[[], Finding],
        *,
        scheduler: str,
        engine: str,
        limits: SupervisionLimits,
    ) -> None:
        self._examine = examine
        self._scheduler = scheduler
        self._engine = engine
        self._limits = limits
        self.is_silent = False
        self._examined: Future[Finding] | None = None
        self._probed = self._live = time.monotonic()
        self._timeout = ResponseTimeout(limits, self._probed)
        self._orphaned_since: float | None = None  # the engine's load

    def look(self, now: float) -> str | None:
        """Why the server must be restarted, or None. Probes again when it is time."""
        if self._examined is None:
            if now - self._probed >= self._limits.probe_interval_s:
                self._examined = in_background(self._examine)
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
    """Judges one model beside the scheduler by probes in the background."""

    def __init__(self, http_url: str, model: str, limits: SupervisionLimits) -> None:
        self.model = model
        self._http_url = http_url
        self._limits = limits
        self._probed: Future[EndpointResult] | None = None
        self._probed_at = self._answered_at = time.monotonic()

    def excuse(self, now: float) -> None:
        """Take what came so far for answered: somebody else keeps it from answering."""
        self._answered_at = now

    def forget(self, now: float) -> None:
        """Begin anew: what was asked so far, other processes were asked."""
        self._probed = None
        self._probed_at = self._answered_at = now

    def look(self, now: float) -> str | None:
        """Whether the model is lost, as `Loss.kind`. Probes again when it is time."""
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
