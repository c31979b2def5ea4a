"""Looks at the server's processes in the process table: who is gone, who is stopped.

Owns who must be there, and for how long a process may be stopped. Must not know what is done about
a loss, nor talk to the server.

A process that a debugger holds is no loss: the kernel calls that a tracing stop.
"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import psutil

from charonia.launch.server import TritonServer
from charonia.serving.open_calls import OpenCallsOf

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


class Lookout:
    """Watches one started server, from when all its models are loaded.

    Args:
        leave: models that somebody else looks after.
        stopped_s: a process that has been stopped for longer is lost.
    """

    def __init__(self, server: TritonServer, leave: Collection[str], stopped_s: float) -> None:
        self._server = server
        self._leave = frozenset(leave)
        self._stopped_s = stopped_s
        self._known: dict[str, list[psutil.Process]] = {}
        self._open_calls: dict[str, list[OpenCallsOf]] = {}
        self._stopped_since: dict[int, float] = {}
        for file in server.repository.glob("*/1/model.py"):
            if (model := file.parents[1].name) not in self._leave:
                self.adopt(model)

    def adopt(self, model: str) -> None:
        """Take the processes that the model has now for those that it must have."""
        for calls in self._open_calls.pop(model, []):
            calls.close()
        self._known[model] = self._server.stubs().get(model, [])
        self._open_calls[model] = [OpenCallsOf(process.pid) for process in self._known[model]]

    def processes(self, model: str) -> list[psutil.Process]:
        """Those that it must have."""
        return self._known.get(model, [])

    def num_open_calls(self, model: str) -> int:
        """How many calls these are still to answer, or were when they were lost."""
        return sum(calls.count for calls in self._open_calls.get(model, []))

    def close(self) -> None:
        """Let go of what was learned of the processes."""
        for calls in itertools.chain.from_iterable(self._open_calls.values()):
            calls.close()

    def look(self, now: float) -> list[Loss]:
        """All losses at this moment, tritonserver's first."""
        losses = []
        if self._server.pid is not None and self._is_stopped_for_long(self._server.pid, now):
            losses.append(Loss(TRITONSERVER, self._server.pid, "stopped"))
        for model, processes in self._known.items():
            if not processes:  # it ended before anybody looked
                losses.append(Loss(model, None, "died"))
            for process in processes:
                if not _lives(process):
                    losses.append(Loss(model, process.pid, "died"))
                elif self._is_stopped_for_long(process.pid, now):
                    losses.append(Loss(model, process.pid, "stopped"))
        return losses

    def has_successors(self, model: str) -> bool:
        """Whether others run in place of what was lost: somebody has loaded the model again."""
        found = self._server.stubs().get(model, [])
        running = [one for one in found if _lives(one) and not _is_stopped(one.pid)]
        return len(running) >= max(len(self._known[model]), 1)

    def _is_stopped_for_long(self, pid: int, now: float) -> bool:
        if not _is_stopped(pid):
            self._stopped_since.pop(pid, None)
            return False
        return now - self._stopped_since.setdefault(pid, now) > self._stopped_s


def _lives(process: psutil.Process) -> bool:
    """Whether it is there, and no zombie: tritonserver does not reap what was its process."""
    return process.is_running() and _status(process.pid) != psutil.STATUS_ZOMBIE


def _is_stopped(pid: int) -> bool:
    return _status(pid) == psutil.STATUS_STOPPED


def _status(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None
