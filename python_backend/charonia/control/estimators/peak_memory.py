"""The most blocks that running requests will need, by the lengths of their answers.

Owns the estimate of the peak. Knows nothing about block numbers, or how lengths are learned.

Requests of a batch grow together, and each frees all its blocks at its end. Let t1, t2, ... be
their tokens now, and r1 >= r2 >= ... their tokens to come. The batch needs the most when one of its
requests ends::

    peak = max over i of  (t1 + ... + ti) + i * ri

This is from Gong et al. 2025 ("Past-Future Scheduler for LLM Serving under SLA Guarantees", arXiv
2507.10150, section 4), who also take lengths from past requests.

It is an estimate even if the lengths are certain: requests do not grow together while one's prompt
is computed in chunks, its drafts are accepted, or a step has no token left for it. The guaranteed
bound counts each request's blocks at its own end, as if all requests ended at once.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from operator import add, mul

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request

Need = tuple[int, int]
"""A request's tokens to come and tokens now; or, for the guaranteed bound, 0 and all the blocks
that it may need."""


class PeakMemory:
    """Checks whether requests fit together until they end.

    Args:
        expects: True expects lengths like those of past answers, and estimates the peak. False
            takes the greatest lengths, and needs room for all ends at once.

    Attributes:
        num_held: blocks of requests that have ended but are still in flight.
    """

    def __init__(self, *, expects: bool) -> None:
        self.num_held = 0
        self._expects = expects
        self._lengths: OutputLengths
        # Needs of requests that ran since the plan began. Their sum is at least the peak.
        self._needs: dict[Request, Need] = {}
        self._all_ends = 0

    def start(self, lengths: OutputLengths) -> None:
        """Set the estimate of answers' lengths, for `expects`."""
        self._lengths = lengths

    def begin_plan(self) -> None:
        """Forget the needs of requests, because they have grown since the last plan."""
        self._needs = {}
        self._all_ends = 0

    def fits(
        self,
        limits: Limits,
        num_usable: int,
        running: Sequence[Request],
        request: Request,
        num_hits: int,
        beside: tuple[Request, int] | None = None,
    ) -> bool:
        """Return whether a request fits beside the running ones. Alone it always fits.

        The needs of running requests are cached until `begin_plan`.

        Args:
            num_usable: blocks of the pool that are not set aside.
            num_hits: cached blocks of its prefix. With `expects` they are not counted, and neither
                are the blocks that running requests began with: others are taken to hold them.
            beside: another waiting request that would run, too, and its cached blocks.
        """
        if not running and not self.num_held:
            return True
        room = num_usable - self.num_held
        if self._expects:
            room *= limits.block_size
        for one in running:
            if one not in self._needs:
                need = self._needs[one] = self._need(limits, one, one.num_cached)
                self._all_ends += sum(need)
        waiting = [(request, num_hits)] if beside is None else [(request, num_hits), beside]
        needs = [self._need(limits, one, hits * limits.block_size) for one, hits in waiting]
        if self._all_ends + sum(map(sum, needs)) <= room:
            return True
        return _peak([*map(self._needs.__getitem__, running), *needs]) <= room

    def _need(self, limits: Limits, request: Request, num_cached: int) -> Need:
        if not self._expects:
            # The last token of a request is never computed, and drafts stay before it.
            return 0, limits.blocks_for(request.max_known - 1)
        num_left = request.max_known - len(request.token_ids)
        expected = self._lengths.at_most(request.num_generated)
        if expected is not None:
            num_left = min(num_left, expected - request.num_generated)
        slack = limits.block_size - 1  # unused tokens of its last block
        return num_left, len(request.token_ids) - num_cached + slack


def _peak(needs: Iterable[Need]) -> int:
    """The most that requests hold when one of them ends."""
    num_left, num_held = zip(*sorted(needs, reverse=True), strict=True)
    at_ends: Iterable[int] = map(add, accumulate(num_held), map(mul, count(1), num_left))
    return max(at_ends)
