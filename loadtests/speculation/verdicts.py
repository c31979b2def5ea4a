"""Judgement of alternating measurements, and sums over the positions of drafts.

Pure functions and values; must not know sides, cases or files.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from figures import Ratio, ratio
from text_repetition import MOST_CIRCLING
from thresholds import Verdict, verdict


@dataclass(frozen=True)
class Judgement:
    """One contender against the best of its rivals."""

    contender: str
    rival: str
    ratio: Ratio
    verdict: Verdict


def judge(
    rates: Mapping[str, Sequence[float]], contender: str, bar: float, circling: float
) -> Judgement:
    """Compare one side with the one that has the highest median among all others.

    Args:
        rates: by side, repetition by repetition; those of one repetition are pairs.
        bar: what the ratio must reach.
        circling: share of the text that goes in circles.
    """
    rivals = [label for label in rates if label != contender]
    rival = max(rivals, key=lambda label: statistics.median(rates[label]))
    found = ratio(rates[contender], rates[rival])
    counts = circling <= MOST_CIRCLING
    said: Verdict = verdict(found.interval, bar) if counts else "counts nowhere"
    return Judgement(contender, rival, found, said)


def sum_at_positions(counts: Sequence[Sequence[int]]) -> list[int]:
    """Add lists of counts position by position; they may have different lengths."""
    sums = [0] * max(map(len, counts), default=0)
    for each in counts:
        for position, count in enumerate(each):
            sums[position] += count
    return sums
