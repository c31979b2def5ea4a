"""The schedulers of one replica, one for each engine.

Owns the present scheduler, and the change to another one with all live requests. Must not know
steps in flight, nor why an engine is replaced.
"""

import os

from charonia.config import EngineArgs, SchedulerArgs
from charonia.control import (
    NO_SHEDDING,
    CacheEvents,
    Limits,
    LoadShedding,
    Request,
    Scheduler,
    SchedulerStats,
    Tiers,
)
from charonia.core.gate.tenants import Tenants
from charonia.core.recording.journal import Journal
from charonia.core.replica.reload import take_over
from charonia.core.scheduler_factory import make_scheduler
from charonia.protocol import EngineInfo


class Schedulers:
    """The present scheduler, and the state that outlives it.

    Args:
        tenants: have the weights of fair shares.
        scheduler_args, cache_events, journal: see `make_scheduler`.
        hash_secret: key of the block hashes; None draws one for each scheduler.

    Attributes:
        present: the scheduler of the present or last engine; None before one, and after `drop`.
    """

    def __init__(
        self,
        scheduler_args: SchedulerArgs,
        tenants: Tenants,
        *,
        cache_events: CacheEvents | None = None,
        journal: Journal | None = None,
        hash_secret: bytes | None = None,
    ) -> None:
        self._scheduler_args = scheduler_args
        self._tenants = tenants
        self._cache_events = cache_events
        self._journal = journal
        self._hash_secret = hash_secret
        self._stats = SchedulerStats()
        self._shedding = NO_SHEDDING
        self.present: Scheduler | None = None

    @property
    def requests(self) -> list[Request]:
        """All live samples."""
        return [] if self.present is None else list(self.present.requests)

    @property
    def num_live(self) -> int:
        """Number of live samples."""
        return 0 if self.present is None else self.present.num_live

    def shed(self, shedding: LoadShedding) -> None:
        """Apply load shedding to steps from now on, on any engine."""
        self._shedding = shedding
        if self.present is not None:
            self.present.shedding = shedding

    def reset(self) -> None:
        """Reset the scheduler, so that the next engine recomputes all live requests."""
        if self.present is not None:
            self.present.reset()

    def drop(self) -> None:
        """Discard the present scheduler with its requests, unread."""
        self.present = None

    def go_on_with(
        self, info: EngineInfo, args: EngineArgs, limits: Limits, *, is_like_before: bool
    ) -> None:
        """Change to an engine that fits all live requests.

        Args:
            is_like_before: whether it has the same arguments as the last one.
        """
        tiers = None if info.kept is None else Tiers(info.kept, self._stats)
        before = self.present
        if before is not None and is_like_before:
            before.reset(limits, epoch=info.epoch, tiers=tiers)
            return
        new = make_scheduler(
            args,
            self._scheduler_args,
            limits,
            hash_secret=self._hash_secret or os.urandom(32),
            epoch=info.epoch,
            stats=self._stats,
            weight_of=self._tenants.weight_of,
            cache_events=self._cache_events,
            tiers=tiers,
            journal=self._journal,
        )
        if before is not None:
            take_over(before, new)
        self.present = new
        new.shedding = self._shedding
