"""Choice of the requests that wait for a prefix that another one is computing.

Owns that choice. Knows nothing about rows, or the order of admission.

If several requests arrive at once with a long common prefix, one computes it. The others are
skipped until it is in the cache::

    step     1              2              3
    a   ─► [ prefix     ][ own   ][ generates ...
    b   ─►   waits          waits    [ own ][ ...        a block is there at the apply() of its step

A request waits no longer than it would take to compute the prefix alone, even if the request that
computes it is preempted or ends, however often. If prefixes diverge at several points, this holds
for each part. A prefix that is not worth a step is computed at once by all.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request
from charonia.control.state.stats import SchedulerStats

_WORTH = 2.0
"""Least time of a prefix that others wait for, in steps of one token: the step that they start
behind, and one more in case steps overlap."""


class PrefixSharing:
    """Makes requests wait for blocks that a running one will publish."""

    def __init__(self) -> None:
        self._computing: list[Request] = []
        self._block_size: int
        self._time: PromptTime
        self._stats: SchedulerStats

    def start_epoch(self, limits: Limits, time: PromptTime, stats: SchedulerStats) -> None:
        """Begin with the first step of an engine.

        Args:
            time: estimates how long prompts take. stats: counts requests that wait.
        """
        self._stats = stats
        self._computing = []
        self._block_size = limits.block_size
        self._time = time

    def begin(self, running: Iterable[Request]) -> None:
        """Find the requests that compute a prompt; call it before the questions below."""
        self._computing = [one for one in running if _num_to_publish(one)]

    def note_admission(self, request: Request) -> None:
        """A request was admitted."""
        request.awaits = None
        if _num_to_publish(request):
            self._computing.append(request)

    def still_waits(self, request: Request, now: float) -> bool:
        """Return whether a request still waits for blocks that are being computed."""
        other = request.awaits
        if other is None:
            return False
        if other.num_published >= request.num_awaited or other.row is None or other.is_ended:
            request.awaits = None
        return request.awaits is not None and now < request.awaits_until

    def waits(self, request: Request, num_hits: int, now: float) -> bool:
        """Return whether a request that waits for no prefix begins to wait for one.

        Args:
            request: must have the keys of all its known tokens.
            num_hits: its cached blocks.
        """
        num_most = (len(request.token_ids) - 1) // self._block_size
        keys = request.block_keys[:num_most]
        num_known = num_hits
        if request.awaits_until <= now:  # it only waits for blocks behind those it waited for
            num_known = max(num_hits, request.end_awaited // self._block_size)
        found = max(
            ((_num_common(one, keys, num_known), one) for one in self._computing),
            key=lambda pair: pair[0],
            default=None,
        )
        if found is None or found[0] <= num_known:
            return False
        if self.seconds(found[0] - num_hits, num_hits) < _WORTH * self._time.of(1):
            return False
        until = self._until(request, num_hits, found[0], now)
        if until <= now:
            return False
        if request.awaits_until == inf:
            self._stats.prefix_waits += 1
        request.num_awaited, request.awaits, request.awaits_until = *found, until
        return True

    def _until(self, request: Request, num_hits: int, num_blocks: int, now: float) -> float:
        """Return the time until which a request waits at most for its first `num_blocks` blocks.

        If prefixes diverge at several points, it finds the next part when the last one is there.
        Blocks that it already waited for are not counted again.
        """
        until = now if request.awaits_until == inf else request.awaits_until
        num_known = max(num_hits, request.end_awaited // self._block_size)
        if num_blocks > num_known:
            until += self.seconds(num_blocks - num_known, num_known)
            request.end_awaited = num_blocks * self._block_size
        return until

    def seconds(self, num_blocks: int, num_before: int) -> float:
        """Estimate the seconds to compute `num_blocks` blocks behind `num_before` others."""
        return self._time.of(num_blocks * self._block_size, num_before * self._block_size)


def _num_to_publish(request: Request) -> int:
    """Full blocks of a running request's prompt that are not computed yet."""
    return len(request.block_keys) - request.num_published


def _num_common(running: Request, keys: Sequence[bytes], num_hits: int) -> int:
    """Blocks of a prefix that a running request has in common, of which `num_hits` are known."""
    own = running.block_keys
    num_most = min(len(own), len(keys))
    if num_hits >= num_most or own[num_hits] != keys[num_hits]:
        return num_hits
    # A key covers all tokens before it, so prefixes that have diverged never meet again.
    return bisect_left(range(num_most), True, num_hits, key=lambda i: own[i] != keys[i])
