"""One campaign on a running server: fault after fault while all lanes go on.

Owns the order of events and the deadlines. Must not know how a server is started, nor what becomes
of what is seen.
"""

import random
import time
from collections.abc import Iterator, Sequence

from charonia.launch.server import TritonServer
from faults.footprint import take_footprint
from faults.lanes import Lane, Request
from faults.outcome import FaultRecord
from faults.recovery import resumed_at
from faults.strikes import KINDS, Kind, Strike, strike, urls_of
from support.e2e import EXPORT_INTERVAL_S, scrape, wait_for

POLL_S = 0.2
# The metrics page is up to date after the shortest one.
PAUSE_S = (2 * EXPORT_INTERVAL_S, 5 * EXPORT_INTERVAL_S)
MIN_DISTINCT = 0.2
RESTARTS = "charonia_engine_restarts_total"
IDLE = (
    "charonia_requests_running",
    "charonia_requests_waiting",
    'charonia_kv_blocks{state="used"}',
)


class CampaignError(Exception):
    """The campaign cannot be run, or not go on; the text says why."""


def run_undisturbed(
    server: TritonServer, requests: Sequence[Request], timeout: float
) -> list[list[int]]:
    """The tokens of each request when nothing happens.

    Raises:
        CampaignError: a request is not answered as it should, or its text is a loop.
    """
    streams = [request.send(urls_of(server)) for request in requests]
    wait_for(lambda: all(stream.is_over for stream in streams), bool, timeout)
    for stream, request in zip(streams, requests, strict=True):
        num_tokens = len(stream.token_ids)
        if stream.error is not None or num_tokens != request.sampling["max_tokens"]:
            raise CampaignError(
                f"an undisturbed request came to {num_tokens} tokens, error {stream.error}"
            )
        if len(set(stream.token_ids)) < MIN_DISTINCT * num_tokens:
            raise CampaignError("an undisturbed text is a loop, which would hide wrong tokens")
    return [stream.token_ids for stream in streams]


class Campaign:
    """Faults one after the other; each waits until all lanes have recovered from the one before.

    Args:
        poisoned: requests that kill the engine, one of which is sent where that is the fault.
        deadline: seconds after which a lane that has not recovered from a fault hangs.
    """

    def __init__(
        self,
        server: TritonServer,
        lanes: Sequence[Lane],
        poisoned: Sequence[Request],
        *,
        seed: int,
        deadline: float,
    ) -> None:
        self._server = server
        self._lanes = lanes
        self._poisoned = poisoned
        self._draw = random.Random(seed)
        self._deadline = deadline
        self._started = time.monotonic()

    def run(self, num_faults: int) -> Iterator[FaultRecord]:
        """Bring so many faults about: rounds of all kinds, each in random order.

        Raises:
            CampaignError: the server has ended, or a lane hangs.
        """
        if not wait_for(self._is_all_streaming, bool, self._deadline):
            raise CampaignError("not all lanes have begun")
        num_rounds = -(-num_faults // len(KINDS))
        kinds = [
            kind for _ in range(num_rounds) for kind in self._draw.sample([*KINDS], len(KINDS))
        ]
        for number, kind in enumerate(kinds[:num_faults], 1):
            record = self._break_once(number, kind)
            yield record
            if record.hanging:
                raise CampaignError(f"lanes {record.hanging} hang after fault {number}")

    def end(self) -> list[int]:
        """Let every lane come to the end of its request; returns those that hang."""
        for lane in self._lanes:
            lane.end()
        wait_for(lambda: all(lane.is_over for lane in self._lanes), bool, self._deadline)
        return [lane.index for lane in self._lanes if not lane.is_over]

    def wait_idle(self) -> dict[str, float]:
        """What must be 0 at rest, as soon as it is."""
        time.sleep(2 * EXPORT_INTERVAL_S)  # the page may still be from before

        def ask() -> dict[str, float]:
            samples = scrape(self._server)
            return {name: samples[name] for name in IDLE}

        return wait_for(ask, lambda samples: not any(samples.values()), self._deadline)

    def _is_all_streaming(self) -> bool:
        return all(lane.is_streaming for lane in self._lanes)

    def _break_once(self, number: int, kind: Kind) -> FaultRecord:
        """Bring a fault about, wait for what comes of it, and some time more."""
        for lane in self._lanes:
            lane.watch()
        num_live = sum(lane.is_streaming for lane in self._lanes)
        before = self._num_restarts()
        done = strike(kind, self._server, self._draw.choice(self._poisoned), self._draw)
        resumed = self._wait_resumed(done, before)
        pause = self._draw.uniform(*PAUSE_S)
        time.sleep(pause)
        num_deaths = self._num_restarts() - before
        footprint = take_footprint(self._server)
        return FaultRecord(
            number=number,
            kind=kind,
            victim=done.victim,
            at=done.at - self._started,
            pause=pause,
            num_live=num_live,
            num_deaths=num_deaths,
            has_struck=done.has_struck(num_deaths),
            is_answered_right=done.is_answered_right,
            recovery=sorted(at - done.at for at in resumed.values()),
            hanging=[lane.index for lane in self._lanes if lane.index not in resumed],
            shm_bytes=footprint.shm_bytes,
            scheduler_rss_bytes=footprint.scheduler_rss_bytes,
        )

    def _wait_resumed(self, done: Strike, before: int) -> dict[int, float]:
        """When each lane went on, by its index; those that hang are missing.

        Args:
            before: restarts of the engine before the fault.
        """
        resumed: dict[int, float] = {}
        sure_from: float | None = None
        deadline = time.monotonic() + self._deadline
        while len(resumed) < len(self._lanes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            if not self._server.is_running:
                raise CampaignError(self._server.explain_end())
            since = done.ended_at
            if since is None:
                continue
            if sure_from is None:
                if not done.has_struck(self._num_restarts() - before):
                    continue
                sure_from = time.monotonic()
            for lane in self._lanes:
                if lane.index not in resumed:
                    at = resumed_at(lane.arrivals(), since, sure_from)
                    if at is not None:
                        resumed[lane.index] = at
        return resumed

    def _num_restarts(self) -> int:
        return int(scrape(self._server)[RESTARTS])
