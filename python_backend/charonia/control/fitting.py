"""Which waiting request can have a row next, and whom that would cost theirs.

Owns the arithmetic of fitting: tokens of the step, blocks of the pool. Changes nothing. Must not
know rows by number, nor what a step computes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from charonia.control.block_tables import BlockTables
from charonia.control.limits import Limits
from charonia.control.peak_memory import PeakMemory
from charonia.control.policies import Displacement, Policy
from charonia.control.request import Request

MAX_CONSIDERED = 4
"""Waiting requests that a step looks at, where the first ones do not fit."""

MAX_PASSES = 16
"""How often a request that does not fit is passed by another that does. Then blocks that become
free are kept for it."""


class Admission(NamedTuple):
    """Who may have a row.

    Attributes:
        hits: cached blocks of its prefix. victims: whom it displaces; where steps overlap, some of
            them may be in flight. passed: who waits before it and does not fit.
    """

    request: Request
    hits: list[int]
    victims: list[Request]
    passed: list[Request]


class Fitting:
    """Finds whom to admit.

    A request is admitted only when its whole known prompt fits beside what the running ones still
    need for theirs.

    Args:
        peak: whether they have room until they end, too; None where nobody asks.
    """

    def __init__(
        self, limits: Limits, policy: Policy, blocks: BlockTables, peak: PeakMemory | None = None
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._blocks = blocks
        self._peak = peak
        self._harmless: set[int] = set()  # numbers of waiting requests that displace nobody
        self._num_changes = 0  # of the running ones, when that was found

    def num_owed(self) -> int:
        """Blocks that all running requests lack for what the next step may compute of them."""
        return sum(map(self._blocks.num_owed, self._policy.running.in_order()))

    def next_admissible(self, budget: int, owed: int, suspect: Request | None) -> Admission | None:
        """The next request in order that fits.

        Args:
            budget: tokens that the step has left. owed: see `num_owed`.
            suspect: the only one that may run, if there is any.
        """
        if suspect is not None:
            candidates: Iterable[Request] = [suspect] if suspect in self._policy.waiting else []
        else:
            candidates = _candidates(self._policy.waiting.in_order())
        passed: list[Request] = []
        for request in candidates:
            hits = self._blocks.hits(request)
            has_room = self._has_budget(request, hits, budget)
            has_room = has_room and self._spare(request, hits, owed) >= 0
            if has_room and self._has_room_later(request, hits):
                return Admission(request, hits, [], passed)
            passed.append(request)
        return None

    def next_urgent(self, budget: int, *, has_free_row: bool) -> Admission | None:
        """The next request in order that may displace anybody and would fit then.

        One that fits without that, behind others, has no more right to what is free than they.

        Args:
            budget: tokens that the step has left.
        """
        displacement = self._policy.displacement
        if displacement is None or not self._policy.waiting:
            return None
        if self._num_changes != self._policy.running.num_changes:
            self._num_changes = self._policy.running.num_changes
            self._harmless.clear()
        passed: list[Request] = []
        for request, below in islice(self._displacers(displacement), MAX_CONSIDERED):
            hits = self._blocks.hits(request)
            if self._has_budget(request, hits, budget):
                spare = self._spare(request, hits, self.num_owed())
                if spare >= 0 and has_free_row and self._has_room_later(request, hits):
                    return None if passed else Admission(request, hits, [], [])
                victims = self._victims(request, -spare, hits, below)
                if victims is not None:
                    return Admission(request, hits, victims, passed)
            if not _may_be_passed(request):
                return None
            passed.append(request)
        return None

    def _displacers(self, displacement: Displacement) -> Iterator[tuple[Request, list[Request]]]:
        """Waiting requests that may displace somebody, and whom; they pass those that may not."""
        for request in self._policy.waiting.foremost():
            below = self._below(request, displacement)
            if below:
                yield request, below

    def _below(self, request: Request, displacement: Displacement) -> list[Request]:
        """Whom a waiting request may displace, the last in order first."""
        if request.number in self._harmless:
            return []
        running = self._policy.running.in_order()
        below = [one for one in reversed(running) if displacement.may_displace(request, one)]
        if not below:
            self._harmless.add(request.number)
        return [one for one in below if displacement.is_due(request, one)]

    def _has_budget(self, request: Request, hits: list[int], budget: int) -> bool:
        """Whether a step with so many tokens left can begin a waiting request."""
        can_wait = self._limits.enable_chunked_prefill
        return can_wait or self._blocks.num_left(request, hits) <= budget

    def _spare(self, request: Request, hits: list[int], owed: int) -> int:
        """Blocks that are left when a waiting request is admitted; it does not fit if negative."""
        num_free = self._blocks.kv.num_free - self._blocks.num_taken(request, hits)
        return num_free - owed - (self._limits.watermark if self._policy.running else 0)

    def _has_room_later(
        self, request: Request, hits: list[int], victims: Iterable[Request] = ()
    ) -> bool:
        """Whether a waiting request has room beside the running ones but these, to their ends."""
        if self._peak is None:
            return True
        running = [one for one in self._policy.running.in_order() if one not in victims]
        return self._peak.fits(self._limits, running, request, len(hits))

    def _victims(
        self, request: Request, num_lacking: int, hits: list[int], below: Iterable[Request]
    ) -> list[Request] | None:
        """The fewest of `below`, from the first on, that give up a row and enough blocks.

        Args:
            num_lacking: blocks. hits: which are not given up, whoever holds them.

        Returns:
            Them; None where all of them are not enough.
        """
        kv, num_running = self._blocks.kv, len(self._policy.running)
        victims: list[Request] = []
        released: Counter[int] = Counter()
        for victim in below:
            if victim.num_in_flight and not self._limits.overlaps:
                continue  # with stages others are in none; else one waits for all of them alike
            victims.append(victim)
            released.update(victim.block_ids)
            num_lacking -= self._blocks.num_owed(victim)
            num_lacking -= sum(
                kv.num_references(block_id) == released[block_id] and block_id not in hits
                for block_id in victim.block_ids
            )
            if len(victims) == num_running:
                num_lacking -= self._limits.watermark
            if num_lacking <= 0 and self._has_room_later(request, hits, victims):
                return victims
        return None


def _candidates(waiting: Iterator[Request]) -> Iterator[Request]:
    """The first of them.

    Where one does not fit, others may pass it, but not for ever; and nobody passes one that was
    preempted.
    """
    for request in islice(waiting, MAX_CONSIDERED):
        yield request
        if not _may_be_passed(request):
            return


def _may_be_passed(request: Request) -> bool:
    return not request.num_preemptions and request.num_passed < MAX_PASSES
