"""Looks at the server's processes in the process table: who is gone, who is stopped.

Owns who must be there, and for how long a process may be stopped. Must not know what is done about
a loss, nor talk to the server.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import psutil

from charonia.supervision.open_calls import OpenCallsOf
from charonia.supervision.process_table import Stops, is_stopped, status
from charonia.supervision.server.protocols import RunningServer

TRITONSERVER = "tritonserver"


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
    return process.is_running() and status(process.pid) != psutil.STATUS_ZOMBIE
