"""Earliest deadline first: who is next, who displaces whom, and who cannot be in time any more."""

from math import inf

import pytest

from charonia.control.policies import (
    DeadlineWatch,
    DisplacementByDeadline,
    Policy,
    by_deadline,
    fair,
    ranked,
)
from charonia.control.remaining_time import RemainingTime
from support.stepping import Bench, make_request

STEP_S = 0.001  # of the echo engine
BUDGET = 64


def edf(*, demotes: bool = False) -> Policy:
    watch = DeadlineWatch(BUDGET, demotes=demotes)
    return ranked(by_deadline, DisplacementByDeadline(), watch)


def due(key: str, expires_at: float = inf, **changes):
    return make_request(key, expires_at=expires_at, **changes)


def test_the_earliest_deadline_is_next_and_who_has_none_comes_last_in_order_of_arrival():
    bench = Bench(edf(), max_num_seqs=1)
    bench.add(due("a"), due("b"), due("c", 9.0), due("d", 5.0))
    assert bench.ends() == ["d", "c", "a", "b"]


def test_an_earlier_deadline_takes_the_row_of_a_later_one_and_equals_take_none():
    bench = Bench(edf(), max_num_seqs=1)
    bench.add(due("a", 9.0))
    bench.step()
    bench.add(due("b", 9.0), due("c"))
    bench.step()
    assert bench.running == {"a"}
    bench.add(due("d", 8.0))
    bench.step()
    assert bench.running == {"d"}
    assert bench.ends() == ["d", "a", "b", "c"]


def test_before_the_first_step_only_a_deadline_that_is_over_cannot_be_met():
    bench = Bench(edf())
    bench.add(due("a", 1.0, max_tokens=50))
    bench.step(now=0.99)
    assert bench.scheduler.take_late() == []
    bench = Bench(edf())
    bench.add(due("a", 1.0))
    assert bench.scheduler.plan(1.01) is None
    (late,) = bench.scheduler.take_late()
    assert late.request.key == "a"
    assert late.left_s == pytest.approx(-0.01)
    assert bench.scheduler.num_live == 0
    assert bench.scheduler.take_late() == []


@pytest.mark.parametrize("demotes", [False, True])
def test_who_waits_beyond_its_latest_start_ends_or_goes_behind_all_others(demotes):
    bench = Bench(edf(demotes=demotes), max_num_seqs=1)
    bench.add(due("a", max_tokens=40))
    for _ in range(12):  # what a step takes is learned from some
        bench.step()
    latest = 1.0 - 20 * STEP_S
    bench.add(due("b", 1.0, max_tokens=20), due("c", 2.0, max_tokens=20))
    bench.scheduler.finish("a")
    bench.add(due("d", 0.5))
    bench.step(now=0.1)
    assert bench.running == {"d"}
    bench.step(now=latest - 0.002)
    assert bench.scheduler.take_late() == []
    bench.step(now=latest + 0.002)
    late = bench.scheduler.take_late()
    if demotes:
        assert late == []
        assert bench.ends() == ["d", "c", "b"]
    else:
        assert [(one.request.key, one.request.is_ended) for one in late] == [("b", True)]
        assert late[0].needed_s == pytest.approx(20 * STEP_S, rel=0.1)
        assert late[0].left_s == pytest.approx(20 * STEP_S - 0.002)
        assert bench.ends() == ["d", "c"]


def test_who_runs_or_has_ended_is_not_late_and_who_was_preempted_may_be():
    bench = Bench(edf(), max_num_seqs=1)
    bench.add(due("a", 1.0, max_tokens=30), due("b", 1.5))
    for _ in range(4):
        bench.step()
    bench.scheduler.finish("b")
    bench.add(due("c", 0.5, max_tokens=30))
    bench.step()
    assert bench.running == {"c"}
    bench.step(now=2.0)
    assert [late.request.key for late in bench.scheduler.take_late()] == ["a"]
    assert bench.running == {"c"}


def test_a_latest_start_is_looked_at_again_when_it_has_come():
    watch = DeadlineWatch(BUDGET, demotes=False)
    for _ in range(50):
        watch.note_step(1, 0.1)
    watch.note_waiting(request := due("a", 10.0, max_tokens=60))
    for _ in range(200):
        watch.note_step(1, 0.05)
    assert watch.take_late(5.0) == []
    (late,) = watch.take_late(8.0)
    assert late.request is request
    assert late.needed_s == pytest.approx(60 * 0.05, rel=0.1)
    assert watch.take_late(8.0) == []


def test_one_that_was_demoted_is_told_of_once():
    watch = DeadlineWatch(BUDGET, demotes=True)
    request = due("a", 1.0)
    for _ in range(2):  # it was preempted
        watch.note_waiting(request)
    assert [late.request for late in watch.take_late(2.0)] == [request]
    watch.note_waiting(request)
    request.is_demoted = True
    watch.note_waiting(request)
    assert watch.take_late(2.0) == []


def test_within_fair_shares_late_ones_end_as_well():
    watch = DeadlineWatch(BUDGET, demotes=False)
    bench = Bench(fair(by_deadline, lambda tenant: 1.0, None, watch), max_num_seqs=1)
    bench.add(due("a", 5.0, tenant="x"), due("b", 1.0, tenant="x"), due("c", 0.5, tenant="y"))
    bench.step(now=0.7)
    assert [late.request.key for late in bench.scheduler.take_late()] == ["c"]
    assert bench.ends() == ["b", "a"]


def test_an_answer_is_taken_to_be_as_long_as_others_but_not_longer_than_asked_for():
    remaining = RemainingTime(BUDGET)
    request = make_request("a", max_tokens=100)
    assert remaining.of(request) == 0.0
    for _ in range(50):
        remaining.note_step(8, 0.01)
    assert remaining.of(request) == pytest.approx(1.0, rel=0.01)
    ended = make_request("b")
    ended.token_ids += [7] * 10
    remaining.note_end(ended)
    assert remaining.of(request) == pytest.approx(0.1, rel=0.01)
    request.token_ids += [7] * 30
    assert remaining.of(request) <= 0.06  # its tokens are computed again, and one more comes
    assert remaining.of(make_request("c", max_tokens=2)) == pytest.approx(0.02, rel=0.01)


def test_a_long_prompt_takes_steps_of_its_own():
    remaining = RemainingTime(BUDGET)
    for _ in range(50):
        remaining.note_step(BUDGET, 0.05)
        remaining.note_step(8, 0.01)
    two_steps = make_request("a", token_ids=[5] * (2 * BUDGET), max_tokens=1)
    assert remaining.of(two_steps) == pytest.approx(0.1, rel=0.1)
    and_some = make_request("b", token_ids=[5] * (2 * BUDGET + 8), max_tokens=1)
    assert remaining.of(and_some) == pytest.approx(0.11, rel=0.1)
