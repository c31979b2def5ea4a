"""Which waiting request can have a row next, and whom that would cost theirs.

Owns the arithmetic of fitting: tokens of the step, blocks of the pool. Changes nothing. Must not
know rows by number, nor what a step computes.
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
"""Waiting requests that a step looks at, where the first ones do not fit."""

MAX_HARMLESS = 8
"""Waiting requests that might displace somebody by their level, and turn out not to; when a step
has found so many it looks at no more, and the next step goes on behind them."""

MAX_AWAITING = 64
"""Waiting requests that a step leaves out because they wait for a prefix that others compute; the
requests behind them wait, too."""

MAX_PASSES = 16
"""How often a request that does not fit is passed by another that does. Then blocks that become
free are kept for it."""


class Fit(NamedTuple):
    """Who may have a row.

    Attributes:
        hits: cached blocks of its prefix. victims: whom it displaces; where steps overlap, some of
            them may be in flight. passed: who waits before it and does not fit.
        owed: see `Fitting.num_owed`, before it has the row.
    """

    request: Request
    hits: list[int]
    victims: list[Request]
    passed: list[Request]
    owed: int


class Fitting:
    """Finds whom to admit.

    A request is admitted only when its whole known prompt fits beside what the running ones still
    need for theirs.

    Args:
        peak: whether they have room until they end, too; None where nobody asks.
        sharing: who waits for a prefix that others compute; None has nobody wait for that.
        fetching: who waits for a prefix that is loaded; None has nobody wait for that.
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
        self._num_skipped = 0  # waiting requests that the last step has looked at, in vain

    def begin(self, step: Step) -> None:
        """Have the next questions be about this step."""
        if self._peak is not None and step is not self._step:
            self._peak.begin_plan()
        self._step = step

    def num_owed(self) -> int:
        """Blocks that all running requests lack for what the next step may compute of them."""
        return self._blocks.num_owed(self._policy.running.in_order())

    def num_to_load_into(self, owed: int) -> int:
        """Blocks that may be loaded into for requests that wait, none of which others wait for.

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
            suspect: the only one that may run, if there is any.
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
        """The first of those that wait, and the cached blocks of their prefixes.

        Where one does not fit, others may pass it, but not for ever; and nobody passes one that was
        preempted. Those that wait for prefixes that others compute are left out. One that has to
        have blocks loaded first comes without hits: it does not fit yet.
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
        """Whether a request waits for blocks that are loaded."""
        if self._fetching is None:
            return False
        return self._fetching.waits(request, hits, self.num_to_load_into(owed))

    def next_urgent(
        self, budget: int, owed: int | None = None, *, has_free_row: bool
    ) -> Fit | None:
        """The next request in order that may displace anybody and would fit then.

        One that fits without that has not much more right to what is free than others: it may pass
        who comes first as often as any other may. Then it displaces somebody all the same, so that
        what is free is kept for that one.

        Args:
            budget: tokens that the step has left.
            owed: see `num_owed`; None counts it, where anybody may displace others.
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
                if spare >= 0 and has_free_row and self._has_room_later(request, hits):
                    first = next(self._policy.waiting.in_order())
                    if passed:
                        return None
                    if first is request or _may_be_passed(first):
                        return Fit(request, hits, [], [first] if first is not request else [], owed)
                victims = self._victims(request, -spare, hits, below)
                if victims is not None:
                    return Fit(request, hits, victims, passed, owed)
            if not _may_be_passed(request):
                return None
            passed.append(request)
        return None

    def _displacers(
        self, displacement: Displacement
    ) -> Iterator[tuple[Request, Iterator[Request]]]:
        """Waiting requests that may displace somebody now, and whom; they pass those that may not.

        Nothing may be admitted or preempted meanwhile.
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
        """Whether a step with so many tokens left can begin a waiting request."""
        can_wait = self._limits.enable_chunked_prefill
        return can_wait or self._blocks.num_left(request, hits) <= budget

    def _spare(self, request: Request, hits: list[int], owed: int) -> int:
        """Blocks that are left when a waiting request is admitted; it does not fit if negative."""
        num_free = self._blocks.kv.num_free - self._blocks.num_taken(request, hits)
        return num_free - owed - self._watermark

    @property
    def _watermark(self) -> int:
        return self._blocks.kv.watermark if self._policy.running else 0

    def _has_room_later(
        self, request: Request, hits: list[int], victims: Iterable[Request] = ()
    ) -> bool:
        """Whether a waiting request has room beside the running ones but these, to their ends."""
        if self._peak is None:
            return True
        running = self._policy.running.in_order()
        if gone := set(victims):
            running = [one for one in running if one not in gone]
        num_usable = self._blocks.kv.num_usable
        return self._peak.fits(self._limits, num_usable, running, request, len(hits))

    def _victims(
        self, request: Request, num_lacking: int, hits: list[int], below: Iterable[Request]
    ) -> list[Request] | None:
        """The fewest of `below`, from the first on, that give up a row and enough blocks.

        Args:
            num_lacking: blocks. hits: which are not given up, whoever holds them.

        Returns:
            Them; None where all of them are not enough.
        """
        kept, num_running = set(hits), len(self._policy.running)
        victims: list[Request] = []
        num_enough: int | None = None  # of them, as long as nobody asks for later
        uncounted: list[Request] = []  # of them, who cannot be enough even if nobody shares blocks
        num_at_most = 0  # blocks of these
        released: Counter[int] = Counter()
        for victim in below:
            if victim.num_in_flight and not self._limits.overlaps:
                continue  # with stages others are in none; else one waits for all of them alike
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
        # The more give up what they hold, the more room there is later.
        numbers = range(num_enough + 1, len(victims))
        index = bisect_left(
            numbers, True, key=lambda count: self._has_room_later(request, hits, victims[:count])
        )
        return victims[: num_enough + 1 + index]

    def _num_released(
        self, victims: Iterable[Request], released: Counter[int], kept: set[int]
    ) -> int:
        """Blocks that are free when these victims have given up theirs, too.

        Args:
            released: how often each block was given up by others; these are added.
            kept: blocks that are not given up, whoever holds them.
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
