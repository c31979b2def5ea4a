"""How many blocks the running requests will need at most, by how long their answers will be.

Owns the estimate of the peak. Must not know blocks by number, nor how lengths are learned.

Requests of a batch grow together, and each gives all back at its end. With the longest rest first,
r1 >= r2 >= ..., and so many tokens now, t1, t2, ..., the batch needs most at one of its ends::

    peak = max over i of  (t1 + ... + ti) + i * ri

as in Gong et al. 2025 ("Past-Future Scheduler for LLM Serving under SLA Guarantees", arXiv
2507.10150, section 4), whose lengths come from those of past requests, too.

That is an estimate even where the lengths are certain: requests do not grow together while one's
prompt is computed in chunks, or its drafts are right, or a step has no token left for it. What is
to be guaranteed counts each request's blocks at its own end, as if all ends came at once.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from operator import add, mul

from charonia.control.estimators.output_lengths import OutputLengths
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request

Need = tuple[int, int]
"""Of a request: how much it grows, and how much it has, in tokens; or no growth, and all the blocks
that it may have."""


class PeakMemory:
    """Tells whether requests will have room together until they end.

    Args:
        expects: whether answers are taken to be as long as others were, and the peak is estimated;
            else they are as long as they may be, and there is room for all ends at once.

    Attributes:
        num_held: blocks of requests that have ended, but are in flight yet.
    """

    def __init__(self, *, expects: bool) -> None:
        self.num_held = 0
        self._expects = expects
        self._lengths: OutputLengths
        # Of those that ran since the plan began. All ends at once need no less than the peak.
        self._needs: dict[Request, Need] = {}
        self._all_ends = 0

    def start(self, lengths: OutputLengths) -> None:
        """Ask these how long answers are, where they are not taken to be as long as they may be."""
        self._lengths = lengths

    def begin_plan(self) -> None:
        """Forget what requests need: since the last plan they have more tokens."""
        self._needs = {}
        self._all_ends = 0

    def fits(
        self,
        limits: Limits,
        num_usable: int,
        running: Sequence[Request],
        request: Request,
        num_hits: int,
    ) -> bool:
        """Whether there is room for a request beside those that run. Alone it always has.

        What those that run need is kept until `begin_plan`.

        Args:
            num_usable: blocks of the pool that are not set aside.
            num_hits: cached blocks of its prefix. Where lengths are expected ones they are taken to
                be others' for ever, too, as what these began with is.
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
        own = self._need(limits, request, num_hits * limits.block_size)
        if self._all_ends + sum(own) <= room:
            return True
        return _peak([*map(self._needs.__getitem__, running), own]) <= room

    def _need(self, limits: Limits, request: Request, num_cached: int) -> Need:
        if not self._expects:
            # The last token of a request is never computed, and drafts stay before it.
            return 0, limits.blocks_for(request.max_known - 1)
        num_left = request.max_known - len(request.token_ids)
        expected = self._lengths.at_most(request.num_generated)
        if expected is not None:
            num_left = min(num_left, expected - request.num_generated)
        slack = limits.block_size - 1  # of its last block
        return num_left, len(request.token_ids) - num_cached + slack


def _peak(needs: Iterable[Need]) -> int:
    """What requests hold at the worst of their ends."""
    num_left, num_held = zip(*sorted(needs, reverse=True), strict=True)
    at_ends: Iterable[int] = map(add, accumulate(num_held), map(mul, count(1), num_left))
    return max(at_ends)
