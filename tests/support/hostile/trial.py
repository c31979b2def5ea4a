"""One attack beside the neighbour, and what came of it.

Owns what is looked at before and after: the neighbour's answers, processes, memory, restarts. Must
not know what an attack does.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from charonia.launch.server.processes import SHARED_MEMORY
from charonia.launch.server.tritonserver import TritonServer
from support.e2e import wait_for, wait_idle
from support.hostile.neighbour import Answer, Neighbour, undisturbed
from support.hostile.target import Attack, Target

MODELS = ("engine", "generate", "postprocessor", "scheduler", "tokenizer")
SERVER, SHARED = OF_TRITON = ("tritonserver", "/dev/shm")
KEPT_BYTES, KEPT_BY_TRITON_BYTES = 96 * 2**20, 2**28
"""Growth of a process that may remain: an allocator keeps what it has, for the next time."""
SETTLE_S = 30.0
MAX_MORE_FDS = 16

Run = Callable[[Attack, Target, int], None]


@dataclass(frozen=True)
class Watch:
    """A server at one moment, at rest.

    Attributes:
        pids: by role; those of a model with several processes in order.
        num_bytes: of each process's own memory, and of all shared memory.
        num_fds: open files and connections of each process.
        num_restarts: of the engine.
    """

    pids: dict[str, int]
    num_bytes: dict[str, int]
    num_fds: dict[str, int]
    num_restarts: int

    @classmethod
    def of(cls, server: TritonServer) -> "Watch":
        """Look at a server, when it has nothing to do."""
        samples = wait_idle(server)
        assert server.pid is not None
        pids = {SERVER: server.pid}
        for model in MODELS:
            pids |= {f"{model} {index}": pid for index, pid in enumerate(server.pids(model))}
        num_fds = {role: psutil.Process(pid).num_fds() for role, pid in pids.items()}
        num_restarts = int(samples["charonia_engine_restarts_total"])
        return cls(pids, _memory(server, pids), num_fds, num_restarts)

    def growth(self, before: "Watch") -> dict[str, int]:
        """Bytes more than before, of what there was before."""
        return _more(self.num_bytes, before.num_bytes)

    def excess(self, before: "Watch") -> dict[str, int]:
        """The growth of those that have grown too much."""
        return excess_of(self.growth(before))

    def left_open(self, before: "Watch") -> dict[str, int]:
        """Files and connections more than before, of processes that have too many more."""
        more = _more(self.num_fds, before.num_fds)
        return {role: num for role, num in more.items() if num > MAX_MORE_FDS}


@dataclass(frozen=True)
class Outcome:
    """Outcome of an attack.

    Attributes:
        attack: its name. seconds: its time. failure: forbidden result that it got.
        num_requests: of the neighbour meanwhile. noticed: how their answers differ from those
            without the attack. slowdown: the median time of one, in that of one without the attack.
        growth: bytes by process. excess: that of those which have grown too much.
        left_open: files and connections, by process, that are too many more than before.
        num_restarts: of the engine. replaced: processes that are others now, or gone.
    """

    attack: str
    seconds: float
    failure: str | None
    num_requests: int
    noticed: str | None
    slowdown: float
    growth: dict[str, int]
    excess: dict[str, int]
    left_open: dict[str, int]
    num_restarts: int
    replaced: list[str]


class Arena:
    """A server that is attacked again and again.

    Args:
        run: how an attack is run, e.g. in another process.
    """

    def __init__(
        self,
        server: TritonServer,
        run: Run = lambda attack, target, strength: attack.run(target, strength),
    ) -> None:
        self._server = server
        self._run = run
        self._expected = undisturbed(server).answers[0]
        self._watch = Watch.of(server)

    def trial(self, attack: Attack, strength: int = 1) -> Outcome:
        """Attack it beside the neighbour. What the attack leaves is there when the next begins."""
        before, failure = self._watch, None
        alone = undisturbed(self._server)
        started = time.monotonic()
        with Neighbour(self._server) as neighbour:
            try:
                self._run(attack, Target.of(self._server), strength)
            except AssertionError as error:
                failure = str(error)
            seconds = time.monotonic() - started
        self._watch = after = self._settled(before)
        return Outcome(
            attack=attack.name,
            seconds=seconds,
            failure=failure,
            num_requests=len(neighbour.answers),
            noticed=_noticed(alone, self._expected) or _noticed(neighbour, self._expected),
            slowdown=neighbour.median_s / alone.median_s,
            growth=after.growth(before),
            excess=after.excess(before),
            left_open=after.left_open(before),
            num_restarts=after.num_restarts - before.num_restarts,
            replaced=sorted(
                role for role, pid in before.pids.items() if after.pids.get(role) != pid
            ),
        )

    def _settled(self, before: Watch) -> Watch:
        """The server when its memory has come back, or does not."""
        return wait_for(
            lambda: Watch.of(self._server),
            lambda after: not after.excess(before) and not after.left_open(before),
            SETTLE_S,
        )


def excess_of(growth: Mapping[str, int]) -> dict[str, int]:
    """Return the growth of each that has grown by more bytes than allocators keep."""
    return {
        role: num_bytes
        for role, num_bytes in growth.items()
        if num_bytes > (KEPT_BY_TRITON_BYTES if role in OF_TRITON else KEPT_BYTES)
    }


def _noticed(neighbour: Neighbour, expected: Answer) -> str | None:
    """Describe how the neighbour's answers differ from the expected ones."""
    if neighbour.error is not None:
        return f"{type(neighbour.error).__name__}: {neighbour.error}"
    wrong = [answer for answer in neighbour.answers if answer != expected]
    return f"{len(wrong)} wrong answers, the first {wrong[0]}" if wrong else None


def _more(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {role: num - before[role] for role, num in now.items() if role in before}


def _memory(server: TritonServer, pids: dict[str, int]) -> dict[str, int]:
    """Bytes that are each process's alone, and those of the server's shared memory."""
    num_bytes = {role: psutil.Process(pid).memory_full_info().uss for role, pid in pids.items()}
    files = SHARED_MEMORY.glob(f"{server.runtime_dir.name}*")
    return num_bytes | {SHARED: sum(path.stat().st_blocks * 512 for path in files)}
