"""Counts and distributions of what the engine did, as plain numbers in this process.

Owns the metrics' names and values. Must not know how they are exported: `serving` reads
the numbers and drains the observations twice a second. Written by the engine's thread alone,
except for rejections, which the service counts under its lock.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

from charonia.control import DraftCounts, Scheduler
from charonia.protocol import Collectives

MAX_UNDRAINED = 10_000
"""Observations of one name that are kept while nobody drains them; later ones are left out."""

Series = tuple[str, str]
"""A metric's name and the value of its one label, "" where it has none."""

LABELS = {
    "charonia_prompt_tokens_total": "source",
    "charonia_step_phase_seconds_total": "phase",
    "charonia_finished_total": "reason",
    "charonia_rejections_total": "reason",
    "charonia_engine_failures_total": "kind",
    "charonia_collective_calls_total": "operation",
    "charonia_collective_bytes_total": "operation",
    "charonia_collective_seconds_total": "operation",
    "charonia_kv_blocks": "state",
    "charonia_accepted_at_position_total": "position",
    "charonia_drafted_at_position_total": "position",
}


PHASES = ("deliver", "transit", "apply", "draft", "verify")
"""Of a step, beside `charonia_plan_seconds` and the engine's own `charonia_step_seconds`.

deliver: text and chunks of the step before; the engine computes meanwhile.
transit: from the plan's being handed over until its result is here, less the engine's own time.
apply: committing the result.
draft, verify: of steps with drafts, in the draft model and in the rest of the engine.
"""


FAILURES = ("step_failed", "died", "hung", "load_failed")
"""Of the engine, each counted once.

step_failed: a step raised, and the engine lives. died: its process ended or hung up.
hung: it lives, but a step passed its deadline or a question was not answered.
load_failed: it cannot be loaded, or not in time; counted at every try.
"""


class Histogram:
    """A cumulative histogram for what is observed per token or per step.

    Args:
        bounds: upper bounds of the buckets, ascending; +Inf is added.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Record `value` as if observed `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """Per bound, and for +Inf: observations at most that large."""
        totals, total = [], 0
        for count in self.counts:
            total += count
            totals.append(total)
        return totals


_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class Metrics:
    """All metrics of one engine service.

    Attributes:
        counters, gauges: by series. histograms: per token or step, by name.
        observations: per request, by name, since the last `drain`.
    """

    LONG_BOUNDS: ClassVar[tuple[float, ...]] = (*_SHORT, 30.0, 60.0, 120.0)

    counters: dict[Series, float] = field(default_factory=lambda: defaultdict(float))
    gauges: dict[Series, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {
            "charonia_inter_token_seconds": Histogram(_SHORT),
            "charonia_step_seconds": Histogram(_SHORT),
            "charonia_plan_seconds": Histogram(
                (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)
            ),
        }
    )
    observations: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for name in (
            "charonia_generation_tokens_total",
            "charonia_cancellations_total",
            "charonia_preemptions_total",
            "charonia_prefix_cache_queried_tokens_total",
            "charonia_prefix_cache_hit_tokens_total",
            "charonia_draft_tokens_total",
            "charonia_accepted_tokens_total",
            "charonia_draft_rounds_total",
            "charonia_engine_restarts_total",
            "charonia_engine_reloads_total",
            "charonia_requests_quarantined_total",
            "charonia_requests_recomputed_total",
        ):
            self.counters[name, ""] = 0.0
        for source in ("computed", "cached"):
            self.counters["charonia_prompt_tokens_total", source] = 0.0
        for phase in PHASES:
            self.counters["charonia_step_phase_seconds_total", phase] = 0.0
        for reason in ("stop", "length"):
            self.counters["charonia_finished_total", reason] = 0.0
        for reason in ("invalid", "queue_full", "unavailable"):
            self.counters["charonia_rejections_total", reason] = 0.0
        for kind in FAILURES:
            self.counters["charonia_engine_failures_total", kind] = 0.0

    def count(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter."""
        self.counters[name, label] += amount

    def count_phase(self, phase: str, seconds: float) -> None:
        """Add to what steps spend beside computing, see `PHASES`."""
        self.counters["charonia_step_phase_seconds_total", phase] += max(seconds, 0.0)

    def count_end(
        self, reason: str, *, queue_s: float, total_s: float, num_prompt: int, num_tokens: int
    ) -> None:
        """Count a request that is over, and what it was.

        Args:
            queue_s: until its first step, or its end. total_s: from its arrival on.
            num_tokens: that it generated.
        """
        self.count("charonia_finished_total", label=reason)
        self.observe_request("charonia_queue_seconds", queue_s)
        self.observe_request("charonia_request_seconds", total_s)
        self.observe_request("request_prompt_tokens", num_prompt)
        self.observe_request("request_generation_tokens", num_tokens)

    def show_scheduler(self, scheduler: Scheduler) -> None:
        """Take over what the control plane counted, and how its blocks are used."""
        kv, stats, counters = scheduler.kv, scheduler.stats, self.counters
        for state, value in (
            ("total", kv.num_blocks - 1),
            ("used", kv.num_used),
            ("cached", kv.num_cached),
            ("free", kv.num_free - kv.num_cached),
        ):
            self.gauges["charonia_kv_blocks", state] = value
        counters["charonia_prompt_tokens_total", "computed"] = stats.prompt_tokens_computed
        counters["charonia_prompt_tokens_total", "cached"] = stats.prompt_tokens_cached
        counters["charonia_preemptions_total", ""] = stats.preemptions
        counters["charonia_prefix_cache_queried_tokens_total", ""] = stats.prefix_queried_tokens
        counters["charonia_prefix_cache_hit_tokens_total", ""] = stats.prefix_hit_tokens
        self.gauges["charonia_draft_depth", ""] = stats.draft_depth
        self.show_drafts(stats.drafts)

    def show_drafts(self, drafts: DraftCounts) -> None:
        """Take over what the control plane counted of drafts."""
        counters = self.counters
        draft_seconds = "charonia_step_phase_seconds_total", "draft"
        if (drafts.num_rounds, drafts.draft_seconds) == (
            counters["charonia_draft_rounds_total", ""],
            counters[draft_seconds],
        ):
            return  # most steps have no drafts
        counters["charonia_draft_rounds_total", ""] = drafts.num_rounds
        counters["charonia_draft_tokens_total", ""] = drafts.num_drafted
        counters["charonia_accepted_tokens_total", ""] = drafts.num_accepted
        for place, (drafted, accepted) in enumerate(
            zip(drafts.drafted_at, drafts.accepted_at, strict=True)
        ):
            counters["charonia_drafted_at_position_total", str(place)] = drafted
            counters["charonia_accepted_at_position_total", str(place)] = accepted
        counters[draft_seconds] = drafts.draft_seconds
        counters["charonia_step_phase_seconds_total", "verify"] = drafts.verify_seconds

    def count_collectives(self, collectives: Collectives) -> None:
        """Add what the engine's first rank exchanged with others."""
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
        """The per-request observations since the last call."""
        drained, self.observations = self.observations, defaultdict(list)
        return drained
