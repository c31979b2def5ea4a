"""The arithmetic of the benchmark of speculation: intervals of medians, bars, n-grams."""

import math
import random
import statistics

import pytest

from speculation.verdicts import (
    Bar,
    Interval,
    distinct_share,
    judge,
    median_interval,
    sum_at_positions,
)


def test_seven_values_suffice_for_no_less_than_their_range():
    interval = median_interval([3.0, 1.0, 2.0, 7.0, 5.0, 6.0, 4.0])
    assert (interval.low, interval.high) == (1.0, 7.0)
    assert interval.confidence == pytest.approx(1 - 2 / 2**7)


def test_more_values_leave_the_outermost_ones_out():
    interval = median_interval([float(value) for value in range(11)])
    assert (interval.low, interval.high) == (1.0, 9.0)
    assert interval.confidence == pytest.approx(1 - 2 * 12 / 2**11)
    wide = median_interval([float(value) for value in range(100)])
    assert (wide.low, wide.high) == (39.0, 60.0)  # as tables of the sign test have it


def test_few_values_are_said_to_be_less_sure():
    assert median_interval([2.0, 1.0, 3.0]) == Interval(1.0, 3.0, 0.75)
    assert median_interval([2.0]) == Interval(2.0, 2.0, 0.0)


def test_the_interval_has_the_median_as_often_as_it_says():
    shuffler = random.Random(0)
    trials, hits = 4000, 0
    for _ in range(trials):
        interval = median_interval([shuffler.expovariate(1.0) for _ in range(11)])
        hits += interval.low <= math.log(2) <= interval.high
    assert hits / trials == pytest.approx(1 - 2 * 12 / 2**11, abs=0.01)


def test_a_gain_must_be_reached_by_the_median():
    sure = Interval(1.5, 2.5, 0.98)
    assert Bar(2.0).verdict(2.0, sure, distinct=0.0) == "met"
    assert Bar(2.0).verdict(1.99, sure, distinct=0.0) == "missed"


def test_a_loss_is_one_only_where_the_whole_interval_is_below_the_bar():
    bar = Bar(0.97, forgives_noise=True)
    assert bar.verdict(0.9, Interval(0.8, 0.98, 0.98), distinct=0.0) == "met"
    assert bar.verdict(0.9, Interval(0.8, 0.96, 0.98), distinct=0.0) == "missed"


def test_a_text_that_repeats_itself_does_not_count():
    bar = Bar(2.0, min_distinct=0.5)
    sure = Interval(3.0, 3.0, 0.98)
    assert bar.verdict(3.0, sure, distinct=0.49) == "does not count"
    assert bar.verdict(3.0, sure, distinct=0.5) == "met"


def test_the_contender_is_judged_against_the_side_with_the_best_median_pair_by_pair():
    rates = {
        "depth 0": [10.0, 10.0, 10.0],
        "depth 1": [20.0, 12.0, 1.0],
        "adaptive": [10.0, 15.0, 2.0],
    }
    found = judge(rates, "adaptive", Bar(1.0), distinct=1.0)
    assert (found.contender, found.rival) == ("adaptive", "depth 1")
    assert found.ratio.median == statistics.median([0.5, 1.25, 2.0])
    assert (found.interval.low, found.interval.high) == (0.5, 2.0)
    assert found.verdict == "met"


def test_distinct_shares_are_counted_within_an_output_and_averaged():
    circle = [1, 2, 1, 2, 1, 2, 1]  # four 4-grams, two of them distinct
    assert distinct_share([circle]) == 0.5
    assert distinct_share([circle, [1, 2, 3, 4, 5]]) == 0.75
    assert distinct_share([[1, 2, 3]]) == 1.0  # too short to have any


def test_counts_of_different_lengths_are_added_by_position():
    assert sum_at_positions([[1, 2], [10], [], [0, 0, 3]]) == [11, 2, 3]
    assert sum_at_positions([]) == []
