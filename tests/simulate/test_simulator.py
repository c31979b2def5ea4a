"""Simulations: the real control plane decides, time is the model's, and a seed decides chance."""

from typing import get_args

import pytest

from charonia.config import SchedulingPolicy
from charonia.errors import ConfigError
from charonia.simulate.simulator import Outcome, Simulation
from charonia.simulate.step_times import StepTimes
from charonia.simulate.workload import Shape, shape
from charonia.traces import TraceRequest
from support.simulations import TRACES, make_setting, needs_traces, request, run

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
