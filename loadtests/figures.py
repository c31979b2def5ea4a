"""Figures from observations: rates and latencies of a run, medians, pairwise ratios.

Pure functions; must not know sides or files.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from medians import Interval, median_interval
from systems_under_test import Waves, WaveTrace
from workloads import Kind

Figures = dict[str, float]


class WrongOutputError(Exception):
    """A side did not give what it was asked for, so its time means nothing."""


@dataclass(frozen=True)
class Ratio:
    """One rate over another, pair by pair.

    Attributes:
        interval: of the median; None where there are too few pairs.
        lowest, highest: of all pairs.
    """

    median: float
    interval: Interval | None
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.interval or 'too few pairs'})"


def decode_figures(waves: Sequence[WaveTrace], asked: Waves) -> Figures:
    """Output rate over all waves, rate without the prefill, latencies in milliseconds.

    Requests of one token have no time between tokens; without any other there are no such figures.

    Raises:
        WrongOutputError: a request had more or fewer tokens than were asked for.
    """
    check_counts(waves, asked)
    requests = [request for wave in waves for request in wave.requests]
    ttfts = [request.arrivals[0] * 1000 for request in requests]
    gaps = [gap * 1000 for request in requests for gap in request.gaps()]
    num_tokens = sum(request.max_tokens for wave in asked for request in wave)
    figures = {
        "tokens_per_second": num_tokens / sum(wave.seconds for wave in waves),
        "ttft_ms_p50": statistics.median(ttfts),
        "ttft_ms_p95": quantile(ttfts, 0.95),
        "ttft_ms_p99": quantile(ttfts, 0.99),
    }
    if not gaps:
        return figures
    figures["inter_token_ms_p50"] = statistics.median(gaps)
    figures["inter_token_ms_p95"] = quantile(gaps, 0.95)
    if all(len(wave.requests) == 1 for wave in waves):
        after_first = sum(sum(request.counts[1:]) for request in requests)
        seconds = sum(request.arrivals[-1] - request.arrivals[0] for request in requests)
        figures["decode_tokens_per_second"] = after_first / seconds
    return figures


def prefill_figures(waves: Sequence[WaveTrace], asked: Waves) -> Figures:
    """Prompt tokens per second over all waves.

    Raises:
        WrongOutputError: a request had more or fewer tokens than were asked for.
    """
    check_counts(waves, asked)
    num_tokens = sum(len(request.prompt) for wave in asked for request in wave)
    return {"tokens_per_second": num_tokens / sum(wave.seconds for wave in waves)}


def figures_of(kind: Kind, waves: Sequence[WaveTrace], asked: Waves) -> Figures:
    """The figures of a round of this kind.

    Raises:
        WrongOutputError: a request had more or fewer tokens than were asked for.
    """
    return (prefill_figures if kind == "prefill" else decode_figures)(waves, asked)


def check_counts(waves: Sequence[WaveTrace], asked: Waves) -> None:
    """Compare how many tokens each request had with how many were asked for.

    Raises:
        WrongOutputError: they differ; it names the first such request.
    """
    traces = [trace for wave in waves for trace in wave.requests]
    requests = [request for wave in asked for request in wave]
    for number, (trace, request) in enumerate(zip(traces, requests, strict=True), start=1):
        if (count := sum(trace.counts)) != request.max_tokens:
            raise WrongOutputError(
                f"request {number} of {len(requests)} had {count} tokens; "
                f"asked for were {request.max_tokens}"
            )


def median_figures(runs: Sequence[Figures]) -> Figures:
    """The median of each figure, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Repetition by repetition: `over[i]` and `under[i]` were measured in turn."""
    pairs = [above / below for above, below in zip(over, under, strict=True)]
    return Ratio(statistics.median(pairs), median_interval(pairs), min(pairs), max(pairs))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the tokens that two completions have in common before they part."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of the values do not exceed, roughly."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]
