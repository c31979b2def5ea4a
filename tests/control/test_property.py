"""Random scenarios against an engine that hashes what it reads through its block tables.

Whatever is cached, chunked, preempted, cancelled or lost, and however many steps are in flight:
each request's output equals its run alone without any of that, the invariants hold after every
plan and every step, and the pool is empty at the end. And whoever listens to the cache's events
knows after every plan and every step what can be hit.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from support.long import long
from support.scenario_driver import Driver
from support.scenarios import ALL_EVICTIONS, PLAIN, Arrival, Scenario, scenarios

patient = settings(
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow],
)


def check_tokens(scenario):
    """Run a scenario; every request gets the tokens of its run alone."""
    driver = Driver(scenario)
    driver.run()
    for key, output in driver.outputs.items():
        expected = driver.expected(key)
        if key in driver.cancelled | driver.guilty:
            assert output == expected[: len(output)]
        else:
            assert output == expected
            is_stop = output[-1] in range(8) and driver.arrival_of(key)[0].stops
            assert driver.reasons[key] == ("stop" if is_stop else "length")


@settings(patient, max_examples=100)
@given(scenarios)
def test_every_request_gets_the_tokens_of_its_run_alone(scenario):
    check_tokens(scenario)


@settings(patient, max_examples=100)
@given(scenarios.map(lambda scenario: replace(scenario, **PLAIN)))
def test_who_is_next_does_not_wait_where_there_is_room(scenario):
    check_tokens(scenario)


def test_no_more_urgent_prompts_join_a_step_than_it_computes_where_they_may_not_be_split():
    """Two come at once that are more urgent than two that run, and a step has one row."""
    running, urgent = Arrival(0, 0, 0, 1, 1, 0, 0, False, True, None), 5
    first = replace(running, at_step=1, due_in=urgent)
    arrivals = [running, running, first, replace(first, own=2)]
    scenario = Scenario(arrivals, 14, 2, 3, 1, True, chunked=False, num_stages=4)
    check_tokens(replace(scenario, policy="deadline"))


def test_a_prompt_that_displaces_makes_the_share_of_a_step_smaller():
    """The second of two urgent ones takes the row of the only one that ran beside them."""
    short = Arrival(0, 0, 0, 1, 1, 0, 0, False, True, None)
    arrivals = [
        *[replace(short) for _ in range(2)],
        replace(short, shared=2, own=3, max_tokens=3),
        *[replace(short) for _ in range(4)],
        replace(short, at_step=2, shared=1, own=12, due_in=5),
        replace(short, at_step=3, own=3, due_in=5),
    ]
    scenario = Scenario(arrivals, 14, 2, 5, 1, True, chunked=False, num_stages=2)
    check_tokens(replace(scenario, policy="deadline"))


@pytest.mark.parametrize(("num_stages", "async_scheduling"), [(1, True), (2, False)])
def test_an_engine_may_die_of_the_step_behind_one_that_failed(num_stages, async_scheduling):
    """Both are executed before anybody asks for the first one's result."""
    arrival = Arrival(0, 0, 0, 3, 16, 0, 0, False, True, None)
    scenario = Scenario([arrival, arrival], 40, 4, 4, 32, True, True, {3}, {4}, is_early=(True,))
    check_tokens(replace(scenario, num_stages=num_stages, async_scheduling=async_scheduling))


def test_blocks_may_be_loaded_for_who_comes_first_before_it_was_its_turn_to_be_looked_up():
    """A step failed, and all wait anew; by deadlines the last two that came go first."""
    short = Arrival(0, 0, 0, 1, 1, 0, 0, False, True, None)
    urgent = [
        replace(short, own=10, due_in=5, num_samples=8),
        replace(short, own=2, max_tokens=3, tenant=1, due_in=20, num_samples=2),
    ]
    arrivals = [*[replace(short) for _ in range(6)], *urgent]
    scenario = Scenario(arrivals, 14, 1, 1, 1, True, True, failures={15}, eviction="any")
    check_tokens(replace(scenario, policy="deadline, demoting", tier_sizes=(1,)))


@long
@settings(patient, max_examples=1200)
@given(scenarios)
def test_in_many_more_scenarios_every_request_gets_the_tokens_of_its_run_alone(scenario):
    check_tokens(scenario)


@pytest.mark.parametrize(
    ("num_stages", "async_scheduling"), [(1, False), (1, True), (2, True), (4, False)]
)
def test_the_scenarios_can_preempt_hit_and_evict(num_stages, async_scheduling):
    """The property test would prove little if its scenarios never came to these states."""
    arrival = Arrival(0, 0, 8, 2, 14, 0, 0, False, True, None)
    others = [Arrival(i, 0, 8, 2, 14, i % 4, 0, False, True, None) for i in range(1, 6)]
    num_blocks = 14 if num_stages > 1 else 11
    scenario = Scenario([arrival, *others], num_blocks, 4, 6, 32, True, True, {9}, {12})
    driver = Driver(replace(scenario, num_stages=num_stages, async_scheduling=async_scheduling))
    driver.run()
    assert driver.most_in_flight == driver.limits.max_steps_in_flight
    assert driver.scheduler.stats.preemptions > 0
    assert driver.scheduler.stats.prefix_hit_tokens > 0
    assert driver.executor.num_restarts == 1
    assert driver.view.counts["cleared"] == 3, "at the start, after a failure, and after a death"
    assert min(driver.view.counts.values()) > 0
    assert all(output == driver.expected(key) for key, output in driver.outputs.items())


@pytest.mark.parametrize("eviction", list(ALL_EVICTIONS))
def test_events_tell_what_can_be_hit_whatever_is_evicted(eviction):
    """Several compute the same prefix at once, and few blocks are left for what it outlives."""
    prompts = [
        Arrival(i // 4, i // 4 % 3, 16, 1, 10, i % 4, 0, False, True, None) for i in range(24)
    ]
    scenario = Scenario(prompts, 24, 4, 6, 1000, True, True, {30}, {40}, eviction=eviction)
    driver = Driver(scenario)
    duplicates = 0
    check = driver._check

    def check_and_count() -> None:
        nonlocal duplicates
        check()
        duplicates += bool(driver.scheduler.kv._index._duplicates)

    driver._check = check_and_count
    driver.run()
    assert duplicates, "no two blocks had the same content"
    assert driver.view.counts["removed"] > 10
    assert driver.view.counts["cleared"] == 3


@pytest.mark.parametrize(("num_stages", "async_scheduling"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("drafts", ["text", "model"])
def test_the_scenarios_can_accept_reject_and_catch_up(drafts, num_stages, async_scheduling):
    arrivals = [Arrival(i % 3, 0, 8, 2, 14, i % 4, 0, False, True, None) for i in range(6)]
    scenario = Scenario(arrivals, 16, 4, 6, 64, True, True, set(), set(), drafts)
    driver = Driver(replace(scenario, num_stages=num_stages, async_scheduling=async_scheduling))
    driver.run()
    counts = driver.scheduler.stats.drafts
    assert driver.scheduler.stats.preemptions > 0
    assert driver.scheduler.stats.prefix_hit_tokens > 0
    assert 0 < counts.num_accepted < counts.num_drafted
    assert all(output == driver.expected(key) for key, output in driver.outputs.items())
