"""From alternating measurements to a verdict: ratios of pairs, how sure their median is, bars.

Pure functions and values; must not know sides, cases or files.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from figures import Ratio, ratio

Verdict = Literal["met", "missed", "does not count"]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """Where the median of what was sampled from lies, with probability `confidence`."""

    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float]) -> Interval:
    """The narrowest interval of order statistics that has the median with `CONFIDENCE`.

    No distribution is assumed: of n independent values, each is below the median with
    probability 1/2, so that the k-th lowest exceeds it as rarely as fewer than k of n coins show
    heads (David, Nagaraja 2003, "Order Statistics", section 7.1). Fewer than six values never
    suffice; theirs is the whole range, with the confidence that it has.
    """
    ordered = sorted(values)
    size = len(ordered)
    place, outside = 0, 2 / 2**size
    while True:
        further = outside + 2 * math.comb(size, place + 1) / 2**size
        if further > 1 - CONFIDENCE:
            break
        place, outside = place + 1, further
    return Interval(ordered[place], ordered[-1 - place], max(0.0, 1 - outside))


@dataclass(frozen=True)
class Bar:
    """What a ratio of rates must reach.

    Attributes:
        forgives_noise: miss only where the whole interval of the median lies below; for bars that
            say "no loss", of which a run of the same thing twice would miss some by chance.
        min_distinct: share of the output's 4-grams that must be distinct for the ratio to count: a
            text that goes round in circles is easily guessed.
    """

    least: float
    forgives_noise: bool = False
    min_distinct: float = 0.0

    def verdict(self, median: float, interval: Interval, distinct: float) -> Verdict:
        """Compare."""
        if distinct < self.min_distinct:
            return "does not count"
        reached = interval.high if self.forgives_noise else median
        return "met" if reached >= self.least else "missed"


@dataclass(frozen=True)
class Judgement:
    """One contender against the best of its rivals."""

    contender: str
    rival: str
    ratio: Ratio
    interval: Interval
    verdict: Verdict


def judge(
    rates: Mapping[str, Sequence[float]], contender: str, bar: Bar, distinct: float
) -> Judgement:
    """Compare one side with the one that has the highest median among all others.

    Args:
        rates: by side, repetition by repetition; those of one repetition are pairs.
        distinct: share of the contender's 4-grams that are distinct.
    """
    rivals = [label for label in rates if label != contender]
    rival = max(rivals, key=lambda label: statistics.median(rates[label]))
    over, under = rates[contender], rates[rival]
    found = ratio(over, under)
    interval = median_interval([a / b for a, b in zip(over, under, strict=True)])
    verdict = bar.verdict(found.median, interval, distinct)
    return Judgement(contender, rival, found, interval, verdict)


def distinct_share(outputs: Sequence[Sequence[int]], size: int = 4) -> float:
    """The share of distinct n-grams of `size` tokens in each output, on average; 1 without any."""
    shares = []
    for tokens in outputs:
        grams = list(zip(*(tokens[start:] for start in range(size)), strict=False))
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return statistics.mean(shares) if shares else 1.0


def sum_at_positions(counts: Sequence[Sequence[int]]) -> list[int]:
    """Add lists of counts position by position; they may have different lengths."""
    sums = [0] * max(map(len, counts), default=0)
    for each in counts:
        for position, count in enumerate(each):
            sums[position] += count
    return sums
