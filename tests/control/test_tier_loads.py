"""What is loaded from slower tiers, for those that wait for it."""

import pytest

from charonia.control import Group
from charonia.control.cache import fetching, kv_cache
from charonia.control.cache.block_tables import BlockTables
from charonia.control.policies import (
    DeadlineWatch,
    DisplacementByDeadline,
    DisplacementByPriority,
    by_arrival,
    by_deadline,
    by_priority,
    fair,
    ranked,
)
from charonia.control.scheduling.fitting import MAX_PASSES
from charonia.protocol import CacheRange, RowSampling, StepPlan
from support.echo import SLOT_BYTES, echo_run
from support.invariants import check_invariants
from support.stepping import Bench, make_request
from support.tiering import fill, loads_of, make_bench, make_prompt, run, wash_out

STEP_S = 0.001  # of the echo engine
LOADED_AT_ONCE = fetching.LOADED_AT_ONCE // SLOT_BYTES


def test_a_request_waits_for_what_is_loaded_and_hits_it():
    bench = make_bench()
    fill(bench)
    request = make_prompt("c")
    plans = run(bench, request)
    assert [(len(plan.loads), len(plan.joins)) for plan in plans[:2]] == [(8, 0), (0, 1)]
    assert request.num_cached == 32
    assert bench.scheduler.stats.blocks_loaded == 8
    assert bench.scheduler.stats.loads_failed == 0


def test_few_are_loaded_beside_rows_that_compute():
    prompt = [7] * (4 * (LOADED_AT_ONCE + 5) + 2)
    bench = make_bench(300, num_blocks=200, max_model_len=800, max_num_batched_tokens=800)
    for key in "ab":
        run(bench, make_request(key, token_ids=prompt, max_tokens=1))
    run(bench, make_request("z", token_ids=[i % 250 for i in range(790)], max_tokens=4))
    bench.add(make_request("x", max_tokens=20))
    bench.step()
    bench.add(make_request("c", token_ids=prompt, max_tokens=1))
    assert [len(bench.step().loads) for _ in range(3)] == [LOADED_AT_ONCE, 5, 0]
    bench.ends()


def test_blocks_are_loaded_before_it_is_a_requests_turn():
    bench = make_bench(max_num_seqs=1)
    fill(bench)
    bench.add(make_request("x", max_tokens=20))
    bench.step()
    request = make_prompt("c")
    bench.add(request)
    assert [len(bench.step().loads) for _ in range(3)] == [8, 0, 0]
    assert not bench.scheduler._epoch.transfers._fetching.has_more
    bench.ends()
    assert request.num_cached == 32


def test_what_a_step_may_load_goes_to_who_came_first():
    prompts = {key: [ord(key)] * (4 * LOADED_AT_ONCE + 2) for key in "ab"}
    bench = make_bench(300, num_blocks=200, max_model_len=800, max_num_batched_tokens=800)
    for key, prompt in prompts.items():
        for name in "12":
            run(bench, make_request(key + name, token_ids=prompt, max_tokens=1))
    run(bench, make_request("z", token_ids=[i % 250 for i in range(790)], max_tokens=4))
    bench.add(make_request("x", max_tokens=20))
    bench.step()
    requests = [make_request(key, token_ids=prompts[key], max_tokens=9) for key in "ba"]
    bench.add(*requests)
    assert [len(bench.step().loads) for _ in range(3)] == [LOADED_AT_ONCE, LOADED_AT_ONCE, 0]
    assert [request.num_cached for request in requests] == [4 * LOADED_AT_ONCE] * 2
    bench.ends()


@pytest.mark.parametrize(("num_slots", "is_late"), [(100, False), (4, True)])
def test_what_is_loaded_takes_none_of_the_time_before_a_deadline(num_slots, is_late):
    watch = DeadlineWatch(demotes=False)
    policy = ranked(by_deadline, None, watch)
    bench = make_bench(num_slots, policy=policy, max_num_batched_tokens=8)
    fill(bench)
    bench.add(make_prompt("c", max_tokens=1, expires_at=1.0), make_request("d"))
    bench.scheduler.plan(1.0 - 2.5 * STEP_S)
    late = [one.request.key for one in bench.scheduler.take_late()]
    assert late == (["c"] if is_late else [])


def test_others_pass_who_waits():
    bench = make_bench()
    fill(bench)
    first = make_prompt("c")
    bench.add(first, make_request("x"))
    plan = bench.step()
    assert bench.running == {"x"}
    assert len(plan.loads) == 8
    assert first.num_passed == 1
    bench.step()
    assert bench.running == {"c", "x"} or "c" not in {r.key for r in bench.scheduler.requests}


def test_nobody_passes_who_was_passed_often_enough_while_its_blocks_are_loaded():
    bench = make_bench()
    fill(bench)
    first = make_prompt("c")
    first.num_passed = MAX_PASSES
    bench.add(first, make_request("x"))
    assert len(bench.step().loads) == 8
    assert bench.running == set()
    bench.step()
    assert first.num_cached == 32
    bench.ends()


def test_who_waits_for_loads_is_not_passed_for_ever():
    """Small ones come all the time, and take each block that becomes free."""
    bench = make_bench(max_num_seqs=64)
    fill(bench)
    source = (
        make_request(f"s{i}", token_ids=[50 + i % 100], max_tokens=3 + i % 5) for i in range(1000)
    )
    for _ in range(40):
        bench.add(next(source))
    for _ in range(10):
        bench.step()
    large = make_request("c", token_ids=[7] * 34 + [1] * 90, max_tokens=1)
    bench.add(large)
    num_steps = 0
    while large.started_at is None:
        bench.add(*(next(source) for _ in range(8)))
        bench.step()
        num_steps += 1
        assert num_steps < 100, "it is starved"
    assert large.num_passed <= MAX_PASSES + 64


def test_two_that_wait_for_the_same_have_it_loaded_once():
    bench = make_bench()
    fill(bench)
    requests = [make_prompt(key) for key in "cde"]
    plans = run(bench, *requests)
    assert len(loads_of(plans)) == 8
    assert [request.num_cached for request in requests] == [32] * 3


def test_what_is_lost_is_computed_and_not_asked_for_again():
    bench = make_bench()
    fill(bench)
    number = [one.key for one in bench.engine.tiers[0].values()].index(
        list(bench.scheduler._epoch.transfers._tiers._tiers[0].contents)[3]
    )
    bench.engine.lose(number)
    request = make_prompt("c")
    plans = run(bench, request)
    assert len(loads_of(plans)) == 8
    assert 0 < request.num_cached < 32
    assert bench.scheduler.stats.loads_failed == 1
    assert len(loads_of(run(bench, make_prompt("d")))) == 0, "the cache has it"
    wash_out(bench)
    request = make_prompt("e")
    run(bench, request)
    assert request.num_cached == 32, "it was saved again"


def test_a_request_that_is_cancelled_while_its_blocks_are_loaded_leaves_them_in_the_cache():
    bench = make_bench()
    fill(bench)
    bench.add(make_prompt("c"))
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    assert plan.loads
    bench.scheduler.finish("c")
    bench.scheduler.apply(bench.engine.submit(plan).result(None), 0.0)
    assert bench.scheduler.kv.num_used == 0
    request = make_prompt("d")
    assert loads_of(run(bench, request)) == []
    assert request.num_cached == 32


def test_what_is_loaded_for_who_was_cancelled_continues_what_is_to_be_given_up():
    """The beginning of the prompt is free, of low priority, and the first to be evicted."""
    bench = make_bench()
    fill(bench)
    low = (CacheRange(priority=0),)
    run(bench, make_request("c", token_ids=[7] * 6, max_tokens=1, retention=low))
    bench.add(make_prompt("d"))
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    assert plan.loads
    bench.scheduler.finish("d")
    bench.scheduler.apply(bench.engine.submit(plan).result(None), 0.0)
    check_invariants(bench.scheduler)
    for first in (100, 0):
        run(bench, make_request("z", token_ids=list(range(first, first + 150)), max_tokens=6))
        check_invariants(bench.scheduler)


def test_nothing_is_loaded_where_there_is_no_room_and_nobody_waits_in_vain():
    bench = make_bench()
    fill(bench)
    large = make_request("x", token_ids=[1] * 130, max_tokens=20)
    bench.add(large)
    while large.row is None or large.num_computed < 130:
        bench.step()
    waiting = make_prompt("c")
    bench.add(waiting)
    loads = [len(bench.step().loads) for _ in range(4)]
    assert loads == [5, 0, 0, 0]
    assert waiting.row is None
    bench.add(make_request("y", token_ids=[2] * 4, max_tokens=1))
    bench.step()
    assert 0 < waiting.num_passed <= MAX_PASSES, "it is treated as any that does not fit"
    assert bench.ends()
    assert waiting.num_cached > 0


def test_what_is_loaded_is_kept_also_where_others_have_reserved_all_that_may_be(monkeypatch):
    monkeypatch.setattr(kv_cache, "_MOST_RESERVED", 0)
    bench = make_bench(policy=ranked(by_priority()), max_num_seqs=1)
    fill(bench)
    first = [make_prompt(f"x{number}", token_id=100 + number, priority=0) for number in range(8)]
    last = make_prompt("c", priority=1)
    bench.add(first.pop(), last)
    plans = []
    while bench.scheduler.requests:
        plans.append(bench.step())
        if first and plans[-1].joins:  # who come first take more blocks than there are
            bench.add(first.pop())
    assert len(loads_of(plans)) == 8
    assert last.num_cached == 32


@pytest.mark.parametrize("num_more", [0, 120])
def test_what_is_evicted_again_before_its_request_begins_is_computed(monkeypatch, num_more):
    """It is not loaded for ever, however much of its prompt no tier has."""
    bench = make_bench()
    fill(bench)
    take_loaded = BlockTables.take_loaded

    def take_and_evict(blocks: BlockTables, *args) -> None:
        take_loaded(blocks, *args)
        num_usable = blocks.kv.num_usable
        blocks.kv.resize(1)
        blocks.kv.resize(num_usable)

    monkeypatch.setattr(BlockTables, "take_loaded", take_and_evict)
    request = make_prompt("c", token_ids=[7] * 34 + [8] * num_more)
    bench.add(request)
    fetching = bench.scheduler._epoch.transfers._fetching
    loads = [len(bench.step().loads) for _ in range(3)]
    assert loads == [8, 7, 7], "at least twice all eight"
    assert fetching.num_to_load(request, []) == 0
    assert bench.step().loads == []
    assert request.row is not None
    assert request.num_cached < 32
    assert bench.ends()
    assert not fetching._num_loaded


def test_who_may_displace_others_waits_for_its_blocks_first():
    rank = by_priority()
    bench = make_bench(policy=ranked(rank, DisplacementByPriority(rank)), max_num_seqs=1)
    fill(bench)
    bench.add(make_request("x", priority=1, max_tokens=40))
    bench.step()
    urgent = make_prompt("c", priority=0)
    bench.add(urgent)
    plan = bench.step()
    assert len(plan.loads) == 8
    assert bench.running == {"x"}
    bench.step()
    assert urgent.num_cached == 32
    bench.ends()


def begin(bench: Bench):
    """Plan a step and have the engine execute it; its result is applied later."""
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    return plan, bench.engine.submit(plan)


def test_who_waits_for_loads_of_a_step_in_flight_waits_for_its_end():
    bench = make_bench(async_scheduling=True)
    fill(bench)
    bench.add(make_request("x", max_tokens=20))
    bench.step()
    first, second = make_prompt("c"), make_prompt("d")
    bench.add(first)
    loading, one = begin(bench)
    bench.add(second)
    ahead, other = begin(bench)
    assert (len(loading.loads), len(ahead.loads)) == (8, 0)
    assert [*loading.joins, *ahead.joins] == []
    for pending in (one, other):
        bench.scheduler.apply(pending.result(None), 0.0)
        check_invariants(bench.scheduler)
    assert len(bench.step().joins) == 2
    bench.ends()
    assert (first.num_cached, second.num_cached) == (32, 32)


def test_what_another_one_has_computed_before_it_is_loaded_is_there_once():
    bench = make_bench(async_scheduling=True)
    fill(bench)
    bench.add(make_prompt("e", takes_hits=False, max_tokens=9))
    _, computing = begin(bench)
    bench.add(make_prompt("c"))
    loading, other = begin(bench)
    assert len(loading.loads) == 8
    for pending in (computing, other):
        bench.scheduler.apply(pending.result(None), 0.0)
        check_invariants(bench.scheduler)
    assert not bench.scheduler.kv._index._duplicates
    bench.ends()


def test_requests_that_take_no_hits_wait_for_nothing():
    bench = make_bench()
    fill(bench)
    assert loads_of(run(bench, make_prompt("c", takes_hits=False))) == []


def test_what_is_loaded_for_a_tenant_counts_to_its_share():
    bench = make_bench(
        policy=fair(by_arrival, lambda tenant: 1.0), cache_weight_of=lambda tenant: 1.0
    )
    for key in "ab":
        run(bench, make_prompt(key, tenant="t"))
    wash_out(bench)
    bench.add(make_prompt("c", tenant="t"))
    assert len(bench.step().loads) == 8
    assert bench.scheduler.kv._shares._tenants["t"].num_blocks == 8
    bench.ends()


def test_samples_wait_for_the_one_that_computes_their_prompt():
    bench = make_bench()
    fill(bench)
    first, second = make_prompt("c.0"), make_prompt("c.1", index=1)
    second.group = first.group
    assert len(loads_of(run(bench, first, second))) == 8


def test_nothing_is_loaded_into_a_block_that_a_sample_is_about_to_copy():
    """Sample f joins beside s. What comes next would displace s, but s was late and is the last."""
    policy = ranked(by_deadline, DisplacementByDeadline(), DeadlineWatch(demotes=True))
    bench = make_bench(policy=policy, max_num_seqs=3, max_num_batched_tokens=2)
    fill(bench)
    group, sample = Group("s"), {"token_ids": [50] * 6, "max_tokens": 3, "expires_at": 1e5}
    first = make_request("s", group=group, is_demoted=True, **sample)
    second = make_request("f", group=group, index=1, **sample, sampling=RowSampling(seed=2))
    beside = make_request("r", token_ids=[60] * 5, max_tokens=30, expires_at=1e4)
    outputs: dict[str, list[int]] = {}

    def step() -> StepPlan:
        plan = bench.scheduler.plan(0.0)
        assert plan is not None
        check_invariants(bench.scheduler)
        for update in bench.scheduler.apply(bench.engine.submit(plan).result(None), 0.0):
            outputs.setdefault(update.request.key, []).extend(update.token_ids)
        return plan

    bench.add(beside)
    while not beside.num_generated:
        step()
    bench.add(first, second)
    while first.num_computed < 5:
        step()
    bench.add(make_request("u", token_ids=[70] * 10, expires_at=2e5), make_prompt("w"))
    plan = step()
    (copy,) = plan.copies
    assert copy.source not in {load.block_id for load in plan.loads}
    while bench.scheduler.requests:
        step()
    assert outputs["f"] == echo_run([50] * 6, seed=2, max_tokens=3, vocab_size=256)


def test_a_load_whose_place_was_taken_meanwhile_is_not_planned():
    """What is evicted for it is saved in the only slot, in which it was."""
    bench = make_bench(1)
    fill(bench)
    run(bench, make_prompt("x", 3), make_prompt("y", 4))
    kv = bench.scheduler.kv
    kv._to_save.update(dict.fromkeys(kv._index._by_key))
    while kv._pool.num_empty:
        kv._pool.take()
    request = make_prompt("c")
    bench.add(request)
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    assert plan.loads == []
    assert plan.saves
