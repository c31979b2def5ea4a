"""When a ratio is shown to reach a bar: the interval of a median, verdicts, judgements."""

import math
import random

import pytest

from medians import Interval, median_interval
from speculation.verdicts import judge, sum_at_positions
from text_repetition import MOST_CIRCLING
from thresholds import Verdict, verdict


def interval(low: float, high: float) -> Interval:
    return Interval(low, high, 0.98)


def test_seven_values_suffice_for_no_less_than_their_range() -> None:
    found = median_interval([3.0, 1.0, 2.0, 7.0, 5.0, 6.0, 4.0])
    assert found is not None
    assert (found.low, found.high) == (1.0, 7.0)
    assert found.confidence == pytest.approx(1 - 2 / 2**7)


@pytest.mark.parametrize(
    ("size", "low", "high"),  # as tables of the sign test have them
    [(6, 1, 6), (8, 1, 8), (9, 2, 8), (11, 2, 10), (12, 3, 10), (25, 8, 18), (100, 40, 61)],
)
def test_more_values_leave_the_outermost_ones_out(size: int, low: int, high: int) -> None:
    values = [float(value) for value in range(1, size + 1)]
    random.Random(0).shuffle(values)
    found = median_interval(values)
    assert found is not None
    assert (found.low, found.high) == (low, high)
    assert found.confidence >= 0.95


@pytest.mark.parametrize("size", range(6))
def test_fewer_than_six_values_give_no_interval(size: int) -> None:
    assert median_interval([1.0] * size) is None


@pytest.mark.parametrize("size", [7, 9, 12])
def test_the_interval_has_the_median_as_often_as_it_says(size: int) -> None:
    shuffler = random.Random(0)
    trials, hits, confidence = 4000, 0, 0.0
    for _ in range(trials):
        found = median_interval([shuffler.expovariate(1.0) for _ in range(size)])
        assert found is not None
        confidence = found.confidence
        hits += found.low <= math.log(2) <= found.high
    assert hits / trials == pytest.approx(confidence, abs=0.01)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.0, 1.2, "met"),
        (0.999, 1.2, "not shown"),
        (0.8, 1.0, "not shown"),
        (0.8, 0.999, "missed"),
        (1.0, 1.0, "met"),
    ],
)
def test_only_the_lower_end_meets_a_bar_and_only_the_upper_end_misses_it(
    low: float, high: float, expected: Verdict
) -> None:
    assert verdict(interval(low, high), 1.0) == expected


def test_nothing_is_shown_by_too_few_values() -> None:
    assert verdict(median_interval([9.0] * 5), 1.0) == "not shown"
    assert verdict(median_interval([9.0] * 6), 1.0) == "met"
    assert verdict(median_interval([0.1] * 5), 1.0) == "not shown"


@pytest.mark.parametrize("bar", [0.97, 2.0])
def test_one_bad_pair_of_seven_keeps_a_gain_and_no_loss_alike_from_being_shown(bar: float) -> None:
    rates = [bar * 1.5] * 6 + [bar * 0.9]
    found = judge({"off": [1.0] * 7, "on": rates}, "on", bar, circling=0.0)
    assert found.ratio.median > bar
    assert found.verdict == "not shown"
    more = judge({"off": [1.0] * 9, "on": [*rates, bar * 1.5, bar * 1.5]}, "on", bar, circling=0.0)
    assert more.verdict == "met"


@pytest.mark.parametrize("rate", [9.0, 0.1])
def test_text_that_goes_in_circles_neither_meets_nor_misses(rate: float) -> None:
    rates = {"off": [1.0] * 9, "on": [rate] * 9}
    assert judge(rates, "on", 1.0, MOST_CIRCLING + 0.001).verdict == "counts nowhere"
    assert judge(rates, "on", 1.0, MOST_CIRCLING).verdict in ("met", "missed")


def test_the_contender_is_judged_against_the_side_with_the_best_median_pair_by_pair() -> None:
    rates = {
        "depth 0": [10.0] * 6,
        "depth 1": [20.0, 12.0, 1.0, 12.0, 12.0, 12.0],
        "adaptive": [10.0, 15.0, 2.0, 18.0, 18.0, 18.0],
    }
    found = judge(rates, "adaptive", 1.0, circling=0.0)
    assert (found.contender, found.rival) == ("adaptive", "depth 1")
    assert found.ratio.median == 1.5
    assert found.ratio.interval == Interval(0.5, 2.0, 1 - 2 / 2**6)
    assert found.verdict == "not shown"


def test_counts_of_different_lengths_are_added_by_position() -> None:
    assert sum_at_positions([[1, 2], [10], [], [0, 0, 3]]) == [11, 2, 3]
    assert sum_at_positions([]) == []
