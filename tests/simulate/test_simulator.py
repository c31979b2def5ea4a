"""Simulations: the real control plane decides, time is the model's, and a seed decides chance."""

import json
from pathlib import Path
from typing import get_args

import pytest

from charonia.config import EngineArgs, SchedulerArgs, SchedulingPolicy
from charonia.errors import ConfigError
from charonia.simulate.report import ALL, recorded, report, tables
from charonia.simulate.simulator import Outcome, Setting, Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import ADVERSARY, Arrival, Shape, shape
from charonia.traces import TraceRequest
from support.long import long

TRACES = Path(__file__).parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of traces")
TIMES = StepTimes(curve=[(0, 0.01), (100, 0.02)])


def make_setting(**changes) -> Setting:
    """Of 4 rows; arguments of engine and scheduler by their names, and the setting's own."""
    own = {
        name: changes.pop(name, default)
        for name, default in {
            "num_blocks": 1000,
            "max_model_len": 1000,
            "step_times": TIMES,
            "seed": 0,
        }.items()
    }
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "async_scheduling": False}
    names = set(EngineArgs.__struct_fields__)
    engine |= {name: changes.pop(name) for name in list(changes) if name in names}
    scheduler = {"priority_aging_s": 0.0} | changes
    return Setting(
        engine_args=EngineArgs(model="simulated", **engine),
        scheduler_args=SchedulerArgs(**scheduler),
        **own,
    )


def request(input_length=10, output_length=5, **values) -> TraceRequest:
    values = {"timestamp": 0.0, "max_tokens": output_length} | values
    return TraceRequest(input_length=input_length, output_length=output_length, **values)


def run(setting: Setting, *requests: TraceRequest, block_length: int = 0) -> Outcome:
    arrivals = iter([Arrival(one.timestamp / 1000, one, 0) for one in requests])
    return Simulation(setting, arrivals, block_length).run()


# ---------------------------------------------------------------------- one request


def test_one_request_takes_as_long_as_its_steps():
    (served,) = run(make_setting(), request(10, 5)).served
    assert served.outcome == "length"
    assert served.num_tokens == 5
    assert served.first_token_at == pytest.approx(0.011)
    assert served.ended_at == pytest.approx(0.011 + 4 * 0.0101)


def test_a_long_prompt_takes_several_steps():
    (served,) = run(make_setting(), request(250, 1)).served
    assert served.ended_at == pytest.approx(0.02 + 0.02 + 0.015)


def test_what_lies_around_the_engine_counts():
    times = StepTimes(curve=[(0, 0.01)], host=0.003, transit=0.002)
    (served,) = run(make_setting(step_times=times), request(10, 3)).served
    assert served.ended_at == pytest.approx(3 * 0.015)


def test_a_request_is_taken_in_whatever_the_sum_of_its_times_is_rounded_to():
    assert (0.243 + 0.0073) - 0.0073 < 0.243
    times = StepTimes(curve=[(0, 0.01)], intake=0.0073)
    (served,) = run(make_setting(step_times=times), request(10, 3, timestamp=243.0)).served
    assert served.ended_at == pytest.approx(0.243 + 0.0073 + 0.03)


def test_a_request_is_taken_in_before_it_is_planned():
    times = StepTimes(curve=[(0, 0.01)], intake=0.002)
    (served,) = run(make_setting(step_times=times), request(10, 3)).served
    assert served.ended_at == pytest.approx(0.032)


def test_overlap_hides_the_host_but_not_the_gap():
    times = StepTimes(curve=[(0, 0.01)], host=0.003, transit=0.002, gap=0.001)
    (served,) = run(make_setting(step_times=times, async_scheduling=True), request(10, 3)).served
    assert served.ended_at == pytest.approx(0.015 + 2 * 0.011)


def test_an_output_may_end_before_its_limit():
    (served,) = run(make_setting(), request(10, 5, max_tokens=100)).served
    assert (served.outcome, served.num_tokens) == ("stop", 5)


def test_an_end_by_a_token_costs_a_surplus_step_where_steps_overlap():
    setting = make_setting(async_scheduling=True)
    assert run(setting, request(10, 5)).num_steps == 5
    assert run(setting, request(10, 5, max_tokens=100)).num_steps == 6


def test_who_comes_during_a_step_is_in_the_next_that_is_planned():
    times = StepTimes(curve=[(0, 1.0)])
    requests = [request(10, 3), request(10, 1, timestamp=150.0)]
    for overlaps, when in ((False, 2.0), (True, 3.0)):
        setting = make_setting(step_times=times, async_scheduling=overlaps)
        first, second = run(setting, *requests).served
        assert second.first_token_at == pytest.approx(when)
        assert first.ended_at == pytest.approx(3.0)


def test_no_step_is_so_long_that_the_engine_hangs():
    setting = make_setting(step_times=StepTimes(curve=[(0, 0.0), (1, 0.1)]))
    (served,) = run(make_setting(step_times=StepTimes(curve=[(0, 60.0)])), request(10, 2)).served
    assert (served.outcome, served.ended_at) == ("length", pytest.approx(120.0))
    requests = [request(90, 3) for _ in range(20)]
    assert all(one.is_finished for one in run(setting, *requests).served)


def test_a_setting_that_contradicts_itself_is_refused():
    setting = make_setting(enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens = 100 must be at least max_mod"):
        run(setting, request())


# ---------------------------------------------------------------------- several


def test_every_request_has_an_end_and_the_engine_its_counts():
    requests = [request(20, 10, timestamp=float(n)) for n in range(50)]
    outcome = run(make_setting(), *requests)
    assert all(one.is_finished and one.num_tokens == 10 for one in outcome.served)
    assert outcome.busy_s == pytest.approx(outcome.seconds, rel=0.01)
    assert 3 < outcome.mean_rows <= 4
    assert outcome.samples[-1].num_waiting == 0


def test_equal_blocks_are_hits_and_others_are_not():
    def hits(*ids):
        requests = [request(64, 1, hash_ids=one, timestamp=1000.0 * n) for n, one in enumerate(ids)]
        return run(make_setting(), *requests, block_length=32).hit_rate

    assert hits([1, 2], [3, 4]) == 0
    assert hits([1, 2], [1, 4]) == pytest.approx(32 / 128)
    assert hits([1, 2], [1, 2]) == pytest.approx(48 / 128)  # the last token is computed
    assert hits([], []) == 0


def test_a_full_pool_preempts_and_all_end():
    requests = [request(16, 60) for _ in range(4)]
    outcome = run(make_setting(num_blocks=12, max_model_len=100), *requests)
    assert outcome.num_preemptions > 0
    assert [one.num_tokens for one in outcome.served] == [60] * 4


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


def test_the_next_step_is_sent_before_the_outputs_of_the_last_one_are_delivered():
    """As in the server: its first token comes later by what it takes to plan a step."""
    times = StepTimes(curve=[(0, 0.01)], host=0.003, transit=0.002)
    (served,) = run(make_setting(step_times=times), request(10, 3)).served
    assert served.first_token_at == pytest.approx(0.015 + 0.003)
    assert served.ended_at == pytest.approx(3 * 0.015)


@pytest.mark.parametrize("fair_share", [False, True])
@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_the_same_seed_gives_the_same_run(policy, fair_share):
    times = StepTimes(curve=[(0, 0.01)], noise=[(1, [0.5, 1.0, 1.5])])
    trace = [request(10 + n, 1 + n % 9, timestamp=10.0 * n) for n in range(200)]
    wanted = Shape(
        arrivals="bursty",
        num_tenants=3,
        num_priorities=3,
        deadline_ms=(100, 5000),
        adversary=0.2,
    )

    def ends(seed):
        setting = make_setting(
            scheduling_policy=policy, fair_share=fair_share, step_times=times, seed=seed
        )
        outcome = Simulation(setting, shape(trace, wanted, seed), 0).run()
        assert all(one.outcome for one in outcome.served)
        return [(one.outcome, one.ended_at) for one in outcome.served]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


@pytest.mark.parametrize("policy", ["adaptive", "w_tinylfu"])
def test_the_same_seed_evicts_the_same_blocks_where_hashes_decide(policy):
    trace = [
        request(64, 1, timestamp=10.0 * n, hash_ids=[n * n % 37, n % 11, n % 5, n])
        for n in range(600)
    ]

    def ends(seed):
        setting = make_setting(num_blocks=24, eviction_policy=policy, seed=seed)
        outcome = run(setting, *trace, block_length=16)
        assert 0.05 < outcome.hit_rate < 0.9
        return [one.ended_at for one in outcome.served]

    assert ends(1) == ends(1)


@pytest.mark.parametrize("target", [30.0, "auto"])
def test_a_target_between_tokens_is_kept_beside_a_long_prompt(target):
    requests = [request(10, 300), request(900, 1, timestamp=1000.0)]

    def longest(**changes):
        times = StepTimes(curve=[(0, 0.01), (100, 0.03)], pair=1e-8)
        setting = make_setting(
            step_times=times, max_num_batched_tokens=1000, async_scheduling=True, **changes
        )
        outcome = run(setting, *requests)
        assert all(one.is_finished for one in outcome.served)
        return outcome.inter_token["", 0].quantile(1.0)

    assert longest() > 0.15
    assert longest(inter_token_target_ms=target) < (0.03 if target == 30 else 0.021)


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


# ---------------------------------------------------------------------- reports


def test_of_requests_that_come_together_one_computes_the_prefix_of_all():
    def trace() -> list[TraceRequest]:
        return [
            request(450, 20, timestamp=5000.0 * burst, hash_ids=[*range(9 * burst, 9 * burst + 8)])
            for burst in range(10)
            for _ in range(8)
        ]

    def run_bursts(**changes) -> Outcome:
        setting = make_setting(max_num_seqs=8, max_num_batched_tokens=2000, **changes)
        return run(setting, *trace(), block_length=50)

    shared, alone = run_bursts(), run_bursts(enable_prefix_sharing=False)
    assert alone.hit_rate < 0.5 < 0.7 < shared.hit_rate

    def median_ttft_ms(outcome: Outcome) -> float:
        return sorted(one.milliseconds_to(one.first_token_at) for one in outcome.served)[40]

    assert median_ttft_ms(shared) < 0.6 * median_ttft_ms(alone)


def test_a_report_has_classes_and_numbers():
    requests = [request(10, 5, tenant=name, timestamp=float(n)) for n, name in enumerate("aab")]
    outcome = run(make_setting(), *requests)
    found = report("fcfs", outcome, ("tenant",), 100)
    assert [(one.name, one.num_requests) for one in found.classes] == [(ALL, 3), ("a", 2), ("b", 1)]
    assert found.overall.num_finished == 3
    assert found.tokens_per_s == pytest.approx(15 / outcome.seconds)
    assert found.overall.inter_token.mean == pytest.approx(0.0103, rel=0.1)
    assert found.overall.queue.longest < found.overall.ttft.p50 <= found.overall.ttft.p99
    text = tables([found])
    assert "| fcfs | 3 | 3 |" in text
    assert "| fcfs | a | 2 | 2 | 10 |" in text
    by_priority = report("fcfs", outcome, ("priority",), 100)
    assert [one.name for one in by_priority.classes] == [ALL, "priority 0"]
    assert len(report("fcfs", outcome, (), 100).classes) == 1
    by_both = report("fcfs", outcome, ("tenant", "priority"), 100)
    assert by_both.classes == [*found.classes, *by_priority.classes[1:]]


def test_a_run_is_a_trace_again():
    outcome = run(make_setting(), request(10, 5), request(10, 5, timestamp=2.0))
    trace = list(outcome.as_trace())
    again = recorded(trace)
    assert again is not None
    found = report("x", outcome, (), 100)
    assert again.overall.ttft.p50 == pytest.approx(found.overall.ttft.p50, rel=1e-3)
    assert again.overall.inter_token.mean == pytest.approx(found.overall.inter_token.mean, rel=1e-3)
    assert again.tokens_per_s == pytest.approx(found.tokens_per_s, rel=1e-3)
    assert recorded([request()]) is None


def test_tables_say_how_requests_ended_that_were_not_finished():
    requests = [request(tenant="ab"[n % 2]) for n in range(10)]
    outcome = run(make_setting(max_queue_size=2), *requests, request(2000, 1, tenant="a"))
    text = tables([report("fcfs", outcome, ("tenant",), 100)])
    assert text.count("| not finished |") == 2
    assert "| 4 queue_full, 1 prompt_too_long |" in text
    assert "| 2 queue_full, 1 prompt_too_long |" in text
    assert "not finished" not in tables([report("x", run(make_setting()), (), 100)])


@needs_traces
@pytest.mark.parametrize("name", ["conversation.jsonl.gz", "agents.jsonl.gz"])
def test_real_prompts_hit_the_prefix_cache(name):
    from charonia.traces import block_length, read_requests

    trace = read_requests(TRACES / name)[:60]
    setting = make_setting(
        num_blocks=200_000,
        block_size=64,
        max_model_len=600_000,
        max_num_batched_tokens=8192,
        step_times=StepTimes(curve=[(0, 0.01), (1, 0.01001)]),
    )
    outcome = Simulation(setting, shape(trace, Shape(), 0), block_length(trace)).run()
    assert all(one.is_finished for one in outcome.served)
    hit_rate = _reused(trace, block_length(trace))
    assert outcome.hit_rate == pytest.approx(hit_rate, abs=0.02)


def _reused(trace, length: int) -> float:
    """Share of prompt tokens in whole blocks that an earlier prompt had, of a pool for all."""
    seen, num_reused = set(), 0
    for one in trace:
        whole = one.hash_ids[: (one.input_length - 1) // length]
        num_reused += length * sum(block in seen for block in whole)
        seen.update(one.hash_ids[: one.input_length // length])
    return num_reused / sum(one.input_length for one in trace)


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
