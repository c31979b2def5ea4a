"""Reports on runs: numbers for each run and each class of requests, as tables and as JSON.

Owns which numbers these are. Must not know how they were made.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from charonia.simulate.distribution import Distribution
from charonia.simulate.simulator import FINISHED, Outcome, Served
from charonia.traces import TraceRequest

By = Literal["tenant", "priority"]
ALL = "all"
RECORDED = "as recorded"
MAX_CLASSES = 32
_MISSING = "-"
_UNFINISHED = "not finished"


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Quantiles of a time, in seconds; None without values."""

    p50: float | None = None
    p99: float | None = None
    mean: float | None = None
    longest: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantiles":
        """Compute them from values."""
        if not values:
            return cls()
        p50, p99 = np.percentile(values, (50, 99))
        return cls(p50=float(p50), p99=float(p99), mean=float(np.mean(values)), longest=max(values))

    @classmethod
    def of_distribution(cls, values: Distribution) -> "Quantiles":
        """Compute them from buckets."""
        return cls(p50=values.quantile(0.5), p99=values.quantile(0.99), mean=values.mean)


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """The requests of one class.

    Attributes:
        outcomes: number of requests by outcome.
        ttft, inter_token, total: time to first token, between tokens, to the end.
        queue: to the first step.
        attainment: share of requests with a deadline that met it, without those whose refusal
            is their client's doing; None without any.
    """

    name: str
    num_requests: int
    num_tokens: int
    outcomes: dict[str, int]
    ttft: Quantiles
    inter_token: Quantiles
    total: Quantiles
    queue: Quantiles
    attainment: float | None

    @property
    def num_finished(self) -> int:
        """Requests that got all their tokens."""
        return sum(self.outcomes.get(outcome, 0) for outcome in FINISHED)

    @property
    def unfinished(self) -> dict[str, int]:
        """Number of the other requests by outcome."""
        return {kind: num for kind, num in self.outcomes.items() if kind not in FINISHED}


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The result of one run.

    Attributes:
        classes: the first is of all requests.
        seconds: from the first arrival to the last end. utilization: share of them in steps.
        mean_rows: of a step. hit_rate: of the prefix cache, by tokens.
        service_difference: the greatest between two tenants that both had requests waiting, in
            tokens (see `ServiceDifference`); service_bound: its bound under fair shares; None
            with one tenant.
    """

    name: str
    classes: list[ClassReport]
    seconds: float
    utilization: float | None = None
    mean_rows: float | None = None
    num_preemptions: int | None = None
    hit_rate: float | None = None
    service_difference: float | None = None
    service_bound: float | None = None

    @property
    def overall(self) -> ClassReport:
        """All requests."""
        return self.classes[0]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.overall.num_tokens / self.seconds if self.seconds else 0.0


def report(name: str, outcome: Outcome, by: Sequence[By], pool_tokens: int) -> RunReport:
    """Sum up a run.

    Args:
        by: what requests are grouped by into classes, one grouping after the other.
        pool_tokens: size of the KV cache in tokens.
    """
    overall = Distribution()
    for times in outcome.inter_token.values():
        overall.merge(times)
    classes = [_class_report(ALL, outcome.served, overall)]
    for grouping in by:
        classes += _classes(outcome, grouping)
    tenants = outcome.service.service
    longest = max((one.request.input_length for one in outcome.served), default=0)
    lightest = outcome.service.lightest
    return RunReport(
        name=name,
        classes=classes,
        seconds=outcome.seconds,
        utilization=outcome.busy_s / outcome.seconds if outcome.seconds else 0.0,
        mean_rows=outcome.mean_rows,
        num_preemptions=outcome.num_preemptions,
        hit_rate=outcome.hit_rate,
        service_difference=outcome.service.greatest if len(tenants) > 1 else None,
        service_bound=(
            outcome.service.bound(longest, pool_tokens, lightest) if len(tenants) > 1 else None
        ),
    )


def recorded(trace: Sequence[TraceRequest]) -> RunReport | None:
    """Sum up the measurements in a trace; None if it has none."""
    timed = [one for one in trace if one.ttft_ms is not None and one.total_ms is not None]
    if not timed:
        return None
    inter_token = Distribution()
    ends, ttft, total, queue = [], [], [], []
    outcomes: defaultdict[str, int] = defaultdict(int)
    for one in trace:
        outcomes[one.outcome] += 1
    for one in timed:
        assert one.ttft_ms is not None
        assert one.total_ms is not None
        ttft.append(one.ttft_ms / 1000)
        total.append(one.total_ms / 1000)
        if one.queue_ms is not None:
            queue.append(one.queue_ms / 1000)
        ends.append(one.timestamp + one.total_ms)
        if one.output_length > 1:
            gap = (one.total_ms - one.ttft_ms) / 1000 / (one.output_length - 1)
            inter_token.observe(gap, one.output_length - 1)
    overall = ClassReport(
        name=ALL,
        num_requests=len(trace),
        num_tokens=sum(one.output_length for one in trace),
        outcomes=dict(outcomes),
        ttft=Quantiles.of(ttft),
        # The trace has only the mean gap of each request.
        inter_token=Quantiles(mean=inter_token.mean),
        total=Quantiles.of(total),
        queue=Quantiles.of(queue),
        attainment=None,
    )
    seconds = (max(ends) - trace[0].timestamp) / 1000
    return RunReport(name=RECORDED, classes=[overall], seconds=seconds)


def sameness(reports: Sequence[RunReport], traffic: Sequence[TraceRequest]) -> str:
    """Explain why several runs with this traffic are equal; "" if they are not."""
    first, *others = (replace(one, name="") for one in reports)
    if not others or any(one != first for one in others):
        return ""
    longest = first.overall.queue.longest
    if longest is None:
        return "All runs are equal: no request was begun."
    tenants = _number(len({one.tenant for one in traffic}), "tenant", "tenants")
    priorities = _number(len({one.priority for one in traffic}), "priority", "priorities")
    deadlines = _number(sum(1 for one in traffic if one.deadline_ms), "deadline", "deadlines")
    return (
        "All runs are equal. Policies order requests that wait, by tenant, priority or deadline;"
        f" here requests waited {_seconds(longest)} s at most, and have {tenants}, {priorities} and"
        f" {deadlines}."
    )


def _classes(outcome: Outcome, by: By) -> list[ClassReport]:
    """The greatest classes of a grouping."""
    inter_token: defaultdict[str, Distribution] = defaultdict(Distribution)
    for (tenant, priority), times in outcome.inter_token.items():
        inter_token[_class_name(by, tenant, priority)].merge(times)
    members: defaultdict[str, list[Served]] = defaultdict(list)
    for served in outcome.served:
        members[_class_name(by, served.request.tenant, served.request.priority)].append(served)
    names = sorted(members, key=lambda one: (-len(members[one]), one))[:MAX_CLASSES]
    return [_class_report(one, members[one], inter_token[one]) for one in names]


def _class_name(by: By, tenant: str, priority: int) -> str:
    return f"priority {priority}" if by == "priority" else tenant or "(no tenant)"


def _class_report(name: str, members: Sequence[Served], inter_token: Distribution) -> ClassReport:
    outcomes: defaultdict[str, int] = defaultdict(int)
    for one in members:
        outcomes[one.outcome] += 1
    due = [one for one in members if one.expires_at is not None and not one.is_clients_doing]
    in_time = sum(one.is_finished and one.ended_at <= (one.expires_at or 0) for one in due)
    return ClassReport(
        name=name,
        num_requests=len(members),
        num_tokens=sum(one.num_tokens for one in members),
        outcomes=dict(outcomes),
        ttft=_since_arrival(members, lambda one: one.first_token_at),
        inter_token=Quantiles.of_distribution(inter_token),
        total=_since_arrival(members, lambda one: one.ended_at if one.is_finished else None),
        queue=_since_arrival(members, lambda one: one.started_at),
        attainment=in_time / len(due) if due else None,
    )


def _since_arrival(members: Iterable[Served], when: Callable[[Served], float | None]) -> Quantiles:
    times = ((when(one), one.arrived_at) for one in members)
    return Quantiles.of([at - arrived_at for at, arrived_at in times if at is not None])


# ---------------------------------------------------------------------- as text


def tables(reports: Sequence[RunReport]) -> str:
    """Write all runs as Markdown: totals per run, then the classes."""
    parts = ["## Runs", "", _runs_table(reports)]
    if any(len(one.classes) > 1 for one in reports):
        parts += ["", "## Classes", "", _classes_table(reports)]
    return "\n".join(parts) + "\n"


def _runs_table(reports: Sequence[RunReport]) -> str:
    has_tenants = any(one.service_difference is not None for one in reports)
    has_deadlines = any(one.overall.attainment is not None for one in reports)
    has_unfinished = any(one.overall.unfinished for one in reports)
    header = [
        "run",
        "requests",
        "finished",
        "tokens/s",
        "TTFT p50, s",
        "p99",
        "between tokens mean, ms",
        "p50",
        "p99",
        "longest wait, s",
        "engine busy",
        "rows",
        "preempted",
        "cache hits",
    ]
    header += ["in time"] if has_deadlines else []
    header += ["service difference", "bound"] if has_tenants else []
    header += [_UNFINISHED] if has_unfinished else []
    rows = []
    for one in reports:
        overall = one.overall
        row = [
            one.name,
            f"{overall.num_requests:,}",
            f"{overall.num_finished:,}",
            f"{one.tokens_per_s:,.0f}",
            _seconds(overall.ttft.p50),
            _seconds(overall.ttft.p99),
            *_times(overall),
            _seconds(overall.queue.longest),
            _share(one.utilization),
            _MISSING if one.mean_rows is None else f"{one.mean_rows:.1f}",
            _MISSING if one.num_preemptions is None else f"{one.num_preemptions:,}",
            _share(one.hit_rate),
        ]
        row += [_share(overall.attainment)] if has_deadlines else []
        row += [_count(one.service_difference), _count(one.service_bound)] if has_tenants else []
        row += [_kinds(overall.unfinished)] if has_unfinished else []
        rows.append(row)
    return _markdown(header, rows)


def _classes_table(reports: Sequence[RunReport]) -> str:
    header = ["run", "class", "requests", "finished", "tokens", "TTFT p50, s", "p99"]
    header += ["between tokens mean, ms", "p50", "p99", "longest wait, s", "in time"]
    has_unfinished = any(part.unfinished for one in reports for part in one.classes[1:])
    header += [_UNFINISHED] if has_unfinished else []
    rows = [
        [
            one.name,
            part.name,
            f"{part.num_requests:,}",
            f"{part.num_finished:,}",
            f"{part.num_tokens:,}",
            _seconds(part.ttft.p50),
            _seconds(part.ttft.p99),
            *_times(part),
            _seconds(part.queue.longest),
            _share(part.attainment),
            *([_kinds(part.unfinished)] if has_unfinished else []),
        ]
        for one in reports
        for part in one.classes[1:]
    ]
    return _markdown(header, rows)


def _times(part: ClassReport) -> list[str]:
    times = part.inter_token
    return [_milliseconds(times.mean), _milliseconds(times.p50), _milliseconds(times.p99)]


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _kinds(counts: dict[str, int]) -> str:
    """Write counts by kind, the greatest first; the kind may be missing in a trace."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{num:,} {kind or 'unknown'}" for kind, num in ordered) or _MISSING


def _number(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _seconds(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _milliseconds(value: float | None) -> str:
    return _MISSING if value is None else _seconds(value * 1000)


def _share(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.1%}"


def _count(value: float | None) -> str:
    return _MISSING if value is None else f"{value:,.0f}"
