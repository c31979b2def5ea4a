"""Which waiting requests wait for a prefix that another one is computing.

Owns that choice. Must not know rows, nor in which order requests are admitted.

Of several requests that come at once with a long common prefix, one computes it; the others are
passed over until it is in the cache::

    step     1              2              3
    a   ─► [ prefix     ][ own   ][ generates ...
    b   ─►   waits          waits    [ own ][ ...        a block is there at the apply() of its step

A request waits no longer than the prefix would take it by itself, however often whoever computes it
loses its blocks or goes away. Where prefixes part more than once, that is so of each part. What is
not worth a step is computed at once by all.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

from charonia.control.estimators.prompt_time import PromptTime
from charonia.control.state.limits import Limits
from charonia.control.state.request import Request
from charonia.control.state.stats import SchedulerStats

_WORTH = 2.0
"""Steps of one token that a prefix must take, for others to wait for it: the one behind which they
come, and one more where steps overlap."""


class PrefixSharing:
    """Has requests wait for blocks that a running one will publish."""

    def __init__(self) -> None:
        self._computing: list[Request] = []
        self._block_size: int
        self._time: PromptTime
        self._stats: SchedulerStats

    def start_epoch(self, limits: Limits, time: PromptTime, stats: SchedulerStats) -> None:
        """Begin with the first step of an engine.

        Args:
            time: that prompts take. stats: where to count who waits.
        """
        self._stats = stats
        self._computing = []
        self._block_size = limits.block_size
        self._time = time

    def begin(self, running: Iterable[Request]) -> None:
        """Look who computes a prompt, before it is asked who waits."""
        self._computing = [one for one in running if _num_to_publish(one)]

    def note_admission(self, request: Request) -> None:
        """A request has a row."""
        request.awaits = None
        if _num_to_publish(request):
            self._computing.append(request)

    def still_waits(self, request: Request, now: float) -> bool:
        """Whether what a request was found to wait for is still to come."""
        other = request.awaits
        if other is None:
            return False
        if other.num_published >= request.num_awaited or other.row is None or other.is_ended:
            request.awaits = None
        return request.awaits is not None and now < request.awaits_until

    def waits(self, request: Request, num_hits: int, now: float) -> bool:
        """Whether a request that does not wait for a prefix is to do so from now on.

        Args:
            request: its keys are those of all that it knows.
            num_hits: blocks of it that are cached.
        """
        num_most = (len(request.token_ids) - 1) // self._block_size
        keys = request.block_keys[:num_most]
        num_known = num_hits
        if request.awaits_until <= now:  # only what is behind all that it waited for counts
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
        """When a request has waited long enough for so many blocks, and for those before.

        Where prefixes part more than once it finds the next part when the last one is there. What
        it has waited for once counts once.
        """
        until = now if request.awaits_until == inf else request.awaits_until
        num_known = max(num_hits, request.end_awaited // self._block_size)
        if num_blocks > num_known:
            until += self.seconds(num_blocks - num_known, num_known)
            request.end_awaited = num_blocks * self._block_size
        return until

    def seconds(self, num_blocks: int, num_before: int) -> float:
        """What computing so many blocks takes behind others."""
        return self._time.of(num_blocks * self._block_size, num_before * self._block_size)


def _num_to_publish(request: Request) -> int:
    """Full blocks of a running request's prompt that are not computed yet."""
    return len(request.block_keys) - request.num_published


def _num_common(running: Request, keys: Sequence[bytes], num_hits: int) -> int:
    """How many blocks of a prefix will be there, of which so many are."""
    own = running.block_keys
    num_most = min(len(own), len(keys))
    if num_hits >= num_most or own[num_hits] != keys[num_hits]:
        return num_hits
    # A key stands for all before it: where two prefixes have parted they stay so.
    return bisect_left(range(num_most), True, num_hits, key=lambda i: own[i] != keys[i])
