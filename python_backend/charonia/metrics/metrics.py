"""Counts and distributions of what the engine did, as plain numbers in this process.

Owns the values; `metric_table` has names and meanings. Must not know how they are exported:
`triton_page` reads the numbers and drains the observations. Only the scheduling thread writes,
except for rejections, which the service counts under its lock.

What belongs to a request is counted before its last chunk is delivered. But what the control plane
counts of one that ends at a stop string may be shown a step later.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field
from operator import attrgetter

from charonia.control import Scheduler
from charonia.metrics.metric_table import BY_NAME, METRICS
from charonia.protocol import Collectives, MemoryReport

MAX_UNDRAINED = 10_000
"""Observations per name that are kept until they are drained; later ones are dropped."""

Series = tuple[str, str]
"""A metric's name and the value of its one label, "" if it has none."""
_GENERATED: Series = "charonia_generation_tokens_total", ""
_BLOCKS: tuple[Series, ...] = (
    *(("charonia_kv_blocks", state) for state in ("total", "used", "cached", "free", "aside")),
    ("charonia_kv_retained_blocks", ""),
)
"""Series of the fields of `BlockUsage`."""
_GAUGES: dict[Series, str] = {
    ("charonia_draft_depth", ""): "draft_depth",
    ("charonia_max_rows", ""): "max_rows",
    ("charonia_max_step_tokens", ""): "max_step_tokens",
}
_COUNTERS: dict[Series, str] = {
    ("charonia_prompt_tokens_total", "computed"): "prompt_tokens_computed",
    ("charonia_prompt_tokens_total", "cached"): "prompt_tokens_cached",
    ("charonia_preemptions_total", ""): "preemptions",
    ("charonia_kv_blocks_evicted_total", ""): "blocks_evicted",
    ("charonia_kv_blocks_saved_total", ""): "blocks_saved",
    ("charonia_kv_blocks_loaded_total", ""): "blocks_loaded",
    ("charonia_kv_loads_failed_total", ""): "loads_failed",
    ("charonia_prefix_waits_total", ""): "prefix_waits",
    ("charonia_prefix_cache_queried_tokens_total", ""): "prefix_queried_tokens",
    ("charonia_prefix_cache_hit_tokens_total", ""): "prefix_hit_tokens",
    ("charonia_draft_rounds_total", ""): "drafts.num_rounds",
    ("charonia_draft_tokens_total", ""): "drafts.num_drafted",
    ("charonia_accepted_tokens_total", ""): "drafts.num_accepted",
    ("charonia_step_phase_seconds_total", "draft"): "drafts.draft_seconds",
    ("charonia_step_phase_seconds_total", "verify"): "drafts.verify_seconds",
}
"""Fields of `SchedulerStats` by the series that show them."""
_POSITIONS: dict[str, str] = {
    "charonia_drafted_at_position_total": "drafted_at",
    "charonia_accepted_at_position_total": "accepted_at",
}
"""Fields of `DraftCounts` by the family that shows them."""
_read_gauges, _read_counters = attrgetter(*_GAUGES.values()), attrgetter(*_COUNTERS.values())


class Histogram:
    """A cumulative histogram for observations per token or per step.

    Args:
        bounds: upper bounds of the buckets, ascending; +Inf is added.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Record `value` as if observed `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def _zeros() -> dict[Series, float]:
    """Return all counters that exist from the start, at 0."""
    zeros: dict[Series, float] = defaultdict(float)
    for name, metric in METRICS.items():
        if metric.kind == "counter":
            for label in metric.values if metric.label else ("",):
                zeros[name, label] = 0.0
    return zeros


@dataclass(slots=True)
class Metrics:
    """All metrics of one engine service.

    Attributes:
        counters, gauges: by series. histograms: per token or step, by name.
        observations: per request, by name, since the last `drain`.
    """

    counters: dict[Series, float] = field(default_factory=_zeros)
    gauges: dict[Series, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {
            name: Histogram(metric.buckets)
            for name, metric in METRICS.items()
            if metric.kind == "histogram" and metric.place == "page"
        }
    )
    observations: dict[str, deque[float]] = field(
        default_factory=lambda: {
            metric.shows or name: deque()
            for name, metric in BY_NAME.items()
            if metric.kind == "histogram" and metric.place == "triton"
        }
    )

    def count(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter."""
        self.counters[name, label] += amount

    def count_tokens(self, number: int) -> None:
        """Count generated tokens; called for each row of each step."""
        self.counters[_GENERATED] += number

    def name_tenant(self, label: str) -> None:
        """Show a tenant's counters from now on, even at 0."""
        for name, metric in METRICS.items():
            if metric.kind == "counter" and metric.label == "tenant":
                self.count(name, 0, label)

    def count_phase(self, phase: str, seconds: float) -> None:
        """Add to the time of a phase, see `metric_table.PHASES`."""
        self.counters["charonia_step_phase_seconds_total", phase] += max(seconds, 0.0)

    def count_end(
        self,
        reason: str,
        *,
        queue_s: float,
        total_s: float,
        num_prompt: int,
        num_tokens: int,
        n: int,
    ) -> None:
        """Count a request that is over.

        Args:
            queue_s: until its first step, or its end. total_s: from its arrival on.
            num_tokens: generated tokens. n: completions that it asked for.
        """
        self.count("charonia_finished_total", label=reason)
        self.observe_request("charonia_queue_seconds", queue_s)
        self.observe_request("charonia_request_seconds", total_s)
        self.observe_request("request_prompt_tokens", num_prompt)
        self.observe_request("request_generation_tokens", num_tokens)
        self.observe_request("request_params_n", n)

    def show_scheduler(self, scheduler: Scheduler) -> None:
        """Take over the control plane's counts, and how its blocks are used."""
        stats, tiers = scheduler.stats, dict(scheduler.tier_sizes())
        self.gauges.update(zip(_BLOCKS, scheduler.kv.usage, strict=True))
        for tier in ("host", "file"):
            self.gauges["charonia_kv_tier_blocks", tier] = tiers.get(tier, 0)
        self.gauges.update(zip(_GAUGES, _read_gauges(stats), strict=True))
        self.counters.update(zip(_COUNTERS, _read_counters(stats), strict=True))
        for name, counts in _POSITIONS.items():
            for position, count in enumerate(getattr(stats.drafts, counts)):
                self.counters[name, str(position)] = count

    def show_memory(self, memory: MemoryReport | None) -> None:
        """Take over an engine's memory report; 0 is unknown."""
        for part in ("weights", "step", "kv_cache", "left"):
            known = getattr(memory, part) if memory is not None else None
            self.gauges["charonia_engine_memory_bytes", part] = float(known or 0)

    def count_collectives(self, collectives: Collectives) -> None:
        """Add the exchanges of the engine's first rank with others."""
        for operation, (calls, num_bytes, seconds) in collectives.items():
            self.count("charonia_collective_calls_total", calls, operation)
            self.count("charonia_collective_bytes_total", num_bytes, operation)
            self.count("charonia_collective_seconds_total", seconds, operation)

    def observe_request(self, name: str, value: float) -> None:
        """Record one value of a per-request distribution."""
        values = self.observations[name]
        if len(values) < MAX_UNDRAINED:
            values.append(value)

    def drain(self) -> dict[str, list[float]]:
        """Return the per-request observations since the last call. For another thread.

        Each value is taken and removed in one operation, so none that comes meanwhile is lost.
        """
        return {
            name: [values.popleft() for _ in range(len(values))]
            for name, values in self.observations.items()
            if values
        }
