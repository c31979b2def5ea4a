"""What a step takes is learned from noisy steps, and is optimistic where nothing is known."""

import random

import pytest

from charonia.control.estimators.step_cost import CostCurve, StepCost, StepShape


def learn(curve: CostCurve, seconds_of, sizes, times: int = 2) -> None:
    for _ in range(times):
        for size in sizes:
            curve.observe(size, seconds_of(size))


def test_nothing_is_known_until_a_size_was_seen_twice():
    curve = CostCurve()
    curve.observe(4, 1.0)
    assert not curve.is_known
    assert curve.at(4) == 0.0
    curve.observe(4, 1.0)
    assert curve.is_known
    assert curve.at(4) == pytest.approx(1.0)


def test_sizes_not_seen_are_as_fast_as_the_ones_seen_allow():
    curve = CostCurve()
    learn(curve, lambda size: max(1.0, size / 4), [2, 11])
    assert curve.at(1) == pytest.approx(0.5)  # throughput is not better than at 2
    assert curve.at(3) == pytest.approx(1.0)  # not faster than 2
    assert curve.at(8) == pytest.approx(2.0)  # throughput is not better than at 11
    assert curve.at(50) == curve.at(10**9) == pytest.approx(2.75)  # not faster than 11


def test_a_smaller_size_does_not_take_longer_than_a_larger_one():
    curve = CostCurve()
    learn(curve, lambda size: 3.0 if size == 2 else 1.0, [2, 5])
    assert curve.at(2) == curve.at(5) == pytest.approx(1.0)


def test_large_sizes_share_knots_and_still_fit():
    curve = CostCurve()
    rng = random.Random(1)
    for _ in range(3000):
        size = rng.randint(1, 600)
        curve.observe(size, (1.0 + size / 100) * rng.gauss(1.0, 0.05))
    for size in (77, 150, 333, 512):
        assert curve.at(size) == pytest.approx(1.0 + size / 100, rel=0.06)


def test_one_slow_step_changes_little():
    curve = CostCurve()
    curve.observe(1, 50.0)  # a cold start
    learn(curve, lambda _: 1.0, [1], 40)
    curve.observe(1, 50.0)
    assert curve.at(1) == pytest.approx(1.0, rel=0.06)


def test_sizes_out_of_use_follow_when_the_machine_slows_down():
    curve = CostCurve()
    learn(curve, lambda size: 1.0 + size / 10, [1, 9], 50)
    learn(curve, lambda size: 2.0 + size / 5, [1], 100)
    assert curve.at(1) == pytest.approx(2.2, rel=0.02)
    assert curve.at(9) == pytest.approx(3.8, rel=0.2)


def test_what_was_not_renewed_is_forgotten():
    curve = CostCurve()
    learn(curve, lambda _: 1.0, [1], 5)
    learn(curve, lambda _: 9.0, [5])
    assert curve.at(5) > 8.0
    learn(curve, lambda _: 1.0, [1], 1100)
    assert curve.at(5) == curve.at(1)


def test_a_clock_that_stands_still_is_not_believed():
    curve = CostCurve()
    learn(curve, lambda _: 0.0, [1], 5)
    assert not curve.is_known


def test_draft_time_is_learned_per_pass_and_apart_from_the_rest():
    cost = StepCost(has_draft_model=True)
    for _ in range(4):  # the first steps say nothing
        cost.observe(StepShape(4), seconds=100.0, draft_seconds=0.0)
    for _ in range(3):
        cost.observe(StepShape(4), seconds=1.0, draft_seconds=0.0)
        cost.observe(StepShape(12, 2, 8), seconds=2.0, draft_seconds=0.5)
    assert cost.target.at(4) == pytest.approx(1.0)
    assert cost.target.at(12) == pytest.approx(1.5)
    assert cost.of_drafts(2, 8) == pytest.approx(0.5)
    assert cost.of_drafts(3, 12) == pytest.approx(0.75)


def test_drafts_that_no_model_makes_cost_nothing():
    assert StepCost(has_draft_model=False).of_drafts(2, 8) == 0.0


def learned(sizes):
    """What is known after steps of these sizes; the first of each is slow."""
    cost = StepCost(has_draft_model=True)
    last = 0
    for size in [1] * 4 + sizes:
        slowness = 1.0 if size == last else 3.0
        cost.observe(StepShape(size), seconds=size * slowness, draft_seconds=0.0)
        last = size
    return cost


def test_a_step_of_a_new_size_says_nothing():
    cost = learned([64, 64, 64, 64, 16, 16, 16, 16])
    assert cost.target.at(64) == pytest.approx(64.0)
    assert cost.target.at(16) == pytest.approx(16.0)


def test_where_sizes_alternate_both_are_learned():
    cost = learned([64, 512] * 8)
    assert cost.target.is_measured(64)
    assert cost.target.is_measured(512)
