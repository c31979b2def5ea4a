"""Policies in simulations: who comes first, who is refused, and what tenants get."""

import json

import pytest

from charonia.simulate.report import report
from charonia.simulate.simulator import Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import ADVERSARY, Shape, shape
from support.long import long
from support.simulations import TRACES, make_setting, needs_traces, request, run


def test_priorities_are_the_real_ones():
    requests = [request(10, 50) for _ in range(8)] + [request(10, 5, priority=-1, timestamp=1.0)]
    setting = make_setting(scheduling_policy="priority")
    urgent = run(setting, *requests).served[-1]
    assert urgent.ended_at < 0.1
    assert run(make_setting(), *requests).served[-1].ended_at > 0.5


def test_the_limits_at_the_door_are_the_real_ones(tmp_path):
    outcome = run(make_setting(max_queue_size=2), *[request() for _ in range(10)])
    ends = [one.outcome for one in outcome.served]
    assert ends == ["length"] * 6 + ["queue_full"] * 4
    (long,) = run(make_setting(), request(2000, 1)).served
    assert long.outcome == "prompt_too_long"
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"tenants": {"slow": {"requests_per_s": 1}}}))
    setting = make_setting(tenants_file=str(file))
    requests = [request(tenant="slow", timestamp=400.0 * n) for n in range(6)]
    ends = [one.outcome for one in run(setting, *requests).served]
    assert ends == ["length", "rate_limited", "rate_limited"] * 2


def test_on_a_full_queue_the_last_one_gives_way_as_in_the_server():
    waiting = [request(priority=5, tenant="many") for _ in range(7)]
    urgent = request(timestamp=1.0, tenant="few")
    for changes in ({"scheduling_policy": "priority"}, {"fair_share": True}):
        setting = make_setting(max_queue_size=2, **changes)
        served = run(setting, *waiting, urgent).served
        ends = [one.outcome for one in served]
        assert ends == ["length"] * 5 + ["queue_full"] * 2 + ["length"], changes


def test_deadlines_end_requests_wherever_they_are():
    requests = [request(10, 100, deadline_ms=200), *[request(10, 5) for _ in range(3)]]
    requests += [request(10, 5, deadline_ms=10)]
    outcome = run(make_setting(), *requests)
    assert [one.outcome for one in outcome.served] == ["timeout", *["length"] * 3, "timeout"]
    assert outcome.served[0].ended_at == pytest.approx(0.2, abs=0.03)
    assert report("x", outcome, (), 1000).overall.attainment == 0.0
    setting = make_setting(scheduling_policy="deadline")
    assert run(setting, *requests).served[0].num_tokens > 0


def test_who_would_wait_beyond_the_deadline_is_refused_at_the_door():
    flood = [request(90, 10) for _ in range(100)]
    hasty = [
        request(10, 1, deadline_ms=deadline_ms, timestamp=2000.0) for deadline_ms in (500, 60_000)
    ]
    served = run(make_setting(), *flood, *hasty).served
    assert [one.outcome for one in served[-2:]] == ["late", "length"]
    assert served[-2].ended_at == pytest.approx(2.0, abs=0.03)
    by_deadline = run(make_setting(scheduling_policy="deadline"), *flood, *hasty).served
    assert by_deadline[-2].outcome == "length"  # it is the first there


def test_a_refusal_is_a_missed_deadline_unless_it_is_the_tenants_own_doing(tmp_path):
    def in_time(*requests, **changes):
        outcome = run(make_setting(**changes), *requests)
        ends = {one.outcome for one in outcome.served}
        return ends, report("x", outcome, (), 1000).overall.attainment

    hasty = [request(deadline_ms=60_000, tenant="a") for _ in range(10)]
    assert in_time(*hasty, max_queue_size=2) == ({"length", "queue_full"}, 0.6)
    assert in_time(*hasty, request(2000, 1, deadline_ms=60_000)) == (
        {"length", "prompt_too_long"},
        1.0,
    )
    file = tmp_path / "tenants.json"
    for limit, kind in (
        ({"max_queue_size": 2}, "tenant_queue_full"),
        ({"max_queue_tokens": 20}, "tenant_queue_full"),
        ({"requests_per_s": 1}, "rate_limited"),
        ({"max_concurrency": 2}, "rate_limited"),
    ):
        file.write_text(json.dumps({"tenants": {"a": limit}}))
        assert in_time(*hasty, tenants_file=str(file)) == ({"length", kind}, 1.0), limit


@pytest.mark.parametrize("fair_share", [False, True])
def test_weights_are_taken_whatever_the_policy_is(tmp_path, fair_share):
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"tenants": {"heavy": {"weight": 4}}}))
    requests = [request(20, 20, tenant=tenant) for tenant in ["heavy", "light"] * 50]
    outcome = run(make_setting(tenants_file=str(file), fair_share=fair_share), *requests)
    heavy, light = outcome.service.service["heavy"], outcome.service.service["light"]
    assert heavy == pytest.approx(light / 4)


def test_with_fair_shares_who_floods_the_cache_costs_others_no_hits():
    """One asks for the same all the time, the other one for something new; blocks of 16 tokens."""
    blocks = [
        request(81, 1, timestamp=100.0 * number, tenant=tenant, hash_ids=hash_ids)
        for number in range(200)
        for tenant, hash_ids in [
            ("often", [1, 2, 3, 4, 5])
            if number % 10 == 0
            else ("new", [10 * number + part for part in range(10, 15)])
        ]
    ]

    def hits(**changes):
        setting = make_setting(num_blocks=21, eviction_policy="lru", **changes)
        return run(setting, *blocks, block_length=16).hit_rate

    assert hits() == 0
    assert hits(fair_share=True) == pytest.approx(19 / 200 * 80 / 81)


def test_the_ladder_is_the_real_one():
    flood = [request(90, 10) for _ in range(200)]
    low = [request(10, 9, priority=1, timestamp=5000.0), request(10, 9, timestamp=5000.0)]
    later = [request(10, 9, priority=1, timestamp=60_000.0)]

    def ends(ladder, *requests):
        setting = make_setting(
            scheduling_policy="priority",
            degradation_wait_s=1.0,
            degradation_ladder=ladder,
            degradation_max_tokens=2,
        )
        served = run(setting, *requests).served[len(flood) :]
        return [(one.outcome, one.num_tokens) for one in served]

    capped, refused, whole = ("length", 2), ("overloaded", 0), ("length", 9)
    assert ends("max_tokens", *flood, *low, *later) == [capped, whole, whole]
    # While nobody comes, both levels are disabled.
    assert ends("max_tokens,rejection", *flood, *low, *later) == [refused, whole, whole]


def test_shorter_chunks_are_a_level_of_the_ladder():
    requests = [request(90, 10) for _ in range(200)]
    ladder = {"degradation_wait_s": 1.0, "degradation_ladder": "chunks"}
    with_it, without = run(make_setting(**ladder), *requests), run(make_setting(), *requests)
    longest = [one.inter_token["", 0].quantile(0.9) for one in (with_it, without)]
    assert longest[0] < longest[1]


def test_fair_shares_are_within_their_bound_and_first_come_is_not():
    flood = [request(50, 50, tenant="flood") for _ in range(300)]
    small = [request(50, 50, tenant="small", timestamp=1.0) for _ in range(100)]
    pool = 999 * 16

    def difference(**changes):
        outcome = run(make_setting(num_blocks=1000, **changes), *flood, *small)
        return report("x", outcome, ("tenant",), pool)

    fair, fcfs = difference(fair_share=True), difference()
    # What runs at once is all that the counters cannot see.
    assert fair.service_difference <= 2 * 2 * 4 * 100
    assert fcfs.service_difference > 10 * fair.service_difference
    assert fair.service_bound == 2 * 2 * pool


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_service_is_compared_after_each_step_by_what_it_did(async_scheduling):
    """One row: "a" has all of the steps while "b" waits, and waits itself until its last begins."""
    requests = [
        request(250, 2, tenant="a"),  # three steps, the first two of which have no output
        request(10, 1, tenant="a"),
        request(10, 1, tenant="a"),
        request(10, 1, tenant="b"),
    ]
    setting = make_setting(max_num_seqs=1, async_scheduling=async_scheduling)
    service = run(setting, *requests).service
    assert service.service == {"a": 250 + 2 * 2 + 2 * (10 + 2), "b": 10 + 2}
    # From the end of the first step, after 250, to that of the fifth one, after 250 + 4 + 12.
    assert service.greatest == 16


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_who_begins_with_the_next_step_has_not_waited(async_scheduling):
    """While "b" waits one of "a" comes in each step, and begins at once as it is more urgent."""
    step_ms = 100.0
    requests = [request(10, 1, tenant="b", priority=9) for _ in range(40)]
    requests += [
        request(10, 1, tenant="a", timestamp=step_ms * (number + 0.5)) for number in range(20)
    ]
    setting = make_setting(
        max_num_seqs=1,
        scheduling_policy="priority",
        step_times=StepTimes(curve=[(0, step_ms / 1000)]),
        async_scheduling=async_scheduling,
    )
    outcome = run(setting, *requests)
    assert all(one.is_finished for one in outcome.served)
    waits = [one.milliseconds_to(one.started_at) for one in outcome.served[40:]]
    assert max(waits) <= 1.5 * step_ms
    assert outcome.service.greatest == 0


def test_a_tenant_that_is_in_no_step_got_nothing():
    times = StepTimes(curve=[(0, 0.01)], intake=0.02)
    outcome = run(make_setting(step_times=times), request(deadline_ms=10, tenant="a"))
    assert [one.outcome for one in outcome.served] == ["timeout"]
    assert outcome.service.service == {"a": 0.0}


def test_urgent_requests_are_in_the_next_plan_beside_a_flood_of_tenants(tmp_path):
    """But for the few that come when their tenant runs nothing else and has had its share."""
    weights = {"light": 1, "middle": 2, "heavy": 4}
    file = tmp_path / "tenants.json"
    tenants = {tenant: {"weight": weight} for tenant, weight in weights.items()}
    file.write_text(json.dumps({"tenants": tenants}))
    flood = [request(20, 24, tenant=tenant) for tenant in [*weights] * 300]
    urgent = [
        request(20, 24, tenant="heavy", priority=-1, timestamp=1000.0 + 47.3 * number)
        for number in range(200)
    ]
    setting = make_setting(
        tenants_file=str(file),
        fair_share=True,
        scheduling_policy="priority",
        async_scheduling=True,
        max_num_seqs=16,
        max_queue_size=10_000,
        step_times=StepTimes(curve=[(0, 0.006)]),
    )
    outcome = run(setting, *flood, *urgent)
    assert all(one.is_finished for one in outcome.served)
    waits = [one.started_at - one.arrived_at for one in outcome.served[-len(urgent) :]]
    # Two steps may be in flight when it comes, and nobody is displaced from those.
    assert sum(wait > 0.0121 for wait in waits) <= 4
    assert outcome.num_preemptions > 10


@long
@needs_traces
def test_an_adversary_is_stopped_by_fair_shares():
    from charonia.traces import read_requests

    trace = [
        one for one in read_requests(TRACES / "tenants.jsonl.gz")[:1500] if one.input_length < 900
    ]
    wanted = Shape(rate=5.0, arrivals="poisson", adversary=0.2)

    def waited(**changes):
        setting = make_setting(max_queue_size=10_000, max_model_len=8000, **changes)
        outcome = Simulation(setting, shape(trace, wanted, 0), 0).run()
        found = report("x", outcome, ("tenant",), 16_000)
        return max(part.ttft.p50 for part in found.classes[1:] if part.name != ADVERSARY)

    assert waited(fair_share=True) < 0.5 * waited()
