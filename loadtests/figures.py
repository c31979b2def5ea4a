"""From what was observed to figures: rates and latencies of a run, medians, pairwise ratios.

Pure functions; must not know sides or files.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from medians import Interval, median_interval
from sides import WaveTrace

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


def decode_figures(waves: Sequence[WaveTrace], new_tokens: int) -> Figures:
    """Output rate over all waves, rate without the prefill, latencies in milliseconds.

    Raises:
        WrongOutputError: a request had more or fewer tokens.
    """
    _check_counts(waves, new_tokens)
    requests = [request for wave in waves for request in wave.requests]
    ttfts = [request.arrivals[0] * 1000 for request in requests]
    gaps = [gap * 1000 for request in requests for gap in request.gaps()]
    figures = {
        "tokens_per_second": new_tokens * len(requests) / sum(wave.seconds for wave in waves),
        "ttft_ms_p50": statistics.median(ttfts),
        "ttft_ms_p95": quantile(ttfts, 0.95),
        "inter_token_ms_p50": statistics.median(gaps),
        "inter_token_ms_p95": quantile(gaps, 0.95),
    }
    if all(len(wave.requests) == 1 for wave in waves):
        after_first = sum(new_tokens - request.counts[0] for request in requests)
        seconds = sum(request.arrivals[-1] - request.arrivals[0] for request in requests)
        figures["decode_tokens_per_second"] = after_first / seconds
    return figures


def prefill_figures(waves: Sequence[WaveTrace], prompt_tokens: int) -> Figures:
    """Prompt tokens per second over all waves.

    Raises:
        WrongOutputError: a request did not have exactly one token.
    """
    _check_counts(waves, 1)
    num_requests = sum(len(wave.requests) for wave in waves)
    seconds = sum(wave.seconds for wave in waves)
    return {"tokens_per_second": prompt_tokens * num_requests / seconds}


def median_figures(runs: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Repetition by repetition: `over[i]` and `under[i]` were measured in turn."""
    pairs = [above / below for above, below in zip(over, under, strict=True)]
    return Ratio(statistics.median(pairs), median_interval(pairs), min(pairs), max(pairs))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two completions have in common before they part."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of the values do not exceed, roughly."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def _check_counts(waves: Sequence[WaveTrace], expected: int) -> None:
    counts = {sum(request.counts) for wave in waves for request in wave.requests}
    if counts != {expected}:
        raise WrongOutputError(f"requests had {sorted(counts)} tokens; asked for were {expected}")
