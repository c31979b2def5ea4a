"""When a step is planned behind the one that computes: late enough for who comes, and in time."""

import random

import pytest

from charonia.config import EngineArgs, SchedulerArgs
from charonia.core.replica.plan_time import PlanTime
from charonia.simulate.simulator import Outcome, Setting, Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import Arrival
from charonia.traces import TraceRequest

STEP_S, HOST_S, TRANSIT_S, GAP_S = 10e-3, 0.5e-3, 0.4e-3, 0.1e-3


def learned(slacks) -> PlanTime:
    """After so many plans, for each step of a second a function from what was due to the slack."""
    plan_time = PlanTime()
    for slack_of in slacks:
        due_at = plan_time.due_at(0.0, 1.0)
        plan_time.note_slack(slack_of(due_at), is_put_off=due_at > 0.0)
    return plan_time


def test_at_first_nothing_is_put_off():
    assert PlanTime().due_at(5.0, 1.0) <= 5.0


def test_steps_that_take_what_is_expected_are_planned_behind_at_their_ends():
    plan_time = learned([lambda due_at: 1.0 - due_at] * 2000)
    assert plan_time.due_at(5.0, 1.0) == pytest.approx(5.98)


def test_planning_and_its_way_are_allowed_for():
    plan_time = learned([lambda due_at: 1.0 - due_at] * 2000)
    plan_time.note_plan(0.2)
    plan_time.note_transit(0.1)
    assert plan_time.due_at(5.0, 1.0) == pytest.approx(5.68)
    for _ in range(100):
        plan_time.note_plan(0.1)
        plan_time.note_transit(0.05)
    assert plan_time.due_at(5.0, 1.0) == pytest.approx(5.83, abs=1e-3)


def test_a_plan_in_fifty_comes_late_where_steps_scatter():
    drawn, num_late = random.Random(0), 0

    def slack_of(due_at: float) -> float:
        nonlocal num_late
        slack = drawn.uniform(0.5, 1.5) - due_at
        num_late += slack <= 0
        return slack

    plan_time = learned([slack_of] * 20_000)
    assert 0.45 < plan_time.due_at(0.0, 1.0) < 0.6
    assert 0.01 < num_late / 20_000 < 0.03


def test_a_step_that_is_over_before_any_plan_teaches_nothing():
    plan_time = learned([lambda _: 0.0] * 10)
    assert plan_time.margin == 1.0


# ---------------------------------------------------------------------- with the scheduler


def run(*, async_scheduling: bool, gap_s: float = 0.05) -> Outcome:
    """One request of 2,000 steps, and meanwhile short ones, as far apart as is said."""
    drawn = random.Random(0)
    long = TraceRequest(timestamp=0.0, input_length=10, output_length=2000, max_tokens=2000)
    short = TraceRequest(timestamp=0.0, input_length=10, output_length=2, max_tokens=2)
    times, at = [], 0.0
    while at < 18.0:
        at += drawn.uniform(0.5, 1.5) * gap_s
        times.append(at)
    setting = Setting(
        engine_args=EngineArgs(
            model="simulated", max_num_seqs=4, async_scheduling=async_scheduling
        ),
        scheduler_args=SchedulerArgs(),
        num_blocks=1000,
        max_model_len=3000,
        step_times=StepTimes(
            curve=[(0, STEP_S)],
            host=HOST_S,
            transit=TRANSIT_S,
            gap=GAP_S,
            noise=[(0, [0.98, 0.99, 1.0, 1.01, 1.02])],
        ),
    )
    arrivals = iter([Arrival(0.0, long, 0), *(Arrival(at, short, 0) for at in times)])
    return Simulation(setting, arrivals, 0).run()


def test_who_comes_while_a_step_computes_is_in_the_next_one():
    outcome = run(async_scheduling=True)
    late = outcome.served[len(outcome.served) // 2 :]
    ttft = [one.first_token_at - one.arrived_at for one in late]
    in_next_but_one = 2 * (STEP_S + GAP_S)
    assert sum(seconds > in_next_but_one for seconds in ttft) <= 0.25 * len(ttft)


def test_planning_late_costs_the_engine_no_time():
    """Between two steps lies no more than the gap, but for a few that are planned too late."""
    first = run(async_scheduling=True).served[0]
    assert first.ended_at < 2000 * (STEP_S + GAP_S) * 1.005
    one_at_a_time = run(async_scheduling=False).served[0]
    assert one_at_a_time.ended_at > 2000 * (STEP_S + HOST_S + TRANSIT_S) * 0.995
