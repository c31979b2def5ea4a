"""The kinds of faults, and how each is brought about.

Owns what is done to the engine. Must not know the streams that suffer from it.
"""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from charonia.launch.server import TritonServer
from faults.footprint import ranks_of
from faults.lanes import Request
from support.faults import order_fault
from support.live_stream import LiveStream

Kind = Literal["kill", "stop", "exception", "memory", "poison"]
KINDS: dict[Kind, str] = {
    "kill": "kill -9",
    "stop": "SIGSTOP",
    "exception": "exception in a step",
    "memory": "out of memory in a step",
    "poison": "poisoned request",
}
SAID_OF_POISON = "the request stops the engine each time it runs"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ORDERS = {"exception": "raise-in-step", "memory": "exhaust-memory"}
_DEATHS_OF_POISON = 3  # two with all others, and one alone
MAX_DEATHS: dict[Kind, int] = {
    "kill": 1,
    "stop": 1,
    "exception": 1,
    "memory": 1,
    "poison": _DEATHS_OF_POISON,
}
"""Engines that one fault may cost."""


@dataclass(frozen=True)
class Strike:
    """A fault that has been brought about.

    Attributes:
        victim: which of the engine's processes was struck, 0 is rank 0; None by a poisoned request.
        at: `time.monotonic`. min_deaths: engines that it costs at least.
        poisoned: the request that kills. order: gone when it was obeyed.
    """

    kind: Kind
    at: float
    min_deaths: int
    victim: int | None = None
    poisoned: LiveStream | None = None
    order: Path | None = None

    @property
    def ended_at(self) -> float | None:
        """When the last of it broke, or None: a poisoned request kills until it is answered."""
        return self.at if self.poisoned is None else self.poisoned.ended_at

    @property
    def is_answered_right(self) -> bool:
        """Whether a poisoned request got the error that it should, and no token."""
        if self.poisoned is None:
            return True
        return SAID_OF_POISON in (self.poisoned.error or "") and not self.poisoned.token_ids

    def has_struck(self, num_deaths: int) -> bool:
        """Whether it broke what it should, given how many engines were lost to it."""
        was_obeyed = self.order is None or not self.order.exists()
        return was_obeyed and num_deaths >= self.min_deaths


def strike(kind: Kind, server: TritonServer, poisoned: Request, draw: random.Random) -> Strike:
    """Bring a fault about, on a random victim.

    Args:
        poisoned: a request that kills the engine, in case it is wanted.
    """
    at = time.monotonic()
    if kind == "poison":
        return Strike(kind, at, _DEATHS_OF_POISON, poisoned=poisoned.send(urls_of(server)))
    ranks = ranks_of(server)
    victim = draw.randrange(len(ranks))
    pid = ranks[victim].pid
    if kind in _SIGNALS:
        os.kill(pid, _SIGNALS[kind])
        return Strike(kind, at, min_deaths=1, victim=victim)
    order = order_fault(server.repository, _ORDERS[kind], 1, pid=pid)
    # One rank alone can go on after a step that failed; several are out of step.
    return Strike(kind, at, min_deaths=int(len(ranks) > 1), victim=victim, order=order)


def urls_of(server: TritonServer) -> dict[str, str]:
    """By protocol."""
    return {"grpc": server.grpc_url, "http": server.http_url}
