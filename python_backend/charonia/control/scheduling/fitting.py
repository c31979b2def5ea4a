"""Choice of the next waiting request to admit, and of the running ones that it would displace.

Owns the arithmetic of fitting: tokens of the step, blocks of the pool. Changes nothing. Knows
nothing about row numbers, or what a step computes.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from charonia.control.cache.block_tables import BlockTables
from charonia.control.cache.fetching import Fetching
from charonia.control.estimators.peak_memory import PeakMemory
from charonia.control.policies import Displacement, Policy
from charonia.control.scheduling.prefix_sharing import PrefixSharing
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request
from charonia.control.state.step import Step

MAX_CONSIDERED = 4
"""Most waiting requests that a step considers if the first ones do not fit."""

MAX_HARMLESS = 8
"""Waiting requests that might displace others by their level, but find no victim. After so many a
step stops looking, and the next step continues behind them."""

MAX_AWAITING = 64
"""Most waiting requests that a step skips because they wait for a prefix that others compute. The
requests behind them wait, too."""

MAX_PASSES = 16
"""Most times that a request that does not fit is passed by others that do. After that, free blocks
are kept for it."""


class Fit(NamedTuple):
    """A request that may be admitted.

    Attributes:
        hits: cached blocks of its prefix.
        victims: requests that it displaces; if steps overlap, some of them may be in flight.
        passed: waiting requests before it that do not fit.
        owed: see `Fitting.num_owed`; without this request.
    """

    request: Request
    hits: list[int]
    victims: list[Request]
    passed: list[Request]
    owed: int


class Fitting:
    """Finds the next request to admit.

    A request is admitted only if all its known tokens fit beside what the running ones still need
    for theirs.

    Args:
        peak: checks that all have room until they end; None skips this check.
        sharing: which requests wait for a prefix that others compute; None without prefix sharing.
        fetching: which requests wait for a prefix to be loaded; None without tiers.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        blocks: BlockTables,
        peak: PeakMemory | None = None,
        sharing: PrefixSharing | None = None,
        fetching: Fetching | None = None,
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._blocks = blocks
        self._peak = peak
        self._sharing = sharing
        self._fetching = fetching
        self._step: Step | None = None
        self._num_skipped = 0  # waiting requests that the last step looked at in vain

    def begin(self, step: Step) -> None:
        """Begin a step; the next questions are about it."""
        if self._peak is not None and step is not self._step:
            self._peak.begin_plan()
        self._step = step

    def num_owed(self) -> int:
        """Blocks that running requests still need for the tokens that the next step may compute."""
        return self._blocks.num_owed(self._policy.running.in_order())

    def num_to_load_into(self, owed: int) -> int:
        """Free blocks to load into: not reserved, owed to running requests, or in the watermark.

        Args:
            owed: see `num_owed`.
        """
        kv = self._blocks.kv
        return kv.num_free - kv.num_reserved - owed - self._watermark

    def next_admissible(
        self, budget: int, owed: int, suspect: Request | None, now: float
    ) -> Fit | None:
        """The next request in order that fits.

        Args:
            budget: tokens that the step has left. owed: see `num_owed`.
            suspect: the only request that may run; None if there is no suspect.
            now: seconds.
        """
        if suspect is not None:
            is_there = suspect in self._policy.waiting
            hits = self._blocks.hits(suspect) if is_there else None
            candidates = iter([(suspect, hits)])
        else:
            candidates = self._candidates(owed, now)
        passed: list[Request] = []
        for request, hits in candidates:
            if hits is not None and self._fits(request, hits, budget, owed):
                return Fit(request, hits, [], passed, owed)
            passed.append(request)
        return None

    def _fits(self, request: Request, hits: list[int], budget: int, owed: int) -> bool:
        has_room = self._has_budget(request, hits, budget)
        has_room = has_room and self._spare(request, hits, owed) >= 0
        return has_room and self._has_room_later(request, hits)

    def _candidates(self, owed: int, now: float) -> Iterator[tuple[Request, list[int] | None]]:
        """The first waiting requests, and the cached blocks of their prefixes.

        Others may pass a request that does not fit, but only so many times, and never one that was
        preempted. Requests that wait for a prefix that others compute are skipped. A request whose
        blocks must be loaded first comes with None in place of hits: it does not fit yet.
        """
        num_considered = num_awaiting = 0
        for request in self._policy.waiting.in_order():
            sharing = None if request.num_preemptions else self._sharing
            if sharing is not None and sharing.still_waits(request, now):
                num_awaiting += 1
            else:
                hits = self._blocks.hits(request)
                if self._is_fetched(request, hits, owed):
                    num_awaiting += 1
                    yield request, None
                    if not _may_be_passed(request):
                        return
                elif sharing is not None and sharing.waits(request, len(hits), now):
                    num_awaiting += 1
                else:
                    num_considered += 1
                    yield request, hits
                    if not _may_be_passed(request):
                        return
            if num_considered == MAX_CONSIDERED or num_awaiting == MAX_AWAITING:
                return

    def _is_fetched(self, request: Request, hits: list[int], owed: int) -> bool:
        """Return whether a request waits for blocks to be loaded."""
        if self._fetching is None:
            return False
        return self._fetching.waits(request, hits, self.num_to_load_into(owed))

    def next_urgent(
        self, budget: int, owed: int | None = None, *, num_free_rows: int
    ) -> Fit | None:
        """The next request in order that may displace others and fits once it has.

        If it fits without displacing, it is admitted so if the first waiting request may be passed
        once more, or fits beside it. Otherwise it displaces others even so, and what is free is
        kept for the first one.

        Args:
            budget: tokens that the step has left.
            owed: see `num_owed`; None computes it when it is needed.
        """
        displacement = self._policy.displacement
        if displacement is None or not self._policy.waiting:
            return None
        passed: list[Request] = []
        for request, below in islice(self._displacers(displacement), MAX_CONSIDERED):
            hits = self._blocks.hits(request)
            owed = self.num_owed() if owed is None else owed
            if self._is_fetched(request, hits, owed):
                return None
            if self._has_budget(request, hits, budget):
                spare = self._spare(request, hits, owed)
                if spare >= 0 and num_free_rows and self._has_room_later(request, hits):
                    first = next(self._policy.waiting.in_order())
                    if passed:
                        return None
                    if first is request:
                        return Fit(request, hits, [], [], owed)
                    if _may_be_passed(first):
                        return Fit(request, hits, [], [first], owed)
                    if num_free_rows > 1 and self._fits_beside(first, request, hits, owed):
                        return Fit(request, hits, [], [], owed)
                victims = self._victims(request, -spare, hits, below)
                if victims is not None:
                    return Fit(request, hits, victims, passed, owed)
            if not _may_be_passed(request):
                return None
            passed.append(request)
        return None

    def _fits_beside(self, first: Request, request: Request, hits: list[int], owed: int) -> bool:
        """Return whether the first waiting request would still fit if another one were admitted."""
        owed += self._blocks.num_taken(request, hits)
        first_hits = self._blocks.hits(first)
        if self._spare(first, first_hits, owed) < 0:
            return False
        return self._has_room_later(first, first_hits, beside=(request, len(hits)))

    def _displacers(
        self, displacement: Displacement
    ) -> Iterator[tuple[Request, Iterator[Request]]]:
        """Waiting requests that may displace others now, each with the victims it may choose from.

        They pass those that may not. Nothing may be admitted or preempted during the iteration.
        """
        running = self._policy.running
        highest_level = running.highest_level
        last_first: list[Request] = []
        num_harmless, num_skipped = 0, self._num_skipped
        self._num_skipped = 0
        candidates = self._policy.waiting.foremost(highest_level)
        for place, request in enumerate(islice(candidates, num_skipped, None), num_skipped + 1):
            if displacement.level(request) >= highest_level:
                continue
            last_first = last_first or running.in_order()[::-1]
            victims = displacement.victims(request, last_first)
            if (first := next(victims, None)) is not None:
                yield request, chain([first], victims)
            elif (num_harmless := num_harmless + 1) == MAX_HARMLESS:
                self._num_skipped = place
                return

    def _has_budget(self, request: Request, hits: list[int], budget: int) -> bool:
        """Return whether a step with `budget` tokens left can begin a waiting request."""
        can_wait = self._limits.enable_chunked_prefill
        return can_wait or self._blocks.num_left(request, hits) <= budget

    def _spare(self, request: Request, hits: list[int], owed: int) -> int:
        """Blocks left after admitting a waiting request; negative if it does not fit."""
        num_free = self._blocks.kv.num_free - self._blocks.num_taken(request, hits)
        return num_free - owed - self._watermark

    @property
    def _watermark(self) -> int:
        return self._blocks.kv.watermark if self._policy.running else 0

    def _has_room_later(
        self,
        request: Request,
        hits: list[int],
        victims: Iterable[Request] = (),
        beside: tuple[Request, int] | None = None,
    ) -> bool:
        """Return whether a waiting request fits beside running ones until it ends, without victims.

        Args:
            beside: another waiting request that would run, too, and its cached blocks.
        """
        if self._peak is None:
            return True
        running = self._policy.running.in_order()
        if gone := set(victims):
            running = [one for one in running if one not in gone]
        num_usable = self._blocks.kv.num_usable
        return self._peak.fits(self._limits, num_usable, running, request, len(hits), beside)

    def _victims(
        self, request: Request, num_lacking: int, hits: list[int], below: Iterable[Request]
    ) -> list[Request] | None:
        """The fewest of `below`, in order, whose preemption frees a row and enough blocks.

        Args:
            num_lacking: blocks that are missing.
            hits: blocks that are not freed, whoever holds them.

        Returns:
            The victims; None if all of `below` are not enough.
        """
        kept, num_running = set(hits), len(self._policy.running)
        victims: list[Request] = []
        num_enough: int | None = None  # victims that free enough blocks for now
        uncounted: list[Request] = []  # victims whose released blocks are not counted yet
        num_at_most = 0  # blocks of these: the most that they can release
        released: Counter[int] = Counter()
        for victim in below:
            if victim.num_in_flight and not self._limits.overlaps:
                continue  # with stages, others are in no step; with overlap, all are waited for
            victims.append(victim)
            if num_enough is not None:
                continue
            uncounted.append(victim)
            num_at_most += len(victim.block_ids)
            num_lacking -= self._blocks.num_owed([victim])
            if len(victims) == num_running:
                num_lacking -= self._blocks.kv.watermark
            if num_lacking > num_at_most:
                continue
            num_lacking -= self._num_released(uncounted, released, kept)
            uncounted, num_at_most = [], 0
            if num_lacking <= 0:
                num_enough = len(victims)
                if self._has_room_later(request, hits, victims):
                    return victims
        if num_enough is None or not self._has_room_later(request, hits, victims):
            return None
        # Room until the end grows with the number of victims, so search by bisection.
        numbers = range(num_enough + 1, len(victims))
        index = bisect_left(
            numbers, True, key=lambda count: self._has_room_later(request, hits, victims[:count])
        )
        return victims[: num_enough + 1 + index]

    def _num_released(
        self, victims: Iterable[Request], released: Counter[int], kept: set[int]
    ) -> int:
        """Blocks that become free if these victims release theirs, too.

        Args:
            released: how often earlier victims release each block; these victims are added.
            kept: blocks that are not freed, whoever holds them.
        """
        num_references, num_released = self._blocks.kv.num_references, 0
        for victim in victims:
            released.update(victim.block_ids)
            num_released += sum(
                num_references(block_id) == released[block_id] and block_id not in kept
                for block_id in victim.block_ids
            )
        return num_released


def _may_be_passed(request: Request) -> bool:
    return not request.num_preemptions and request.num_passed < MAX_PASSES
