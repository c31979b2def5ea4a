"""The steps of an epoch: their numbers, their order, their times; and the next epoch."""

from dataclasses import replace

import pytest

from charonia.control import FixedDepth, KVPool, Scheduler, Speculation
from support.invariants import check_invariants
from support.scheduling import (
    LIMITS,
    add_requests,
    make_engine,
    make_request,
    make_scheduler,
    plan_all,
    run_step,
)


def test_the_first_plan_opens_an_epoch_and_the_next_ones_count_steps():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    scheduler.add(make_request("a"))
    first, _ = run_step(scheduler, engine)
    second, _ = run_step(scheduler, engine)
    assert (first.reset, first.step_id, second.reset, second.step_id) == (True, 0, False, 1)
    assert first.epoch == second.epoch == 1


def test_nothing_is_planned_without_requests():
    assert make_scheduler().plan(0.0) is None


def test_results_are_applied_in_the_order_of_their_plans():
    scheduler = make_scheduler(num_stages=2)
    engine = make_engine(scheduler)
    add_requests(scheduler, "ab")
    results = [engine.submit(plan).result(None) for plan in plan_all(scheduler)]
    with pytest.raises(AssertionError, match="wrong result"):
        scheduler.apply(results[1], 0.0)


def test_no_more_steps_are_in_flight_than_the_engine_takes():
    scheduler = make_scheduler(num_stages=2)
    add_requests(scheduler, "abc")
    plan_all(scheduler)
    with pytest.raises(AssertionError, match="too many steps"):
        scheduler.plan(0.0)


@pytest.mark.parametrize(("num_stages", "seconds"), [(1, 7.0), (2, 0.001)])
def test_the_time_of_a_step_is_its_cycle_unless_it_waited_behind_others(num_stages, seconds):
    class Observed(FixedDepth):
        def observe_step(self, shape, seconds, draft_seconds):
            observed.append((seconds, shape.num_tokens))

    observed: list[tuple[float, int]] = []
    limits = replace(LIMITS, num_stages=num_stages)
    speculation = Speculation(max_drafts=2, policy=Observed())
    scheduler = Scheduler(limits, KVPool(b"test"), speculation=speculation)
    add_requests(scheduler, "a")
    plan = scheduler.plan(3.0)
    scheduler.apply(make_engine(scheduler).submit(plan).result(None), 10.0)
    assert observed == [(seconds, 8)]


def test_a_reset_recomputes_every_request_from_its_tokens():
    scheduler = make_scheduler()
    engine = make_engine(scheduler)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b", token_ids=[9] * 8))
    outputs = {"a": [], "b": []}
    for _ in range(3):
        for update in run_step(scheduler, engine)[1]:
            outputs[update.request.key] += update.token_ids
    scheduler.plan(0.0)
    scheduler.finish("b")
    scheduler.reset(epoch=7)
    check_invariants(scheduler)
    assert scheduler.num_waiting == 1
    plan = scheduler.plan(0.0)
    assert (plan.reset, plan.epoch) == (True, 8)
    assert plan.joins[0].token_ids == [*range(8), *outputs["a"]]


def test_a_reset_gives_all_steps_in_flight_up():
    scheduler = make_scheduler(num_stages=2)
    add_requests(scheduler, "abc")
    plan_all(scheduler)
    scheduler.finish("b")
    scheduler.reset()
    check_invariants(scheduler)
    first, second = plan_all(scheduler)
    assert (first.reset, second.reset) == (True, False)
    assert [join.token_ids for plan in (first, second) for join in plan.joins] == [
        [ord(key)] * 8 for key in "ac"
    ]
