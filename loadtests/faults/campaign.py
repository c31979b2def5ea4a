"""One campaign on a running server: fault after fault while all lanes go on.

Owns the order of events and the deadlines. Must not know how a server is started, nor what becomes
of what is seen.
"""

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby, pairwise
from typing import Any

from faults.calls import Call
from faults.clients import Clients
from faults.footprint import take_footprint
from faults.kinds import ENTRIES, Arguments, Kind
from faults.lanes import Lane
from faults.outcome import FaultRecord, Outcome, Rest
from faults.recovery import Arrival, resumed_at
from faults.strikes import STRIKES, Scene, Strike
from faults.target import Counts, Target, TargetError
from support.e2e import wait_for

POLL_S = 0.2
PAUSE_S = (1.0, 2.0)
QUIET_S = 3.0
IDLE = (
    "charonia_requests_running",
    "charonia_requests_waiting",
    'charonia_kv_blocks{state="used"}',
)


def schedule(kinds: Sequence[Kind], num_faults: int, draw: random.Random) -> list[Kind]:
    """Draw `num_faults` faults: rounds of the kinds, each in random order; the first has all kinds.

    Those that may cost the whole server come last, so that its processes live through all others.
    """
    faults: list[Kind] = []
    for number in count():
        due = [kind for kind in kinds if number % kind.every == 0]
        faults += draw.sample(due, len(due))
        if len(faults) >= num_faults:
            break
    return sorted(faults[:num_faults], key=lambda kind: kind.max_servers)


class Campaign:
    """Faults one after the other; each waits until all lanes have recovered from the one before.

    Args:
        arguments: of the engine, by their name.
        outcome: is filled in.
        draw: of faults and their moments.
        deadline: seconds after which a lane that has not recovered from a fault hangs.
    """

    def __init__(
        self,
        target: Target,
        clients: Clients,
        arguments: Mapping[Arguments, Mapping[str, Any]],
        outcome: Outcome,
        draw: random.Random,
        deadline: float,
    ) -> None:
        self._target = target
        self._clients = clients
        self._arguments = arguments
        self._outcome = outcome
        self._draw = draw
        self._deadline = deadline
        self._lanes: list[Lane] = []

    def run(self, faults: Iterable[Kind]) -> Iterator[FaultRecord]:
        """Bring them about. The server comes to rest before those that cost all of it.

        Raises:
            TargetError: the server is not brought back, or a lane hangs.
        """
        self._rest()
        for _, part in groupby(faults, key=lambda kind: kind.max_servers):
            self._lanes = self._clients.start_lanes()
            try:
                if not wait_for(self._has_begun, bool, self._deadline):
                    raise TargetError("not all lanes have begun")
                for kind in part:
                    yield self._break_once(kind)
            except TargetError:
                self._end()
                raise
            self._end()
            self._rest()

    def _has_begun(self) -> bool:
        return all(lane.has_begun for lane in self._lanes)

    def _end(self) -> None:
        """Let every lane come to the end of its request."""
        for lane in self._lanes:
            lane.end()
        wait_for(lambda: all(lane.is_over for lane in self._lanes), bool, self._deadline)
        self._outcome.hanging += [lane.index for lane in self._lanes if not lane.is_over]
        self._outcome.answers += [answer for lane in self._lanes for answer in lane.answers]

    def _rest(self) -> None:
        """Look at the server when nothing runs."""
        self._target.ensure(self._arguments["plain"])
        time.sleep(QUIET_S)  # some of what a fault has ended is let go late

        def ask() -> dict[str, float]:
            samples = self._target.samples()
            return {name: samples.get(name, 1.0) for name in IDLE}

        busy = wait_for(ask, lambda samples: not any(samples.values()), self._deadline)
        footprint = take_footprint(self._target.server)
        self._outcome.rests.append(Rest(len(self._outcome.faults), busy, footprint))

    def _break_once(self, kind: Kind) -> FaultRecord:
        """Bring a fault about, wait for what comes of it, and some time more."""
        self._target.ensure(self._arguments[self._draw.choice(kind.arguments)])
        for lane in self._lanes:
            lane.watch()
        before = self._counts()
        done = STRIKES[kind.name](self._scene(kind, before))
        resumed, mended_at = self._wait_resumed(done, before)
        until = time.monotonic()
        time.sleep(self._draw.uniform(*PAUSE_S))
        after = self._counts()
        if done.call is not None and not done.is_poisoned and done.call.is_over:
            self._outcome.answers.append(done.call.answer())
        num_servers = after.servers - before.servers
        delays = ENTRIES if num_servers else kind.delays
        delayed = {lane.index for lane in self._lanes if lane.entry in delays}
        spared = [lane for lane in self._lanes if lane.index not in delayed]
        record = FaultRecord(
            number=len(self._outcome.faults) + 1,
            kind=kind.name,
            victim=done.victim,
            at=done.at,
            until=until,
            num_engines=after.engines_since(before),
            num_servers=num_servers,
            outage=None if mended_at is None else mended_at - done.at,
            is_answered_right=done.is_answered_right,
            recovery=sorted(at - done.at for index, at in resumed.items() if index in delayed),
            pause=max((_longest_pause(lane.arrivals(), done.at) for lane in spared), default=None),
            hanging=[lane.index for lane in self._lanes if lane.index not in resumed],
        )
        self._outcome.faults.append(record)
        if record.hanging:
            raise TargetError(f"lanes {record.hanging} hang after fault {record.number}")
        return record

    def _wait_resumed(self, done: Strike, before: Counts) -> tuple[dict[int, float], float | None]:
        """Wait until all lanes go on. Return the times by lane, and when the fault was mended.

        Lanes that hang are left out.

        Args:
            before: counts before the fault.
        """
        resumed: dict[int, float] = {}
        mended_at: float | None = None
        sure_from: float | None = None
        deadline = time.monotonic() + self._deadline
        while len(resumed) < len(self._lanes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._target.check()
            since = done.ended_at
            if since is None:
                continue
            if sure_from is None:
                now = time.monotonic()
                if done.is_mended():
                    mended_at = now
                # Whatever was broken, it is gone with a server that nobody meant to strike.
                elif self._target.num_restarts == before.servers:
                    continue
                sure_from = now
            for lane in self._lanes:
                if lane.index not in resumed:
                    at = resumed_at(lane.arrivals(), since, sure_from)
                    if at is not None:
                        resumed[lane.index] = at
        return resumed, mended_at

    def _scene(self, kind: Kind, before: Counts) -> Scene:
        def exposed() -> list[Call]:
            under_way = [(lane.entry, lane.call) for lane in self._lanes]
            return [
                call
                for entry, call in under_way
                if call is not None and kind.may_fail(entry, len(call.token_ids))
            ]

        clients = self._clients
        return Scene(self._target, before, self._draw, clients.poison, clients.long, exposed)

    def _counts(self) -> Counts:
        """Return what has been lost so far.

        Raises:
            TargetError: the metrics page does not have it.
        """
        counts = wait_for(self._target.counts, lambda found: found is not None, self._deadline)
        if counts is None:
            raise TargetError("the metrics page says nothing of the engine")
        return counts


def _longest_pause(arrivals: Iterable[Arrival], since: float) -> float:
    times = [since, *(at for at, _ in arrivals if at >= since)]
    return max((after - before for before, after in pairwise(times)), default=0.0)
