"""The server enables its degradation levels one by one, and disables them in reverse.

Owns the present level and when it changes. Must not know how waits are measured.

The level rises fast, so that the queue does not grow meanwhile. It falls slowly, and only when the
wait is much shorter: else the gain of a level would undo the level at once.
"""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from charonia.config import SchedulerArgs
from charonia.control import LoadShedding
from charonia.core.gate.tenants import Tenants
from charonia.core.generation_request import GenerationRequest
from charonia.errors import OverloadedError
from charonia.events import event, warning_event
from charonia.metrics.metrics import Metrics
from charonia.protocol import SamplingParams

CLIMB_EVERY_S = 1.0
DESCEND_EVERY_S = 5.0
DESCEND_SHARE = 0.5
"""Share of `degradation_wait_s` below which a level is disabled."""
PROMPT_SHARE = 0.25


class Degradation:
    """The present level of degradation. `observe` is for one thread, all else for any thread.

    Args:
        log: takes one line.
    """

    def __init__(
        self, args: SchedulerArgs, tenants: Tenants, metrics: Metrics, *, log: Callable[[str], None]
    ) -> None:
        self._wait_s = args.degradation_wait_s
        self._levels = args.degradation_levels
        self._max_tokens = args.degradation_max_tokens
        self._tenants = tenants
        self._metrics = metrics
        self._log = log
        self._level = 0
        self._moved_at = 0.0
        self._seen_wait_s = 0.0
        metrics.gauges["charonia_degradation_level", ""] = 0.0

    @property
    def level(self) -> int:
        """Number of levels in effect."""
        return self._level

    @property
    def shedding(self) -> LoadShedding:
        """The load shedding of steps at this level."""
        active = self._levels[: self._level]
        return LoadShedding(
            speculates="speculation" not in active,
            prompt_share=PROMPT_SHARE if "chunks" in active else 1.0,
        )

    def observe(self, wait_s: float | None, now: float) -> bool:
        """Enable a level or disable one, if it is time.

        Args:
            wait_s: expected wait of a new request for its first step; None if unknown.
            now: seconds, monotonic.

        Returns:
            Whether the number of levels in effect has changed.
        """
        if self._wait_s is None or wait_s is None:
            return False
        self._seen_wait_s = wait_s
        level, passed = self._level, now - self._moved_at
        if wait_s > self._wait_s and passed >= CLIMB_EVERY_S:
            level = min(level + 1, len(self._levels))
        elif wait_s < DESCEND_SHARE * self._wait_s and passed >= DESCEND_EVERY_S:
            level = max(level - 1, 0)
        if level == self._level:
            return False
        self._level, self._moved_at = level, now
        self._metrics.gauges["charonia_degradation_level", ""] = float(level)
        levels = ",".join(self._levels[:level])
        make = warning_event if level else event
        self._log(make("degradation", taken=level, levels=levels, wait_s=round(wait_s, 3)))
        return True

    def check(self, params: SamplingParams) -> None:
        """Refuse a request of low priority if "rejection" is in effect.

        Raises:
            OverloadedError: it is refused.
        """
        if "rejection" not in self._levels[: self._level] or not self._is_low(params):
            return
        assert self._wait_s is not None
        raise OverloadedError(
            "the server has more to do than it can, and takes no requests of low priority",
            retry_after_s=max(DESCEND_EVERY_S, self._seen_wait_s - self._wait_s),
        )

    def capped(self, request: GenerationRequest) -> GenerationRequest:
        """The request, its `max_tokens` lowered if that level is in effect and its priority low."""
        params = request.params
        max_tokens = max(self._max_tokens, params.min_tokens)
        if (
            "max_tokens" not in self._levels[: self._level]
            or params.max_tokens <= max_tokens
            or request.is_probe
            or not self._is_low(params)
        ):
            return request
        self._metrics.count("charonia_capped_requests_total")
        return replace(request, params=msgspec.structs.replace(params, max_tokens=max_tokens))

    def _is_low(self, params: SamplingParams) -> bool:
        return params.priority > 0 or self._tenants.of(params.tenant).low_priority
